"""Real data-parallel training: one replica a rank, one data set, one plan, step after step."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.algorithms import Backend
from dpsim.comm.allreduce import allreduce
from dpsim.comm.broadcast import broadcast
from dpsim.comm.clock import now
from dpsim.comm.compression import Compression
from dpsim.comm.group import compile_once
from dpsim.comm.networks import transport
from dpsim.comm.transport import Transport
from dpsim.constraints import check_backend
from dpsim.data import Dataset, epoch_batches
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import AllreduceError
from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.lowering import lower
from dpsim.machine import Network, Selection
from dpsim.plan import Plan
from dpsim.replica import Batch, BatchSums, Capabilities, Replica, TunableReplica
from dpsim.runtime import rank_status
from dpsim.runtime.arena import Tensors, gathered
from dpsim.runtime.choosing import agree_on_table, choose, choose_selection, problems_of
from dpsim.runtime.describe import describe
from dpsim.runtime.device_leaves import check_leaves, described, fix_libraries_on_all
from dpsim.runtime.evaluation import digest, evaluated
from dpsim.runtime.log import TrainLog
from dpsim.runtime.micro_batches import batch_sizes, own_leaves, own_slots, plan_partial_sums
from dpsim.runtime.stages.groups import StageGroups
from dpsim.runtime.stall import StallWatch
from dpsim.runtime.step import StepOutcome, StepRunner
from dpsim.schedule import Schedule


class _Transports(NamedTuple):
    """The transports of a rank: for gradients, for decisions of a dynamic schedule, for sums in the fixed order."""

    gradients: Transport
    decisions: Transport | None
    exact: Transport | None


class Trainer:
    """A trainer of ``replica`` on ``dataset`` as ``plan`` says, on the ranks of ``comm``, one a device of the plan.

    Every rank draws the same global batches and takes its own share of samples; rank 0's initial state is
    broadcast. ``schedule`` is given where a fusion rule needs measured times; else it is lowered here. ``rate``
    gives the learning rate of each step, counted from 0, and must be the same function on every rank. A rank that
    waits for others for ``stall_after_s`` or longer says so on stderr (0 and infinity: never). ``selection`` is
    what algorithm ``auto`` takes by size; without one it is measured, once a processor type, and so is which code
    computes the operations of a ``TunableReplica``. With leaves nothing is measured: a table decides. Where the replica
    waits instead of computing (``EmulatedCompute``), ranks that wait for each other sleep. With ``backend`` cuda a
    ``DeviceReplica`` computes on the ranks' GPUs, where CUDA kernels reduce its gradients; other replicas compute on
    the host all the same.
    """

    def __init__(
        self,
        replica: Replica,
        dataset: Dataset,
        plan: Plan,
        comm: MPI.Intracomm,
        network: Network,
        *,
        seed: int = 0,
        schedule: Schedule | None = None,
        stall_after_s: float = 0.0,
        rate: Callable[[int], float] | None = None,
        selection: Selection | None = None,
        backend: Backend = "cpu",
    ) -> None:
        check_backend(backend, plan, network)
        self.computed_on = self.libraries = ""
        """Where gradients are computed and reduced, and what decides the bits there; empty on CPUs."""
        if backend == "cuda" and plan.leaves:
            fix_libraries_on_all(comm)
        able = Capabilities.of(replica)
        device_replica = able.device if backend == "cuda" else None
        self.kernel_table = ""
        """The digest of what decides which code computes: in leaves a table, else the choices by measurement."""
        if able.tunable is not None and device_replica is None:
            self._choose_code(able.tunable, dataset, plan, comm)
        self.replica, self.dataset, self.plan, self.comm, self.seed = replica, dataset, plan, comm, seed
        self.schedule = schedule if schedule is not None else lower(describe(replica, "model"), plan)
        self._sized = able.sized
        self.model_state = {name: (value.shape, value.dtype.name) for name, value in replica.state().items()}
        """Shape and dtype of the state of the whole model, of which a stage has a part."""
        self._groups = StageGroups.of(self.schedule, comm, network, sleeps=able.emulated is not None)
        transports = self._connect(network, selection, backend, able)
        self.transport = transports.gradients
        board = rank_status.watched_board(comm, stall_after_s)
        if plan.wire_dtype in SIXTEEN_BITS:
            compile_once(lambda: Compression(str(plan.wire_dtype)), comm)
        status = board.status if board else None
        self.runner = StepRunner(
            replica, self.schedule, self.transport, transports.decisions, status, rate, transports.exact, self._groups
        )
        self._watch = StallWatch(board, stall_after_s, self.runner.labels, self.runner.look) if board else None
        compile_once(self.runner.warm_up, comm)
        self.runner.initialise(seed)
        with self.waiting(rank_status.INITIAL_STATE):
            self._broadcast_state()
        self.epoch = 0
        self._batches = self._global_batches()
        self.log = _train_log(self.schedule, comm, len(dataset.train_y))

    def _connect(
        self, network: Network, selection: Selection | None, backend: Backend, able: Capabilities
    ) -> _Transports:
        """Open this rank's transports, and let a replica that computes on a GPU use their memory. Collective."""
        device_replica = able.device if backend == "cuda" else None
        transports = _transports(
            self.schedule,
            self._groups,
            self.comm,
            network,
            selection,
            backend,
            sleeps=able.emulated is not None,
            on_device=device_replica is not None,
        )
        if backend == "cuda":
            self.computed_on, self.libraries = described(transports.gradients, self.comm)
        if device_replica is not None:
            device_replica.compute_in(transports.gradients.memory)
            if self.plan.leaves:
                check_leaves(device_replica, self.dataset, self.plan, self.comm)
        return transports

    def _choose_code(self, replica: TunableReplica, dataset: Dataset, plan: Plan, comm: MPI.Intracomm) -> None:
        """Decide which code computes the replica's operations: by measurement, or in leaves by rank 0's table."""
        if plan.leaves:
            table = agree_on_table(replica.code_table, comm)
            replica.use(table=table)
            self.kernel_table = table.digest
            return
        rows = comm.allgather(batch_sizes(plan, plan.place_of(comm.rank), len(dataset.train_y), len(dataset.test_y)))
        problems = problems_of(replica, set().union(*(batches for batches, _ in rows)), {test for _, test in rows})
        choices = choose(problems, replica.timing, comm)
        replica.use(choices=choices)
        self.kernel_table = choices.digest(problems)

    def step(self) -> StepOutcome:
        """Train on the next global batch; the next epoch begins when the data set is used up."""
        begin_s = now()
        share, samples = self.next_share()
        try:
            outcome = self.runner.run(share, samples, begin_s)
        except AllreduceError as error:
            raise error.of_bucket(self.runner.look()[0]) from error
        self.log.add(outcome)
        return outcome

    def next_share(self) -> tuple[Batch, int]:
        """Return this rank's share of the next global batch, and that batch's size."""
        indices = next(self._batches)
        edges = own_leaves(self.plan, self.rank, len(indices), self.plan.accumulate)
        low, high = edges[0], edges[-1]
        x, labels = self.dataset.train_batch(indices[low:high])
        share = Batch(
            x=x,
            labels=labels,
            leaves=tuple(edge - low for edge in edges),
            seed=self.seed,
            step=self.runner.steps,
            first_sample=low,
        )
        return share, len(indices)

    @property
    def rank(self) -> int:
        """This rank among those that compute the same layers: which of the samples are its own."""
        return self.transport.rank

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank has allocated: parameters, gradients, optimizer state, running statistics, activations.

        0 where the replica does not know what it computes in. Without the transport's own buffers.
        """
        if self._sized is None:
            return 0
        statistics = sum(value.nbytes for value in self.replica.state().values())
        return sum(self.runner.memory_bytes.values()) + statistics + self._sized.work_bytes

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.dataset.train_y) // self.plan.global_batch)

    def evaluate(self) -> BatchSums:
        """Return sums over the whole test set, each rank taking a share; exact at any device count.

        With the mean over the ranks of running statistics (see ``averaged_state``); nothing of training changes.
        """
        self.runner.memory.use()
        self.runner.status.evaluates()
        edges = own_leaves(self.plan, self.rank, len(self.dataset.test_y))
        with self.averaged_state(), self._parameters_in_memory():
            leaves = [
                evaluated(self.runner.evaluate, self.dataset, low, high) for low, high in itertools.pairwise(edges)
            ]
        slots = [
            fold(leaf_tree(stop - first), leaves[first:stop].__getitem__, operator.add)
            for first, stop in own_slots(self.plan, self.rank)
        ]
        with self.waiting(rank_status.EVALUATION):
            totals = self.runner.ordered_sum(slots)
            if self._groups is not None:
                totals = self.comm.bcast(totals, self.comm.size - 1)
        return BatchSums(loss=float(totals[0]), correct=int(totals[1]), samples=int(totals[2]))

    @contextlib.contextmanager
    def _parameters_in_memory(self) -> Iterator[None]:
        """Hold all parameters of the replica's layers meanwhile. Collective where they are shards between steps."""
        if not self.schedule.gathers_before_use:
            yield
            return
        with self.waiting(rank_status.EVALUATION):
            parameters = self.parameters()
        self.replica.bind(parameters, {name: np.zeros_like(value) for name, value in parameters.items()})
        yield
        self.runner.bind_again()

    @contextlib.contextmanager
    def averaged_state(self) -> Iterator[None]:
        """Set running statistics, which each rank gathers from its samples, to their mean over the ranks meanwhile.

        Of whole numbers (counts of batches) it is the mean without its fraction.
        Collective. Afterwards each rank has its own again. Without batch norm's mode ``local`` all ranks have the same.
        """
        if self.plan.batch_norm != "local":
            yield
            return
        state, memory = sorted(self.replica.state().items()), self.runner.arena.memory
        own = [value.copy() for value in self.state_on_host().values()]
        try:
            with self.waiting(rank_status.EVALUATION):
                for (_, value), before in zip(state, own, strict=True):
                    flat = before.reshape(-1).astype(before.dtype if before.dtype.kind == "f" else np.float64)
                    allreduce(self.transport, flat, "recursive-doubling")
                    flat /= self.plan.data_devices
                    memory.write(value, flat.reshape(value.shape))
            self.runner.status.evaluates()
            yield
        finally:
            for (_, value), before in zip(state, own, strict=True):
                memory.write(value, before)

    def resume_from(self, step: int) -> None:
        """Count ``step`` steps as done: the next batch, learning rate and random numbers are those of the next one."""
        self.runner.steps = step
        self.epoch, batches = divmod(step, self.steps_per_epoch)
        self._batches = itertools.islice(self._global_batches(), batches, None)

    def begin_anew(self) -> None:
        """Train again from the first step, with the initial parameters and optimizer state. Running statistics stay."""
        self.runner.initialise(self.seed)
        self.resume_from(0)

    def digest(self) -> str:
        """Return the SHA-256 of parameters, optimizer state and replica state, tensor by tensor in name order.

        Collective where a rank does not have everything.
        """
        return digest((self.parameters(), *self.optimizer_state().values(), self.whole_state()))

    def optimizer_state(self, root: int | None = None) -> Tensors:
        """Return all optimizer state by slot and name, on every rank or on ``root``. Collective where it is divided."""
        arena = self.runner.arena
        state = {slot: gathered(arena, self.comm, own, root) for slot, own in arena.optimizer_state.items()}
        return state if root in (None, self.comm.rank) else {}

    def parameters(self, root: int | None = None) -> dict[str, NDArray[Any]]:
        """Return all parameters by name, as host arrays, on every rank or on ``root``. Collective where divided.

        They may share the memory of the arena.
        """
        arena = self.runner.arena
        if arena.has_all_parameters:
            return arena.on_host(arena.parameters)
        return gathered(arena, self.comm, arena.packed(arena.kept_parameters, arena.shard_parameters), root)

    def gradients(self) -> dict[str, NDArray[Any]]:
        """Return the sums of the last step's gradients by name, as host arrays. Collective where they are divided."""
        arena = self.runner.arena
        return gathered(arena, self.comm, arena.packed(arena.kept_gradients, arena.shard_gradients))

    def whole_state(self) -> dict[str, NDArray[Any]]:
        """Return the replica's state in the order of its names, of all stages; collective where there are several."""
        state = self.state_on_host()
        if self._groups is None:
            return state
        every = {name: value for of_rank in self.comm.allgather(state) for name, value in of_rank.items()}
        return every | state

    def state_on_host(self) -> dict[str, NDArray[Any]]:
        """Return the replica's state in the order of its names, as host arrays."""
        state = self.replica.state()
        names = sorted(state)
        return dict(zip(names, self.runner.arena.memory.fetch([state[name] for name in names]), strict=True))

    def waiting(self, location: int) -> AbstractContextManager[None]:
        """Mark what the ranks do together between steps: a stall in it is reported at ``location``."""
        return self.runner.status.waiting(location)

    def close(self) -> None:
        self.runner.close()
        if self._watch is not None:
            self._watch.close()
        self.transport.close()
        if self._groups is not None:
            self._groups.close()

    def _broadcast_state(self) -> None:
        """Send rank 0's parameters and running statistics to every rank. Optimizer state is zero on all of them."""
        arena = self.runner.arena
        if arena.has_all_parameters:
            self.broadcast_in(arena.parameters)
        for _, value in sorted(self.replica.state().items()):
            self.broadcast_in(value)

    def broadcast_in(self, value: NDArray[Any]) -> None:
        """Make an array of the replica's memory equal to that of the class's first rank on every rank. Collective."""
        memory = self.runner.arena.memory
        (host,) = memory.fetch([value])
        broadcast(self.transport, host.reshape(-1))
        memory.write(value, host)

    def _global_batches(self) -> Iterator[NDArray[np.int64]]:
        while True:
            yield from epoch_batches(len(self.dataset.train_y), self.plan.global_batch, self.seed, self.epoch)
            self.epoch += 1


def _train_log(schedule: Schedule, comm: MPI.Intracomm, samples: int) -> TrainLog:
    """Return the log of a training with so many samples; the ranks of the last class know the loss."""
    plan, last_class = schedule.plan, schedule.classes - 1
    knowing = [rank for rank in range(comm.size) if schedule.class_of(rank) == last_class]
    return TrainLog(comm, samples, plan.global_batch, plan_partial_sums(plan).tree, knowing)


def _transports(
    schedule: Schedule,
    groups: StageGroups | None,
    comm: MPI.Intracomm,
    network: Network,
    selection: Selection | None,
    backend: Backend,
    *,
    sleeps: bool,
    on_device: bool,
) -> _Transports:
    """Open a rank's transports, among the ranks of its class. A missing ``selection`` is measured. Collective."""
    plan = schedule.plan
    group, world = (comm, None) if groups is None else (groups.alike, groups.world)
    measurable = not (plan.leaves or network.paced or backend == "cuda") and group.size > 1
    if selection is None and plan.algorithm == "auto" and measurable:
        selection = choose_selection(group)
    gradients = transport(
        group,
        network,
        plan.data_layout.of_a_node,
        selection,
        backend,
        sleeps=sleeps,
        on_device=on_device,
        algorithm=plan.algorithm,
        world=world,
    )
    decisions = transport(group, network, sleeps=sleeps) if schedule.dynamic else None
    sums = group.size > 1 and (plan.leaves or plan.batch_norm == "global")
    exact = transport(group, network, sleeps=sleeps, world=world) if sums else None
    return _Transports(gradients, decisions, exact)
