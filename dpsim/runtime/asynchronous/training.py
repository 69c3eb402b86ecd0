"""Asynchronous training: each worker pulls parameters, computes a micro-batch and pushes its gradient, in no step.

Update k is of micro-batch k mod n of global batch k div n, whoever of the n workers takes it: an epoch has the samples
of a synchronous one. Where all update the same parameters, each does so with 1/n of that step's learning rate. Which
gradient is made from which parameters depends on the workers' speeds, and on nothing else: a micro-batch is computed as
one leaf, whose bits are the same everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.clock import now
from dpsim.data import Dataset, epoch_batches, shard
from dpsim.errors import ConfigError, NotFiniteError
from dpsim.nn.network import NoEvents
from dpsim.optimizer import AdamW, Lars, Sgd
from dpsim.plan import Plan
from dpsim.records.train import TrainResult
from dpsim.replica import Array, Batch, BatchSums, Capabilities, Replica
from dpsim.runtime.asynchronous.cells import Cells
from dpsim.runtime.asynchronous.shared_updates import SharedUpdates
from dpsim.runtime.asynchronous.update_order import Compute, Pull, UpdateOrder
from dpsim.runtime.choosing import agree_on_table
from dpsim.runtime.evaluation import digest, evaluated
from dpsim.strategy import ASYNCHRONOUS, Asynchronous

if TYPE_CHECKING:
    from mpi4py import MPI

_ALIGNED = 16
"""Elements between the beginnings of tensors: whole lines of the cache."""

Rate = Callable[[int], float]


class Worker:
    """A replica with flat parameters and gradients of its own, which computes the micro-batches of updates.

    ``workers`` is the number of micro-batches of a global batch. Raises ``ConfigError`` for a replica with state.
    """

    def __init__(self, replica: Replica, dataset: Dataset, plan: Plan, workers: int, seed: int, comm: MPI.Intracomm):
        if replica.state():
            raise ConfigError(
                f"strategy {plan.strategy} for a model with running statistics, which each worker would have alone",
                allowed="models without batch norm",
                remedy="use a model with norm=group, or another --strategy",
            )
        able = Capabilities.of(replica)
        able.multiply_in(plan.compute_dtype)
        if able.tunable is not None:
            able.tunable.use(table=agree_on_table(able.tunable.code_table, comm))
        if able.leaf is not None:
            able.leaf.train_in_leaves(True, None)
        self.replica, self._emulated = replica, able.emulated
        self._dataset, self._plan, self._workers, self._seed = dataset, plan, workers, seed
        tensors = [tensor for layer in replica.layers for tensor in layer.tensors]
        lengths = [-(-tensor.elements // _ALIGNED) * _ALIGNED for tensor in tensors]
        starts = [0, *itertools.accumulate(lengths)]
        self._parts = {
            t.name: (slice(start, start + t.elements), t.shape) for t, start in zip(tensors, starts, strict=False)
        }
        self.parameters = self._filled(replica.initial_parameters(seed), starts[-1])
        self.gradients = np.zeros_like(self.parameters)
        self.steps_per_epoch = -(-len(dataset.train_y) // plan.global_batch)
        self._batches = functools.lru_cache(maxsize=2)(
            lambda epoch: epoch_batches(len(dataset.train_y), plan.global_batch, seed, epoch)
        )
        replica.bind(self.views(self.parameters), self.views(self.gradients))

    def _filled(self, values: Mapping[str, Array], elements: int) -> Array:
        """Return the flat array of all tensors, aligned as memory of the runtime is."""
        memory = np.zeros(elements + _ALIGNED, next(iter(values.values())).dtype)
        first = -memory.ctypes.data % (_ALIGNED * memory.itemsize) // memory.itemsize
        flat = memory[first : first + elements]
        for name, value in self.views(flat).items():
            value[...] = values[name]
        return flat

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the tensors by name in a flat array."""
        return {name: flat[part].reshape(shape) for name, (part, shape) in self._parts.items()}

    def compute(self, ticket: int) -> tuple[BatchSums, float]:
        """Compute the gradients of an update: its sums, and by what its gradients are multiplied."""
        step, number = divmod(ticket, self._workers)
        indices = self._batches(step // self.steps_per_epoch)[step % self.steps_per_epoch]
        low, high = shard(len(indices), self._workers, number)
        if low == high:
            self.gradients[...] = 0
            return BatchSums(loss=0.0, correct=0, samples=0), 1.0
        x, labels = self._dataset.train_batch(indices[low:high])
        batch = Batch(x=x, labels=labels, leaves=(0, high - low), seed=self._seed, step=ticket, first_sample=low)
        if self._emulated is not None:
            self._emulated.resumes_at(now())
        sums = self.replica.forward_backward(batch, NoEvents()).fetch()
        if not np.isfinite(sums.loss):
            raise NotFiniteError(f"the loss is {sums.loss} in update {ticket + 1}", remedy="lower --learning-rate")
        return sums, 1.0 / (high - low)

    def result(
        self,
        copies: Sequence[Array],
        order: UpdateOrder,
        losses: NDArray[np.float64],
        apart: NDArray[np.float64],
        seconds: float,
    ) -> TrainResult:
        """Return the result of an order of updates; the test set is computed with the mean of the copies' parameters.

        ``copies`` are parameters and optimizer state [1 + slots, elements] of each; ``losses`` are sums over the
        samples of updates, and ``apart`` is what ``average`` returned in each.
        """
        self.parameters[...] = np.mean([copy[0] for copy in copies], axis=0)
        loss, correct, samples = evaluated(self.replica.evaluate, self._dataset, 0, len(self._dataset.test_y)).tolist()
        steps = len(losses) // self._workers
        sizes = [len(batch) for epoch in range(-(-steps // self.steps_per_epoch)) for batch in self._batches(epoch)]
        of_steps = losses.reshape(steps, self._workers).sum(axis=1) / sizes[:steps]
        return TrainResult(
            devices=self._plan.devices,
            steps=steps,
            test_accuracy=correct / samples,
            test_loss=loss / samples,
            final_loss=float(of_steps[-1]),
            step_s=seconds / steps,
            images_per_s=sum(sizes[:steps]) / seconds,
            exposed_communication_s=0.0,
            digest=digest(self.views(flat) for copy in copies for flat in copy),
            losses=tuple(of_steps.tolist()),
            optimizer_state_bytes=copies[0][1:].nbytes,
            mean_staleness=order.mean_staleness,
            consensus_distance=float(np.mean(apart)),
        )


def _asynchronous(plan: Plan) -> tuple[Asynchronous, Sgd | AdamW]:
    """Return the strategy and the optimizer of a plan. Raises ``ConfigError`` where devices make steps together."""
    if not isinstance(plan.parallelism, Asynchronous) or isinstance(plan.optimizer, Lars):
        raise ConfigError(
            f"strategy {plan.strategy} where each device updates when it has a gradient",
            allowed=f"{' or '.join(ASYNCHRONOUS)}, with sgd or adamw",
            remedy="choose one of them with --strategy",
        )
    return plan.parallelism, plan.optimizer


def train(
    comm: MPI.Intracomm,
    worker: Worker,
    plan: Plan,
    steps: int,
    rate: Rate,
) -> tuple[TrainResult, UpdateOrder] | None:
    """Train for as many updates as ``steps`` steps of every worker have; ``rate`` is a step's learning rate.

    Returns the result and the order of updates on the first rank that is alive at the end. Between the start and that
    no rank sends a message, so that the death of a worker stops nobody. ``step_s`` is the mean time of n updates.
    """
    strategy, optimizer = _asynchronous(plan)
    sharers = comm.size // strategy.copies(comm.size)
    shared = SharedUpdates(comm, worker.parameters, strategy, optimizer, steps * comm.size)
    with contextlib.closing(shared):
        begin_s = now()
        while (ticket := shared.take()) is not None:
            shared.pull(ticket, worker.parameters)
            sums, scale = worker.compute(ticket)
            shared.push(ticket, worker.gradients, sums.loss, rate(ticket // comm.size) / sharers, scale)
        if not shared.finish():
            return None
        seconds, order = float(shared.ends_s.max()) - begin_s, shared.order
        return worker.result(shared.cells.newest(order), order, shared.losses, shared.apart, seconds), order


def replay(comm: MPI.Intracomm, worker: Worker, plan: Plan, order: UpdateOrder, rate: Rate) -> TrainResult:
    """Make the updates of a recorded order again, on any number of ranks; they end in the same bits on all of them.

    Gradients that can be computed at once are divided among the ranks; every rank makes every update. Collective.
    Raises ``ConfigError`` for the order of another strategy.
    """
    strategy, optimizer = _asynchronous(plan)
    workers, parameters = len(order.orders), worker.parameters.copy()
    copies = strategy.copies(workers)
    left = Counter(itertools.chain.from_iterable(order.orders))
    _check_order(order, left, plan)
    values = np.zeros((copies, 1 + len(optimizer.slots), 2, len(parameters)), parameters.dtype)
    cells = Cells(values, workers, optimizer)
    cells.initialise(parameters)
    versions, made = [0] * workers, [0] * workers
    losses, apart = np.zeros((2, len(order.takers)))
    pulled: dict[int, Array] = {}
    gradients: dict[int, tuple[Array, float]] = {}
    ready: list[int] = []
    begin_s = now()
    for step in order.steps():
        if isinstance(step, Pull):
            cells.pull(step.cell, versions[step.cell], pulled.setdefault(step.ticket, np.empty_like(parameters)))
        elif isinstance(step, Compute):
            ready.append(step.ticket)
        else:
            if step.ticket not in gradients:
                for ticket, gradient, scale, loss in _computed(comm, worker, ready, pulled):
                    gradients[ticket], losses[ticket] = (gradient, scale), loss
                for ticket in ready:
                    del pulled[ticket]
                ready.clear()
            gradient, scale = gradients[step.ticket]
            of_step = rate(step.ticket // workers) / (workers // copies)
            before, first = [versions[cell] for cell in step.cells], step.cells[0]
            apart[step.ticket] = cells.push(step.cells, before, made[first], gradient, of_step, scale)
            made[first] += 1
            for cell in step.cells:
                versions[cell] += 1
            left[step.ticket] -= len(step.cells)
            if not left[step.ticket]:
                del gradients[step.ticket]
    return worker.result(cells.newest(order), order, losses, apart, now() - begin_s)


def _check_order(order: UpdateOrder, tickets: Iterable[int], plan: Plan) -> None:
    """Raise ``ConfigError`` where the updates pull from other numbers of cells than those of the plan's strategy."""
    strategy, _ = _asynchronous(plan)
    pulled_cells = {sum(version >= 0 for version in order.pulls[ticket]) for ticket in tickets}
    if pulled_cells - {len(strategy.groups(0, len(order.orders), 0))}:
        raise ConfigError(
            f"an order of updates that strategy {plan.strategy} cannot make",
            allowed="the order of a training with the same strategy",
            remedy="record it again with --record",
        )


def _computed(
    comm: MPI.Intracomm, worker: Worker, tickets: Sequence[int], pulled: Mapping[int, Array]
) -> list[tuple[int, Array, float, float]]:
    """Return ticket, gradient, scale and loss of every ticket; each rank computes its share of them. Collective."""
    own = []
    for ticket in tickets[comm.rank :: comm.size]:
        worker.parameters[...] = pulled[ticket]
        sums, scale = worker.compute(ticket)
        own.append((ticket, worker.gradients.copy(), scale, sums.loss))
    return [each for of_rank in comm.allgather(own) for each in of_rank]
