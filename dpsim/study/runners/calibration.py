"""Calibrations on running ranks: collectives with nothing else running, and during computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec
from dpsim.collective import size_ladder
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.compression import compression
from dpsim.comm.group import first_ranks, group_of, quiet_barrier, start_together
from dpsim.comm.networks import transport
from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.progress import BucketAllreduce
from dpsim.comm.progress import Progress as AllreduceProgress
from dpsim.comm.progress import progress as overlap_mechanism
from dpsim.comm.selection import select
from dpsim.comm.shaped import ceiling_bytes_per_s, enter
from dpsim.comm.transport import Transport, wait
from dpsim.machine import Network, Selection
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.replica import Array
from dpsim.runtime.micro_batches import plan_partial_sums
from dpsim.study import measure
from dpsim.study.calibration import ALONE_S, LOSS_S, TIME_S, TOGETHER_S, WAKE_S, CalibrateConfig, load_slowdown
from dpsim.study.disturbance import Judge, RowMarks, Seen, Watcher
from dpsim.study.loop import rounds, until_known
from dpsim.study.profile import AT_S, narrow
from dpsim.study.rows import CalibratedCollective, CalibratedLoad, Rows
from dpsim.study.runners.load import Load, ReplicaLoad, StandIn, nothing
from dpsim.study.time_limit import first_rounds_text

_MOST_ROUNDS = 60
_LEAST_LOAD_S = 1e-3
_LOADED_S = 4e-3
_MOST_AT_ONCE = 20
_IDLE_SAMPLES = 3
"""Allreduces of each size in a visit of an idle table."""
_MOST_IN_A_ROW, _IN_A_ROW_BYTES = 8, 2**18
_MOST_SUMMED_BYTES = 2**16
"""Statistics of batch norm are small; larger ordered sums are extrapolated."""
_STOPS = ("ordered-sum", "send")
"""What a rank stops computing for."""
_BEHIND_COMPUTATION = (*_STOPS, "copy")
_OWN_CACHES_BYTES = 2**21
_GLOBAL_BATCH = 64
"""The global batch for which float16 messages are scaled; the times do not depend on it."""


class Visited(measure.Visited, Protocol):
    """What the rounds of a study visit, and end."""

    def close(self) -> None: ...


class CollectiveTable:
    """The visits to one collective at each of its sizes. A visit takes ``parts`` turns to come through all sizes.

    The ranks of ``group`` take part; its first one keeps the rows, each value that of the slowest rank.
    """

    def __init__(
        self,
        group: MPI.Intracomm,
        link: Transport,
        subject: CalibratedCollective,
        config: CalibrateConfig,
        rows: Rows,
        parts: int = 1,
        watcher: Watcher | None = None,
    ) -> None:
        self.group, self.link, self.subject, self.rows, self.parts = group, link, subject, rows, parts
        self.watcher = watcher
        """Without one it is not known what was disturbed."""
        if watcher is not None:
            crowded = watcher.crowded(waits=link.nap_s > 0, communication_thread=subject.overlap == "thread")
            self._marks = RowMarks(subject, Judge(crowded=crowded))
        self._sampled: list[int] = []
        summed = subject.collective.kind == "ordered-sum"
        self.compression = None if summed else compression(config.wire_dtype, np.dtype(np.float32), _GLOBAL_BATCH)
        ladder = size_ladder(min(config.max_bytes, _MOST_SUMMED_BYTES) if summed else config.max_bytes)
        self.sizes = ladder
        self._visits = group.bcast(rows.next_visit(subject))
        self.first_s: dict[int, float] = {}
        """What each size took at first, on this rank: roughly known before anything counts."""
        self._prepare()

    def _prepare(self) -> None:
        """Allocate what is reduced. Collective."""

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``. What is done for the first time does not count."""
        part = self._visits % self.parts
        order = np.random.default_rng([number % 2**32, len(self.sizes)]).permutation(self.sizes[part :: self.parts])
        if not self.first_s:
            if self.watcher is not None:
                self.watcher.begin()
            self.first_s = {size: min(values) for size, values in self._visit(self.sizes)[TIME_S].items()}
        self._sampled.clear()
        if self.watcher is not None:
            self.watcher.begin()
        taken = self._visit(order.tolist())
        seen = None if self.watcher is None else self.group.gather(self.watcher.seen())
        for quantity, times in taken.items():
            for size, values in times.items():
                gathered = self.group.gather(values)
                if gathered is not None:
                    kept = np.mean(gathered, axis=0) if quantity == LOSS_S else np.max(gathered, axis=0)
                    self.rows.add(self.subject, quantity, self._visits, kept, size)
        if seen is not None:
            of_size = {size: iter(values) for size, values in taken[TIME_S].items()}
            samples_s = {number: next(of_size[size]) for number, size in enumerate(self._sampled)}
            self._marks.add(self.rows, self._visits, seen, samples_s, self._sampled)
        self._visits += 1
        return True

    def _sample_begins(self) -> None:
        if self.watcher is not None:
            self.watcher.sample_begins()

    def _sample_ends(self, size: int) -> None:
        self._sampled.append(size)
        if self.watcher is not None:
            self.watcher.sample_ends()

    def _visit(self, order: Sequence[int]) -> dict[str, dict[int, list[float]]]:
        """Return the seconds that this rank took, by quantity and size."""
        raise NotImplementedError

    def _between(self, times_s: Sequence[tuple[float, float]], *, together: bool = True) -> NDArray[np.float64]:
        """Return the seconds from starts to ends; ``together``: of what begins when all ranks are there. Collective.

        Ranks that share cores wake one after another, up to a millisecond apart: no part of a collective in a queue.
        """
        starts, ends = np.array(times_s).T
        if together and self.link.nap_s:
            starts = np.max(self.group.allgather(starts), axis=0)
        seconds: NDArray[np.float64] = ends - starts
        return seconds

    def close(self) -> None:
        """End what was started. Collective."""


class IdleTable(CollectiveTable):
    """How long one collective takes with nothing else running; its buffer is rewritten before, as backward does.

    Computation stands between that and what is not done in shared memory in one call, whose cost is that of code and
    arrays which are not in the caches any more. Ranks that wait instead of computing keep them there; but where such a
    rank stops for a sum or a message it has just slept, and how late it wakes counts. Of collectives in a queue, which
    follow one another, it is taken apart.
    """

    def _prepare(self) -> None:
        computes = self.subject.collective.kind in _BEHIND_COMPUTATION and not self.link.nap_s
        self._computation = _Computation() if computes else None
        buffers = {size: self.link.allocate(size).view(np.float32) for size in self.sizes}
        self._prepared = {size: (buffer, self._collective(buffer)) for size, buffer in buffers.items()}

    def _collective(self, buffer: Array) -> Callable[[], object]:
        collective = self.subject.collective
        if collective.kind == "send":
            return functools.partial(_ping_pong, self.link, buffer)
        if collective.kind == "copy":
            return functools.partial(np.copyto, np.empty_like(buffer), buffer)
        if collective.kind == "ordered-sum":  # a sum for which every rank waits
            plan = Plan(devices=self.link.size, global_batch=self.link.size)
            return functools.partial(ordered_sum(self.link, plan_partial_sums(plan)), [buffer])
        return prepare(self.link, buffer, collective.algorithm, self.compression, kind=collective.kind).run

    def _visit(self, order: Sequence[int]) -> dict[str, dict[int, list[float]]]:
        times_s: dict[int, list[tuple[float, float]]] = {size: [] for size in order}
        late_s: dict[int, list[float]] = {size: [] for size in order}
        kind = self.subject.collective.kind
        stops, messages = kind in _STOPS, 2 if kind == "send" else 1
        for _ in range(_IDLE_SAMPLES):
            for size in order:
                buffer, run = self._prepared[size]
                buffer[...] = 1.0
                if self._computation is not None:
                    self._computation.run()
                self._sample_begins()
                start_s, begin_s = start_together(self.group, asleep=bool(self.link.nap_s)), now()
                for _ in range(self._in_a_row(size)):
                    run()
                times_s[size].append((start_s if stops else begin_s, now()))
                self._sample_ends(size)
                late_s[size].append(begin_s - start_s)
        seconds = {
            size: self._between(times, together=kind != "copy") / messages / self._in_a_row(size)
            for size, times in times_s.items()
        }
        taken = {TIME_S: {size: values.tolist() for size, values in seconds.items()}}
        return taken | ({WAKE_S: late_s} if self.link.nap_s and kind == "allreduce" else {})

    def _in_a_row(self, size: int) -> int:
        """Return how many collectives follow one another in a sample.

        On shaped hosts a lone short message goes at any speed after a pause, until it has used up what the link may
        send at once; those of a step follow one another.
        """
        if not self.link.network.shaped or self.subject.collective.kind in _BEHIND_COMPUTATION:
            return 1
        return max(1, min(_MOST_IN_A_ROW, _IN_A_ROW_BYTES // size))


class _Computation:
    """A matrix product, and a pass over as much memory as a core's own caches hold: about half a millisecond."""

    def __init__(self) -> None:
        self._matrix = np.ones((256, 256), np.float32)
        self._memory = np.zeros(_OWN_CACHES_BYTES, np.uint8)

    def run(self) -> None:
        np.matmul(self._matrix, self._matrix)
        self._memory += 1


def _ping_pong(link: Transport, buffer: Array) -> None:
    """A message from rank 0 to rank 1, and then one back."""
    for sender in (0, 1):
        wait(link, [link.send(buffer, 1 - sender) if link.rank == sender else link.receive(buffer, sender)])


class LoadedTable(CollectiveTable):
    """How long a collective takes under a running load, and how much longer the load takes for it.

    The load alone and the load with collectives alternate; every collective ends well before the load does. How many
    run at once follows from the times of the ``idle`` table.
    """

    def __init__(
        self, idle: CollectiveTable, link: Transport, subject: CalibratedCollective, load: Load, config: CalibrateConfig
    ) -> None:
        self.idle, self.load = idle, load
        super().__init__(idle.group, link, subject, config, idle.rows, idle.parts, idle.watcher)

    def _prepare(self) -> None:
        self.sizes = self.sizes[::-2][::-1]  # every second size, the largest among them
        self._intervals_s: list[tuple[float, float]] = []
        self._mechanism = self._overlap()
        self._collectives: dict[int, list[BucketAllreduce]] = {}
        self._units: dict[int, int] = {}

    def _overlap(self) -> AllreduceProgress:
        """Return what runs the collectives beside the load, and calls ``_reduced`` for each."""
        algorithm = self.subject.collective.algorithm
        return overlap_mechanism(self.link, algorithm, self.subject.overlap, self._reduced, self.compression)

    def _reduced(self, bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        self._intervals_s.append((start_s, end_s))

    def _allocate(self) -> None:
        """Choose how many collectives of each size to submit at once, and how long a load that needs."""
        first = self.group.allgather(self.idle.first_s)
        idle_s = {size: max(of_rank[size] for of_rank in first) for size in self.sizes}
        unit_s = max(self.group.allgather(self.load.unit_s))
        for size in self.sizes:
            count = self._at_once(size, idle_s[size])
            buffers = [self.link.allocate(size).view(np.float32) for _ in range(count)]
            kind = self.subject.collective.kind
            self._collectives[size] = [self._mechanism.prepare(buffer, kind=kind) for buffer in buffers]
            self._units[size] = math.ceil(2.5 * max(count * idle_s[size], _LEAST_LOAD_S) / unit_s)

    def _at_once(self, size: int, idle_s: float) -> int:
        """Return how many collectives of a size, each of which takes ``idle_s`` alone, are submitted together."""
        return max(1, min(_MOST_AT_ONCE, int(_LOADED_S / max(idle_s, 1e-6))))

    def _visit(self, order: Sequence[int]) -> dict[str, dict[int, list[float]]]:
        if not self._units:
            self._allocate()
        times: dict[int, list[float]] = {}
        losses: dict[int, list[float]] = {}
        for size in order:
            count = len(self._collectives[size])
            self._sample_begins()
            start_together(self.group, asleep=bool(self.link.nap_s))
            plain_s = self.load.run(self._units[size], nothing)
            self._intervals_s.clear()
            start_together(self.group, asleep=bool(self.link.nap_s))
            start_s = now()
            for collective in self._collectives[size]:
                self._mechanism.submit(0, collective)
            self.load.run(self._units[size], self._mechanism.poll)
            loaded_s = now() - start_s
            self._mechanism.finish()
            self._sample_ends(size)
            times[size] = [float(self._between(self._intervals_s).sum()) / count]
            losses[size] = [(loaded_s - plain_s) / count]
        return {TIME_S: times, LOSS_S: losses}

    def close(self) -> None:
        self._mechanism.close()


class LoadContention:
    """How long the stand-in takes on rank 0 alone, then on the slowest of several ranks."""

    def __init__(self, comm: MPI.Intracomm, subject: CalibratedLoad, rows: Rows, watcher: Watcher) -> None:
        self._comm, self._subject, self._rows, self._load = comm, subject, rows, StandIn()
        self._watcher, self._marks = watcher, RowMarks(subject, Judge(crowded=watcher.crowded()))
        self._groups = {ALONE_S: first_ranks(comm, 1), TOGETHER_S: first_ranks(comm, subject.devices)}

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``."""
        seen: list[Seen] = []
        longest_s = 0.0
        for quantity, group in self._groups.items():
            quiet_barrier(self._comm)
            if group is not None:
                group.Barrier()
                self._watcher.begin()
                load_s = self._load.run(math.ceil(_LEAST_LOAD_S / self._load.unit_s), nothing)
                self._watcher.sample_ends()
                seen += group.gather(self._watcher.seen()) or []
                slowest_s = group.allreduce(load_s, MPI.MAX)
                longest_s = max(longest_s, slowest_s)
                self._rows.add(self._subject, quantity, number, [slowest_s])
        self._rows.add(self._subject, AT_S, number, [now()])
        if self._comm.rank == 0:
            self._marks.add(self._rows, number, seen, {0: longest_s})
        return True

    def close(self) -> None:
        """Nothing was started."""


class _OnGroup:
    """Visits what the ranks of a group measure, while the others wait for them asleep."""

    def __init__(self, comm: MPI.Intracomm, network: Network, tables: Sequence[CollectiveTable]) -> None:
        self._comm, self._network, self._tables = comm, network, tables

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``."""
        enter(self._comm, self._network)
        for table in self._tables:
            table.visit(number, counted=counted)
        return True

    def close(self) -> None:
        for table in self._tables:
            table.close()


def calibrators(
    comm: MPI.Intracomm,
    config: CalibrateConfig,
    rows: Rows,
    watcher: Watcher,
    number: int = 0,
    parts: int = 1,
    selections: Sequence[Selection] = (),
) -> tuple[list[Visited], list[Selection]]:
    """Return what visits the tables of a calibration, and what ``auto`` stands for there: ``selections`` if given.

    Collective over ``comm``.
    """
    network, emulated = Network.parse(config.network), config.workload is not None
    enter(comm, network)
    visited: list[Visited] = [LoadContention(comm, load, rows, watcher) for load in config.loads(number)]
    selected = {selection.devices: selection for selection in selections}
    for devices, layout in config.all_layouts():
        group = first_ranks(comm, devices)
        tables: list[CollectiveTable] = []
        if group is not None:
            load, per_node = _load(config), layout.of_a_node
            if "auto" in config.algorithms and devices not in selected and (devices, layout) in config.layouts():
                selected[devices] = select(group)
            for subject in config.collectives(number):
                of = subject.collective
                if of.kind == "send" or (of.devices, of.layout) != (devices, layout):
                    continue
                selection = selected.get(devices) if of.algorithm == "auto" else None
                link = transport(group, network, per_node, selection, sleeps=emulated)
                if not subject.overlap:
                    idle = IdleTable(group, link, subject, config, rows, parts, watcher)
                    tables.append(idle)
                else:
                    tables.append(LoadedTable(idle, link, subject, load, config))
        quiet_barrier(comm)
        visited.append(_OnGroup(comm, network, tables))
    sends = [subject for subject in config.collectives(number) if subject.collective.kind == "send"]
    for subject in sends:
        layout = subject.collective.layout
        pair, tables = group_of(comm, (0, config.neighbours()[layout])), []
        if pair is not None:
            link = transport(pair, network, layout.of_a_node, sleeps=emulated)
            tables.append(IdleTable(pair, link, subject, config, rows, parts, watcher))
        quiet_barrier(comm)
        visited.append(_OnGroup(comm, network, tables))
    return visited, list(selected.values())


def _load(config: CalibrateConfig) -> Load:
    if not config.model:
        return StandIn()
    return ReplicaLoad(config.model, config.dataset, config.local_batch, config.workload, config.compute_dtype)


def calibrate_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Calibrate one ``CalibrateConfig`` on running ranks; rank 0 returns rows and selections (plain values)."""
    config, rows = codec.decode(argument, CalibrateConfig, "calibration"), Rows()
    counts = " and ".join(map(str, dict.fromkeys(config.devices + config.sends)))
    report(
        f"calibrating {', '.join(config.algorithms)} on {counts} devices, network {config.network}: "
        f"{first_rounds_text(config.seconds)} where the machine is disturbed"
    )
    visited, selection = calibrators(comm, config, rows, Watcher.on(comm))
    stop = until_known(config.seconds, most_rounds=_MOST_ROUNDS)
    known = lambda: narrow([load_slowdown(load, rows) for load in config.loads()])  # noqa: E731
    for current in rounds(stop, suffice=known, comm=comm, report=report):
        for each in visited:
            each.visit(current.number, counted=True)
    for each in visited:
        each.close()
    return (
        {
            "rows": codec.to_builtins(rows.series()),
            "selection": codec.to_builtins(selection),
            "unshaped_bytes_per_s": ceiling_bytes_per_s(),
        }
        if comm.rank == 0
        else None
    )
