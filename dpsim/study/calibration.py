"""``calibrate``: what collectives cost on this machine, alone and while it computes; a Machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.algorithms import ALGORITHMS
from dpsim.codec import Noun
from dpsim.collective import Collective, CollectiveKind, Layout, parse_devices
from dpsim.constraints import FSDP, LIBRARIES, Runtime, check, possible
from dpsim.dates import stamp
from dpsim.dtypes import ComputeDtype, WireDtype
from dpsim.errors import ConfigError, unknown
from dpsim.machine import AllreduceCost, ComputeSlowdown, Machine, Network, OverlapCost, Selection
from dpsim.model.cost import ORDERED_SUM_ALGORITHM, SEND_ALGORITHM
from dpsim.model.link_fit import fitted_links
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.sweep import Environment
from dpsim.strategy import parse_strategy
from dpsim.study.cases import run
from dpsim.study.environment import environment
from dpsim.study.profile import AT_S, TICK_S, slowdown
from dpsim.study.rows import CalibratedCollective, CalibratedLoad, Rows, Series
from dpsim.study.scatter import later_error, median_error
from dpsim.units import ITEM_BYTES
from dpsim.workload import Workload

Floats = NDArray[np.float64]
MECHANISMS = ("poll", "thread")
TIME_S, LOSS_S, WAKE_S = "time_s", "compute_loss_s", "wake_s"
"""Quantities of a calibrated collective, by its bytes: what it takes, the compute time that it takes away, and how late
the slowest rank of those that sleep woke up before it.
"""
ALONE_S, TOGETHER_S = "alone_s", "together_s"
"""Quantities of a load: what it takes on one device, and on the slowest of several at once."""


class CalibrateConfig(Noun, frozen=True):
    """What to calibrate: a network on some device counts or layouts, by some algorithms and overlap mechanisms.

    Sizes go up to ``max_bytes``, or are ``sizes_bytes``. The measuring takes ``seconds``, and up to twice as long where
    a compute slowdown is not known to 3 % by then. Allreduces are also measured while the ranks compute: forward and
    backward of ``model`` (with its ``dataset`` and ``local_batch``), or a stand-in without a model. With a ``workload``
    the model's computation is emulated, and ranks sleep while they wait. Data are float32, sent as ``wire_dtype``;
    ``compute_dtype`` is that of the model's operands. The collectives are those of ``strategy``, as far as an algorithm
    has them. Ordered sums are measured where the ranks agree on what each has, and with ``sums``, as global batch norm
    needs them. ``sends`` are the device counts or layouts between whose neighbours messages are measured: those of
    pipelines, whose collectives are on fewer ``devices``. ``slowdown``: how much longer several devices compute is
    measured too, with the stand-in. With another ``runtime`` the collectives are those that PyTorch's DDP or FSDP
    starts, of numbers that are gathered as ``gather_dtype`` and added up as ``reduce_dtype``; ``sizes_bytes`` are those
    of FSDP's units in float32.
    """

    network: str = "node"
    devices: tuple[int | str, ...] = (2,)
    algorithms: tuple[str, ...] = ("auto",)
    overlaps: tuple[str, ...] = ("poll", "thread")
    max_bytes: int = 4 * 2**20
    seconds: float = 4.0
    model: str = ""
    dataset: str = "digits"
    local_batch: int = 0
    wire_dtype: WireDtype | None = None
    compute_dtype: ComputeDtype = "float32"
    strategy: str = "data-parallel"
    sums: bool = False
    sends: tuple[int | str, ...] = ()
    workload: Workload | None = None
    slowdown: bool = True
    runtime: Runtime = "dpsim"
    sizes_bytes: tuple[int, ...] = ()
    gather_dtype: str = "float32"
    reduce_dtype: str = "float32"

    def __post_init__(self) -> None:
        network = Network.parse(self.network)
        for what in ("devices", "algorithms", "overlaps", "sends"):
            values = getattr(self, what)
            if len(set(values)) != len(values):
                raise ConfigError(f"{what} is {list(values)}", allowed="different values")
        for algorithm in self.algorithms:
            if self.runtime not in LIBRARIES:
                check("network", algorithm=algorithm, network=network)
            check(algorithm=algorithm, wire_dtype=self.wire_dtype, leaves=0)
            for devices, layout in self.layouts():
                check(algorithm=algorithm, devices=devices, layout=layout)
                check(devices=devices, layout=layout, network=network)
        parse_strategy(self.strategy)
        if not any(possible("strategy", strategy=self.strategy, algorithm=name) for name in self.algorithms):
            check(strategy=self.strategy, algorithm=self.algorithms[0])
        for overlap in self.overlaps:
            if overlap not in MECHANISMS:
                raise unknown("overlap mechanism", overlap, MECHANISMS)
        if self.model and self.local_batch < 1:
            raise ConfigError(
                f"calibrating beside {self.model!r} at local batch {self.local_batch}",
                allowed="a local batch of 1 or more",
            )
        if not 0 < self.seconds < 3600:
            raise ConfigError(f"seconds is {self.seconds}", allowed="more than 0, below 3600")
        if not 4 <= self.max_bytes <= 2**33:
            raise ConfigError(f"max_bytes is {self.max_bytes}", allowed="4 bytes to 8 GiB")

    def bytes_a_number(self, kind: CollectiveKind) -> int:
        """Return the bytes of a number of a collective."""
        return ITEM_BYTES[self.gather_dtype if kind == "all-gather" else self.reduce_dtype]

    def layouts(self) -> list[tuple[int, Layout]]:
        """(devices, layout) of each of ``devices`` above 1, fewest devices first."""
        return _layouts(self.devices)

    def all_layouts(self) -> list[tuple[int, Layout]]:
        """The same of ``devices`` and ``sends``."""
        return _layouts(self.devices + self.sends)

    @property
    def ranks(self) -> int:
        """The ranks that take part."""
        return max((devices for devices, _ in self.all_layouts()), default=1)

    def neighbours(self) -> dict[Layout, int]:
        """Return the layouts of two devices between which messages are measured, and the rank to send to from rank 0.

        The layout with the most devices comes last and decides on the rank.
        """
        return {
            each: rank for devices, layout in _layouts(self.sends) for each, rank in layout.neighbours(devices).items()
        }

    def collectives(self, number: int = 0) -> list[CalibratedCollective]:
        """Return what is measured, with nothing else running before during computation; ``number`` names this one."""
        collectives, strategy = [], parse_strategy(self.strategy)
        if self.runtime == FSDP:
            return [CalibratedCollective(collective=each, calibration=number) for each in self.of_fsdp]
        for devices, layout in self.layouts():
            wire = self.wire_dtype or "float32"
            for algorithm in self.algorithms:
                splits = ALGORITHMS.find(algorithm).has_reduce_scatter
                kinds = strategy.collectives if splits else ("allreduce",)
                for kind in kinds:
                    collective = Collective(
                        algorithm=algorithm, devices=devices, layout=layout, wire_dtype=wire, kind=kind
                    )
                    overlaps = self.overlaps if kind not in ("all-gather", "broadcast") or strategy.gathers else ()
                    overlaps = () if kind == "copy" else overlaps
                    collectives += [
                        CalibratedCollective(collective=collective, overlap=overlap, calibration=number)
                        for overlap in ("", *overlaps)
                    ]
        agreeing = (self.devices if self.sums or strategy.sharded or strategy.parts > 1 else ()) + self.sends
        for devices, layout in _layouts(agreeing) if self.runtime == "dpsim" else ():
            ordered = Collective(algorithm=ORDERED_SUM_ALGORITHM, devices=devices, layout=layout, kind="ordered-sum")
            collectives.append(CalibratedCollective(collective=ordered, calibration=number))
        for layout in self.neighbours():
            send = Collective(algorithm=SEND_ALGORITHM, devices=2, layout=layout, kind="send")
            collectives.append(CalibratedCollective(collective=send, calibration=number))
        return collectives

    @property
    def of_fsdp(self) -> dict[Collective, int]:
        """The collectives of FSDP on each number of ``devices``, with that number; the largest one where it is alike.

        Those of several replicas are of the devices of one, and the allreduce of one of each.
        """
        collectives: dict[Collective, int] = {}
        for devices, layout in self.layouts():
            plan = Plan(
                devices=devices,
                layout=layout,
                global_batch=devices,
                strategy=self.strategy,
                algorithm=self.algorithms[0],
                wire_dtype=self.wire_dtype,
            )
            collectives |= {plan.between_replicas: devices} if plan.replicas > 1 else {}
            for kind in ("reduce-scatter", "all-gather"):
                collectives[msgspec.structs.replace(plan.collective, kind=kind)] = devices
        return collectives

    def ranks_of(self, collective: Collective) -> int:
        """Return the ranks that take part where a collective is timed: those of all replicas."""
        return self.of_fsdp[collective] if self.runtime == FSDP else collective.devices

    def loads(self, number: int = 0) -> list[CalibratedLoad]:
        """Return the loads that are computed alone and on several devices at once."""
        counts = dict.fromkeys(devices for devices, _ in self.all_layouts())
        wanted = self.slowdown and self.workload is None
        return [CalibratedLoad(devices=count, calibration=number) for count in counts] if wanted else []


def devices_to_calibrate(strategy: str, devices: Sequence[int | str]) -> dict[str, tuple[int | str, ...]]:
    """Return the ``devices`` and ``sends`` of the calibration for a strategy on these device counts or layouts.

    Where devices are of several rank classes, collectives are measured on those of one class too, and where the classes
    join on one of each; messages where they send any. Of several replicas they are measured on the devices of one, and
    on one of each.
    """
    parsed, groups = parse_strategy(strategy), [*devices]
    for count, layout in map(parse_devices, devices):
        plan = Plan(devices=count, layout=layout, global_batch=count, strategy=strategy)
        of_plan = [plan.collective, *([plan.joining] if parsed.parts > 1 else [])] if parsed.classes > 1 else []
        of_plan += [plan.collective, plan.between_replicas] if plan.replicas > 1 else []
        groups += [each.layout or each.devices for each in of_plan if each.devices > 1]
    return {"devices": tuple(dict.fromkeys(groups))} | ({"sends": tuple(devices)} if parsed.stages > 1 else {})


def _layouts(tokens: Sequence[int | str]) -> list[tuple[int, Layout]]:
    return sorted({pair for pair in map(parse_devices, tokens) if pair[0] > 1})


def calibrated_machine(
    network: str,
    subjects: Sequence[CalibratedCollective],
    rows: Rows,
    selection: Sequence[Selection],
    measured_in: Environment,
    at: str,
    loads: Sequence[CalibratedLoad] = (),
    unshaped_bytes_per_s: float = 0.0,
) -> Machine:
    """Return the machine that the rows of a calibration describe, measured in an environment at an instant.

    Its links are fitted to the tables (``fitted_links``) and price, as an extrapolation, algorithms without a table.
    """
    ranks = max(subject.collective.devices for subject in subjects)
    idle = [AllreduceCost(**_table(subject, rows)) for subject in subjects if not subject.overlap]
    allreduce = tuple(table for table in idle if table.kind == "allreduce")
    wire, last = Network.parse(network), loads[-1:]
    visits = [(rows.values(load, AT_S), rows.values(load, each)) for load in last for each in (ALONE_S, TOGETHER_S)]
    link, link_in_node = fitted_links(
        allreduce, emulated=wire.emulated, wire_latency_s=wire.wire_latency_s, cores=measured_in.cores
    )
    return Machine(
        name=f"{measured_in.processor}, {measured_in.cores} cores",
        network=network,
        emulated_network=wire.emulated,
        allreduce=allreduce,
        halves=tuple(table for table in idle if table.kind != "allreduce"),
        link=link,
        link_in_node=link_in_node,
        overlap=tuple(_overlap_cost(subject, rows) for subject in subjects if subject.overlap),
        compute_slowdown=tuple(load_slowdown(load, rows) for load in loads),
        selection=tuple(selection),
        relative_uncertainty=later_error(visits) if loads else None,
        wake_s=_wake_s(subjects, rows),
        memory_bytes=measured_in.memory_bytes / ranks,
        cores=measured_in.cores,
        calibrated_on=f"{measured_in.processor}, {network}, {at}",
        source="dpsim calibrate",
        unshaped_bytes_per_s=unshaped_bytes_per_s,
    )


def _wake_s(subjects: Sequence[CalibratedCollective], rows: Rows) -> float:
    """Return how late the slowest of ranks that sleep wakes up, at the median; 0 where none sleeps."""
    late_s = [rows.values(subject, WAKE_S, size) for subject in subjects for size in rows.parts(subject, WAKE_S)]
    return float(np.median(np.concatenate(late_s))) if late_s else 0.0


def load_slowdown(load: CalibratedLoad, rows: Rows) -> ComputeSlowdown:
    """Return how much longer the load takes on the slowest of several ranks at once than on one, visit by visit."""
    return slowdown(load.devices, rows.values(load, ALONE_S), rows.values(load, TOGETHER_S))


def _overlap_cost(subject: CalibratedCollective, rows: Rows) -> OverlapCost:
    table = _table(subject, rows)
    losses = [rows.values(subject, LOSS_S, size) for size in table["sizes_bytes"]]
    medians = [max(0.0, float(np.median(of_size))) for of_size in losses]
    return OverlapCost(
        **table,
        overlap=cast(Literal["poll", "thread"], subject.overlap),
        compute_loss_s=tuple(medians),
        loss_relative_uncertainty=_losses_error(losses, medians),
    )


def _table(subject: CalibratedCollective, rows: Rows) -> dict[str, Any]:
    """Return the sizes that were measured, ascending, and their times, none shorter than the clock's tick.

    The error is the root mean square over sizes, from the medians of visits: values of one visit are not independent.
    """
    sizes = rows.parts(subject, TIME_S)
    times = [np.maximum(rows.values(subject, TIME_S, size), TICK_S) for size in sizes]
    errors = [median_error(np.maximum(rows.visit_medians(subject, TIME_S, size), TICK_S)) for size in sizes]
    return {
        **msgspec.structs.asdict(subject.collective),
        "sizes_bytes": sizes,
        "time_s": tuple(float(np.median(of_size)) for of_size in times),
        "relative_uncertainty": float(np.sqrt(np.mean(np.square(errors)))),
        "p10_s": tuple(float(np.quantile(of_size, 0.1)) for of_size in times),
        "p90_s": tuple(float(np.quantile(of_size, 0.9)) for of_size in times),
    }


def _losses_error(losses_s: Sequence[Floats], medians_s: Sequence[float]) -> float:
    """Return the standard error of the compute time lost, over all sizes together, relative to it; at most 1."""
    squares = sum(float(np.var(of_size)) * math.pi / 2 / len(of_size) for of_size in losses_s)
    total = sum(medians_s)
    return min(1.0, math.sqrt(squares) / total) if total > 0 else 1.0


def calibrate(config: CalibrateConfig, progress: Progress) -> Machine:
    """Calibrate a network on as many ranks as the largest device count, and return the machine.

    Raises ``ConfigError`` for an unknown network or algorithm, ``CommunicationError`` where ranks fail.
    """
    if config.ranks < 2:
        raise ConfigError(f"calibrating devices {list(config.devices)}", allowed="at least one count above 1")
    task = "dpsim.study.runners.calibration:calibrate_on_ranks"
    measured = run(task, config, config.ranks, progress, [config.network])
    rows = Rows(codec.decode(plain, Series, "calibration") for plain in measured["rows"])
    selection = [codec.decode(plain, Selection, "calibration") for plain in measured["selection"]]
    unshaped = measured["unshaped_bytes_per_s"]
    return calibrated_machine(
        config.network, config.collectives(), rows, selection, environment(), stamp(), config.loads(), unshaped
    )
