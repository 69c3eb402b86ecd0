"""``Machine``: what a run runs on: costs of collectives, how communication and computation slow each other, memory."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpsim import codec, machine_library
from dpsim.algorithms import ALGORITHMS
from dpsim.codec import Noun
from dpsim.collective import Collective
from dpsim.cost_tables import FASTEST_MEMORY_BYTES_PER_S as FASTEST_MEMORY_BYTES_PER_S
from dpsim.cost_tables import LEAST_SLOWDOWN as LEAST_SLOWDOWN
from dpsim.cost_tables import AllreduceCost as AllreduceCost
from dpsim.cost_tables import ComputeSlowdown as ComputeSlowdown
from dpsim.cost_tables import FusionCosts as FusionCosts
from dpsim.cost_tables import OverlapCost as OverlapCost
from dpsim.cost_tables import Selection as Selection
from dpsim.errors import ConfigError
from dpsim.memo import remember
from dpsim.network import NODE as NODE
from dpsim.network import Network as Network
from dpsim.uncertainty import IntervalWidth, check_uncertainty

SCHEMA = "dpsim.machine/1"
_MOST_GROWTH = 1
"""Of the logarithm of the loss for each doubling: computation that takes 2.7 times as long on twice the devices."""


class Link(Noun, frozen=True):
    """Alpha, beta and gamma of ``reference formulas``: what prices an allreduce that no table covers.

    ``latency_s`` is the wire's; ``message_overhead_s`` is what the host adds to every message that waits for the one
    before it, and ``bucket_overhead_s`` to every collective. ``fitted_to`` names the tables that the link was derived
    from (empty: it was given), with the median and the largest relative residual of that fit.
    ``relative_uncertainty`` is one standard error of an allreduce by its formula, relative (``None``: not known).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    reduce_s_per_byte: float = 0.0
    message_overhead_s: float = 0.0
    bucket_overhead_s: float = 0.0
    fitted_to: str = ""
    median_residual: float = 0.0
    largest_residual: float = 0.0
    relative_uncertainty: float | None = None

    def __post_init__(self) -> None:
        check_uncertainty("link", relative_uncertainty=self.relative_uncertainty)
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0 and self.bandwidth_bytes_per_s > 0):
            raise ConfigError(
                f"link with latency_s {self.latency_s}, bandwidth_bytes_per_s {self.bandwidth_bytes_per_s}",
                allowed="a finite latency_s >= 0, bandwidth_bytes_per_s > 0",
            )
        for key in ("reduce_s_per_byte", "message_overhead_s", "bucket_overhead_s"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise ConfigError(f"{key} is {getattr(self, key)}", allowed="finite, >= 0")
        for key in ("median_residual", "largest_residual"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise ConfigError(f"{key} of a link is {getattr(self, key)}", allowed="finite, >= 0")


Wiring = Literal["switch", "mesh"]
"""How the devices of a node are joined: each to a switch, or each to every other one by links of their own."""


class Machine(Noun, frozen=True, dict=True):
    """The hardware of a run: tables of costs, and a link whose formula prices what no table covers.

    ``link`` connects all devices. In a layout of several nodes it connects the nodes, and the devices of a node share
    it; ``link_in_node``, if there is one, connects the devices of a node. ``date`` is when ``source`` published its
    numbers. ``cores`` are those of a node (0: unknown).
    More than ``nodes_per_rack`` nodes fill several racks, which ``link_between_racks`` connects (``None``: one link
    connects all nodes).
    ``halves`` are tables of other collectives: reduce-scatters and all-gathers alone, ordered sums, and messages from
    one device to another; ``overlap`` may have some of reduce-scatters and all-gathers. ``relative_uncertainty`` is one
    standard error of the mean of its times over a later stretch as long as the calibration, relative (``None``: not
    known). ``contention`` is how many times as long as
    alone a collective takes during backward where no overlap table says it (``None``: not known), with one
    relative standard error; ``collective_overhead_s`` is what the host adds to each collective of a step, besides what
    tables and link say (``None``: not known), likewise. ``fixed_share`` is the share of a workload's layer
    times at its only known local batch that a step takes whatever the batch (``None``: not known, they are in
    proportion), likewise. ``loss_growth`` is the logarithm of how many times as long computation takes for each
    doubling of the devices beyond those of ``compute_slowdown`` (``None``: not known), with its standard error.
    ``computation_taken`` are the seconds of computation that a second of a collective beside backward takes away where
    no overlap table says it (``None``: not known), with its standard error. ``known_devices``
    are the numbers of devices of the steps that the files were fitted to (empty: none were; layer times are those of
    one device). ``assumed`` names the fields that nobody stated
    (``dpsim.model.defaults``), and ``interval_widths`` is what past studies on the machine say of predicted intervals
    (``dpsim.model.past``). ``network_adapters`` are those of a node, and ``wiring`` joins its devices (``None``: not
    known). ``slow_devices`` are the factors by which some devices compute more slowly than the others (a throttled or
    an older GPU), one entry for each; they are among those of every plan of several devices. ``wake_s`` is how late the
    slowest of ranks wakes that sleep instead of computing: it delays what they stop for, besides the tables.
    ``fusion_costs`` are those by which a study decided buckets on this machine. ``unshaped_bytes_per_s`` is what each
    link of shaped hosts carried in each direction before it was shaped (0: not known, or no such network).
    """

    name: str
    network: str = NODE
    emulated_network: bool = False
    allreduce: tuple[AllreduceCost, ...] = ()
    overlap: tuple[OverlapCost, ...] = ()
    compute_slowdown: tuple[ComputeSlowdown, ...] = ()
    link: Link | None = None
    memory_bytes: float = math.inf
    cores: int = 0
    calibrated_on: str = ""
    source: str = ""
    date: str = ""
    schema: str = SCHEMA
    link_in_node: Link | None = None
    selection: tuple[Selection, ...] = ()
    halves: tuple[AllreduceCost, ...] = ()
    relative_uncertainty: float | None = None
    interval_widths: tuple[IntervalWidth, ...] = ()
    contention: float | None = None
    contention_uncertainty: float | None = None
    assumed: tuple[str, ...] = ()
    network_adapters: int | None = None
    wiring: Wiring | None = None
    collective_overhead_s: float | None = None
    collective_overhead_uncertainty: float | None = None
    fixed_share: float | None = None
    fixed_share_uncertainty: float | None = None
    loss_growth: float | None = None
    loss_growth_uncertainty: float | None = None
    computation_taken: float | None = None
    computation_taken_uncertainty: float | None = None
    known_devices: tuple[int, ...] = ()
    slow_devices: tuple[float, ...] = ()
    nodes_per_rack: int | None = None
    link_between_racks: Link | None = None
    wake_s: float = 0.0
    fusion_costs: tuple[FusionCosts, ...] = ()
    unshaped_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name, tables, halves in (("allreduce", self.allreduce, False), ("halves", self.halves, True)):
            if any((table.kind != "allreduce") != halves for table in tables):
                raise ConfigError(
                    f"machine {self.name!r} has a table of another kind in {name}",
                    allowed="reduce-scatter, all-gather, ordered-sum, send and copy" if halves else "allreduce",
                )
        self._check_each_once()
        if not self.allreduce and not self.halves and self.link is None:
            raise ConfigError(
                f"machine {self.name!r} says nothing about the cost of a collective",
                allowed="an [[allreduce]] or a [[halves]] table, or a [link]",
            )
        if not self.memory_bytes > 0:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}", allowed="more than 0")
        check_uncertainty(
            f"machine {self.name!r}",
            relative_uncertainty=self.relative_uncertainty,
            contention_uncertainty=self.contention_uncertainty,
            collective_overhead_uncertainty=self.collective_overhead_uncertainty,
            fixed_share_uncertainty=self.fixed_share_uncertainty,
            loss_growth_uncertainty=self.loss_growth_uncertainty,
            computation_taken_uncertainty=self.computation_taken_uncertainty,
        )
        if any(not 1 <= factor < math.inf for factor in self.slow_devices):
            raise ConfigError(
                f"slow_devices is {list(self.slow_devices)}",
                allowed="for each slow device a finite factor of 1 or more on its computing time",
                remedy="let the workload's layer times be those of the fast devices, as [2.0] for one half as fast",
            )
        self._check_racks()
        if self.network_adapters is not None and self.network_adapters < 1:
            raise ConfigError(
                f"network_adapters is {self.network_adapters}", allowed="1 or more, or left out: not known"
            )
        if self.collective_overhead_s is not None and not 0 <= self.collective_overhead_s < math.inf:
            raise ConfigError(f"collective_overhead_s is {self.collective_overhead_s}", allowed="finite seconds >= 0")
        if self.fixed_share is not None and not 0 <= self.fixed_share <= 1:
            raise ConfigError(
                f"fixed_share is {self.fixed_share}",
                allowed="0 (layer times in proportion to the local batch) to 1 (the same at every local batch)",
            )
        for name, most in (("loss_growth", _MOST_GROWTH), ("computation_taken", 1)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ConfigError(f"{name} is {value}", allowed=f"a number from 0 to {most}, or left out: not known")
        if self.contention is not None and not 1 <= self.contention < math.inf:
            raise ConfigError(
                f"contention is {self.contention}",
                allowed="a finite number of 1 or more: beside backward no collective is faster than alone",
            )

    def _check_racks(self) -> None:
        count, beyond = self.nodes_per_rack, self.link_between_racks
        neither = count is None and beyond is None
        if not neither and (count is None or count < 1 or beyond is None or self.link is None):
            raise ConfigError(
                f"machine {self.name!r} has {'no' if count is None else count} nodes_per_rack, "
                f"{'no' if beyond is None else 'a'} [link_between_racks] and "
                f"{'no' if self.link is None else 'a'} [link]",
                allowed="nodes_per_rack of 1 or more with [link_between_racks] and [link]; or neither of the first two",
                remedy="complete them, or leave nodes_per_rack and [link_between_racks] out: [link] joins all nodes",
            )

    def _check_each_once(self) -> None:
        """Refuse two tables of the same thing, which contradict each other."""
        keys: dict[str, list[Any]] = {
            "allreduce": [table.collective for table in self.allreduce],
            "halves": [table.collective for table in self.halves],
            "overlap": [(table.collective, table.overlap) for table in self.overlap],
            "compute_slowdown": [slowdown.devices for slowdown in self.compute_slowdown],
            "selection": [selection.devices for selection in self.selection],
        }
        for name, of_tables in keys.items():
            twice = next((number for number, key in enumerate(of_tables) if key in of_tables[:number]), None)
            if twice is not None:
                table = getattr(self, name)[twice]
                first = of_tables.index(of_tables[twice])
                what = f" {table.algorithm} on" if name in ("allreduce", "halves", "overlap") else ""
                raise ConfigError(
                    f"machine {self.name!r} has two tables of the same in [[{name}]], its entries {first + 1} and"
                    f" {twice + 1}:{what} {getattr(table, 'layout', '') or table.devices} devices",
                    allowed="one table each",
                    remedy="remove one of them",
                )

    @remember
    def priced(self, collective: Collective) -> Collective:
        """Return the allreduce whose cost stands for this one's: itself where it has a table.

        Without a table, ``mpi`` stands for ``auto`` where the machine has tables of ``mpi`` but none of ``auto``, and
        for whatever works in shared memory in a layout of several nodes, which share none.
        """
        algorithm, devices, layout = collective.algorithm, collective.devices, collective.layout
        measured = {table.algorithm for table in self.allreduce if (table.devices, table.layout) == (devices, layout)}
        if algorithm in measured or ALGORITHMS.find(algorithm).place != "shared memory":
            return collective
        algorithms = measured or {table.algorithm for table in self.allreduce}
        library = algorithm == "auto" and "auto" not in algorithms and "mpi" in algorithms
        if library or layout.nodes > 1:
            return msgspec.structs.replace(collective, algorithm="mpi")
        return collective

    @property
    def of_one_node(self) -> bool:
        """Whether the link is fitted to allreduces within one node alone.

        Flat tables count where dpsim measured them (``cores`` is known): in those of another benchmark each device may
        be a node of its own.
        """
        if self.emulated_network or self.link is None or not self.link.fitted_to:
            return False
        tables = [table for table in self.allreduce if table.devices > 1]
        return all(t.layout.nodes == 1 and (t.layout or self.cores) for t in tables)

    @property
    def of_several_nodes(self) -> bool:
        """Whether all that is measured are collectives of several nodes, and no link inside a node is stated."""
        if self.emulated_network or self.link_in_node is not None:
            return False
        layouts = [table.layout for table in (*self.allreduce, *self.halves) if table.devices > 1]
        return bool(layouts) and all(layout and layout.nodes > 1 for layout in layouts)

    @property
    def largest_node(self) -> int | None:
        """The most devices of one node that were measured, where nothing else is known; else ``None``."""
        if self.emulated_network or (self.link is not None and not self.link.fitted_to):
            return None
        tables = [table for table in (*self.allreduce, *self.halves) if table.devices > 1]
        inside = all(table.layout and table.layout.nodes == 1 for table in tables)
        return max((table.devices for table in tables), default=None) if inside else None

    @property
    def devices_a_node(self) -> int:
        """The most devices that a node has in the tables of several nodes; 1 where there is no such table."""
        layouts = [table.layout for table in (*self.allreduce, *self.halves)]
        return max((layout.of_a_node for layout in layouts if layout.nodes > 1), default=1)

    def link_between(self, nodes: int) -> Link | None:
        """Return the link that paces messages between so many nodes: in each field the slower of those that they cross.

        In every round of a ring some message crosses from rack to rack, and a round lasts as long as its slowest one.
        """
        link, beyond = self.link, self.link_between_racks
        if link is None or beyond is None or self.nodes_per_rack is None or nodes <= self.nodes_per_rack:
            return link
        return msgspec.structs.replace(
            beyond,
            latency_s=max(link.latency_s, beyond.latency_s),
            bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, beyond.bandwidth_bytes_per_s),
            reduce_s_per_byte=max(link.reduce_s_per_byte, beyond.reduce_s_per_byte),
            message_overhead_s=max(link.message_overhead_s, beyond.message_overhead_s),
            bucket_overhead_s=max(link.bucket_overhead_s, beyond.bucket_overhead_s),
        )

    def selected(self, devices: int) -> Selection | None:
        """Return the measured selection of ``auto`` on ``devices``; ``None`` where nothing was measured."""
        return next((selection for selection in self.selection if selection.devices == devices), None)

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """What ``remember`` keeps of this machine."""
        return {}


def read(path: Path | str) -> Machine:
    """Read a machine file (``.json`` or ``.toml``), or a machine of ``dpsim.machine_library`` by its name.

    Of two names like ``nvlink3-8gpu+hdr-ib`` the first is the one inside nodes, and the second the one between them. A
    file with the two speeds that earlier versions wrote is read as its full-speed times, with a warning on stderr.
    Raises ``FileFormatError``, and ``ConfigError`` for a name that the library does not have.
    """
    machines = [
        codec.read(each, Machine, "machine", SCHEMA, convert=functools.partial(_at_full_speed, path=each))
        for each in machine_library.files_of(path)
    ]
    return machines[0] if len(machines) == 1 else _joined(*machines)


def _joined(inside: Machine, across: Machine) -> Machine:
    """Return a machine in whose nodes one machine's link joins the devices, while another one's joins the nodes.

    Both links are as uncertain as the less certain one.
    """
    links = {"link_in_node": inside.link, "link": across.link}
    doubt = max(link.relative_uncertainty or 0.0 for link in links.values() if link is not None)
    fields: dict[str, Any] = {
        name: None if link is None else msgspec.structs.replace(link, relative_uncertainty=doubt)
        for name, link in links.items()
    }
    for name in ("name", "date", "calibrated_on", "source"):
        fields[name] = f"{getattr(inside, name)}; between nodes: {getattr(across, name)}"
    return Machine(**fields)


def _at_full_speed(raw: dict[str, Any], path: Path | str) -> dict[str, Any]:
    def tables(name: str) -> list[dict[str, Any]]:
        values = raw.get(name)
        return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []

    for table in itertools.chain.from_iterable(map(tables, ("allreduce", "halves", "overlap"))):
        table.pop("slow_factor", None)
    speeds = tables("speed")
    raw.pop("speed", None)
    if speeds:
        raw.setdefault("relative_uncertainty", speeds[0].get("relative_uncertainty"))
    if any(speed.get("slow_share") for speed in speeds):
        print(
            f"dpsim: {path} has two speeds, as earlier versions measured them; its times at full speed are used\n"
            "  to do:   calibrate again with dpsim calibrate",
            file=sys.stderr,
        )
    return raw
