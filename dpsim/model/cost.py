"""What a collective costs on a Machine: by its tables, or by the link's formula where no table covers the case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import FLAT, Collective, CollectiveKind, Layout, checked_layout
from dpsim.constraints import check
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Machine, Network, OverlapCost
from dpsim.memo import remember
from dpsim.model.curve import Curve, Floats, at, continued, fitted_line
from dpsim.model.formulas import line_points, link_points, send_points, wire_share
from dpsim.model.scaling import level, level_of, nearest_tables, scaled_points

Table = TypeVar("Table", AllreduceCost, OverlapCost)
ORDERED_SUM_ALGORITHM = "direct"
"""What tables of ordered sums are called by: every rank sends to every other."""
SEND_ALGORITHM = "direct"
"""What tables of messages from one device to another are called by."""
_NOTHING = (math.inf, -1.0)


def collective_cost(
    machine: Machine,
    algorithm: str,
    devices: int,
    size_bytes: float,
    wire_dtype: str = "float32",
    layout: Layout = FLAT,
) -> tuple[float, bool]:
    """``cost`` of the ``Collective`` with these fields."""
    collective = Collective(algorithm=algorithm, devices=devices, layout=layout, wire_dtype=wire_dtype)
    return cost(machine, collective, size_bytes)


def cost(machine: Machine, collective: Collective, size_bytes: float) -> tuple[float, bool]:
    """(seconds of one allreduce with nothing else running, whether that is extrapolated).

    Where a table of this algorithm, device count and layout covers the size, the cost is linear between its points;
    outside it is extrapolated (``continued``). Without such a table the nearest ones of the algorithm are scaled, and
    where there are none the link's formula gives it; both count as extrapolated. One device costs 0. Raises
    ``ConfigError`` where the machine has neither table nor link.
    """
    if collective.devices == 1:
        return 0.0, False
    curve = idle_curve(machine, collective)
    seconds = float(at(curve.points, 1, float(size_bytes)))
    return seconds, size_bytes > 0 and not curve.first_bytes <= size_bytes <= curve.last_bytes


@remember
def idle_curve(machine: Machine, collective: Collective) -> Curve:
    """The collective's cost curve (bytes, seconds), nothing else running. Raises ``ConfigError``.

    Without any table of its kind a reduce-scatter or an all-gather costs half of the allreduce's tables, or what the
    link's formula says of it, as an extrapolation. A broadcast costs what its rounds of messages along a tree do, or
    where nothing is known of messages half of the allreduce. A send costs what ``send_curve`` says.
    """
    if collective.kind == "send":
        return send_curve(machine, collective.layout)
    algorithm, devices, layout = collective.algorithm, collective.devices, collective.layout
    ALGORITHMS.find(algorithm)
    if devices < 1:
        raise ConfigError(f"devices is {devices}", allowed="1 or more")
    if devices == 1:
        return Curve(np.array([[0.0, 1.0], [0.0, 0.0]]), 0.0, math.inf)
    checked_layout(layout, devices)
    check(algorithm=algorithm, devices=devices, layout=layout)
    table = table_for(tables_of(machine, collective.kind), collective)
    if table is not None:
        return Curve(_table_points(table, collective.wire_dtype), *_known(table, collective.wire_dtype))
    _refuse_unknown_inside(machine, collective)
    _refuse_beyond_a_node(machine, collective)
    near = nearest_tables(machine, tables_of(machine, collective.kind), collective)
    if near is None and collective.kind == "broadcast" and _prices_sends(machine):
        return _along_a_tree(machine, collective)
    if near is not None:
        curves = [_table_points(each, collective.wire_dtype) for each in near.tables]
        return Curve(scaled_points(machine, near, curves, collective), *_NOTHING, scaled=near)
    if collective.kind != "allreduce" and has_tables(machine, whole(collective)):
        return Curve(_halved(idle_curve(machine, whole(collective)).points), *_NOTHING)
    if machine.link is None:
        article = "a" if collective.kind == "reduce-scatter" else "an"
        covered = sorted({(t.algorithm, t.layout or str(t.devices)) for t in machine.allreduce})
        raise ConfigError(
            f"machine {machine.name!r} does not say what {article} {collective.kind} by {algorithm!r} on"
            f" {layout or devices} devices costs",
            allowed=", ".join(f"{name} on {count}" for name, count in covered) or "a machine with allreduce tables",
            remedy="calibrate it, or add a [link] with latency_s and bandwidth_bytes_per_s to the machine file",
        )
    _refuse_unknown_nodes(machine, layout, layout)
    return Curve(link_points(machine, machine.link, collective), *_NOTHING)


def _prices_sends(machine: Machine) -> bool:
    """Whether the machine says what one message costs."""
    return machine.link is not None or any(table.kind == "send" for table in machine.halves)


def _along_a_tree(machine: Machine, collective: Collective) -> Curve:
    """A broadcast along a binomial tree: ceil(log2 n) messages one after another, of which some are between nodes.

    Where an emulated network joins all devices it is exact.
    """
    layout, rounds = collective.layout, math.ceil(math.log2(collective.devices))
    inside = math.ceil(math.log2(layout.of_a_node)) if layout else rounds
    layouts = {Layout.of(1, 2) if layout else FLAT: inside, Layout.of(2, 1): rounds - inside}
    curves = [(count, send_curve(machine, layout)) for layout, count in layouts.items() if count]
    sizes = np.unique(np.concatenate([curve.points[0] for _, curve in curves]))
    seconds = np.zeros(len(sizes))
    for count, curve in curves:  # at size 0 a curve has the latency, and ``at`` has nothing
        seconds += count * np.array([at(curve.points, 1, size) if size else curve.points[1, 0] for size in sizes])
    exact = all(emulated_link(machine, layout) for layout, count in layouts.items() if count)
    return Curve(np.array([sizes, seconds]), *((0.0, math.inf) if exact else _NOTHING))


def _refuse_unknown_nodes(machine: Machine, layout: Layout, what: str) -> None:
    """Raise ``ConfigError`` for a layout of several nodes where the link is that of the devices of one."""
    if layout.nodes > 1 and machine.of_one_node:
        raise ConfigError(
            f"{what} devices are on several nodes, and machine {machine.name!r} was calibrated on one: nothing says"
            " what a message between nodes costs",
            allowed="a machine file with a table of several nodes, or with the link between them",
            remedy="calibrate between nodes (docs/cluster.md), import a log with dpsim calibrate --from, or write"
            " their link by hand: [link] with latency_s and bandwidth_bytes_per_s",
        )


def _refuse_unknown_inside(machine: Machine, collective: Collective) -> None:
    """Raise ``ConfigError`` for devices inside one node where only collectives of several nodes were measured."""
    layout, devices, of_a_node = collective.layout, collective.devices, machine.devices_a_node
    if not machine.of_several_nodes or level_of(machine, collective) != "inside" or (machine.cores and not layout):
        return
    measured = ", ".join(dict.fromkeys(table.layout for table in (*machine.allreduce, *machine.halves)))
    where = "are inside one node" if layout else f"fit into one node of {of_a_node}"
    raise ConfigError(
        f"{layout or devices} devices {where}, and machine {machine.name!r} was measured on several nodes alone"
        f" ({measured}): nothing says what a message inside a node costs",
        allowed="a machine file with a table of one node, or with the link inside it",
        remedy="import the log of one node as well, dpsim calibrate --from ONE_NODE.log,SEVERAL_NODES.log; or write"
        " the link inside a node by hand: [link_in_node] with latency_s and bandwidth_bytes_per_s; or ask for layouts"
        f" of several nodes, such as --devices 2x{of_a_node}",
    )


def _refuse_beyond_a_node(machine: Machine, collective: Collective) -> None:
    """Raise ``ConfigError`` for flat devices that do not fit into the largest node that was measured."""
    devices, most = collective.devices, machine.largest_node
    if collective.layout or most is None or devices <= most:
        return
    raise ConfigError(
        f"{devices} devices, and machine {machine.name!r} was measured inside one node of {most} alone (1x{most}):"
        " nothing says how many nodes they are on",
        allowed=f"{most} devices or fewer, or a layout",
        remedy=f"say --devices 1x{devices} if one node holds them; for several nodes import a log of them as well,"
        " dpsim calibrate --from ONE_NODE.log,SEVERAL_NODES.log, or write their link by hand: [link] with latency_s"
        " and bandwidth_bytes_per_s",
    )


def has_tables(machine: Machine, collective: Collective) -> bool:
    """Whether a table of the collective, or tables of its kind that are scaled, say what it costs."""
    tables = tables_of(machine, collective.kind)
    return table_for(tables, collective) is not None or nearest_tables(machine, tables, collective) is not None


def tables_of(machine: Machine, kind: CollectiveKind) -> tuple[AllreduceCost, ...]:
    """The machine's tables of collectives of a kind, with nothing else running."""
    return machine.allreduce if kind == "allreduce" else machine.halves


def whole(collective: Collective) -> Collective:
    """The allreduce that a reduce-scatter or an all-gather is half of."""
    return msgspec.structs.replace(collective, kind="allreduce")


def sums_curve(machine: Machine, collective: Collective) -> Curve:
    """The cost curve of ordered sums on the devices of ``collective``: by a table of them, or as ``collective``."""
    sums = msgspec.structs.replace(
        collective, kind="ordered-sum", algorithm=ORDERED_SUM_ALGORITHM, wire_dtype="float32"
    )
    has_table = table_for(machine.halves, sums) is not None
    return idle_curve(machine, sums if has_table else collective)


@remember
def copy_curve(machine: Machine, collective: Collective) -> Curve | None:
    """The cost curve of a copy inside the memory of each device, as all of ``collective`` make one at once.

    By the table of the nearest device count; ``None`` where the machine has none.
    """
    tables = [table for table in machine.halves if table.kind == "copy"]
    table = min(tables, key=lambda each: abs(each.devices - collective.devices), default=None)
    return None if table is None else Curve(_table_points(table, "float32"), *_known(table, "float32"))


@remember
def send_curve(machine: Machine, layout: Layout = FLAT) -> Curve:
    """The cost curve (bytes, seconds) of one message from a device to another, nothing else running.

    ``layout`` says where the two are: ``1x2`` in one node, ``2x1`` in two nodes, empty in a flat layout. By the table
    of messages there (``send_table``); without one, latency + bytes / bandwidth: of the link that the machine's network
    emulates, which is exact, or else of the machine's link at that level, as an extrapolation. Raises ``ConfigError``
    where the machine has neither.
    """
    checked_layout(layout, 2)
    table = send_table(machine, layout)
    if table is not None:
        return Curve(_table_points(table, "float32"), *_known(table, "float32"))
    if paced := emulated_link(machine, layout):
        return Curve(line_points(paced.latency_s, 1 / paced.bandwidth_bytes_per_s), 0.0, math.inf)
    if machine.link is None:
        raise ConfigError(
            f"machine {machine.name!r} does not say what a message between {layout or 2} devices costs",
            allowed="a machine with a [[halves]] table of kind send, or with a [link]",
            remedy="calibrate it with the strategy pipeline, or add a [link] with latency_s and bandwidth_bytes_per_s"
            " to the machine file",
        )
    _refuse_unknown_nodes(machine, layout, layout)
    if layout:
        _refuse_unknown_inside(machine, Collective(algorithm=SEND_ALGORITHM, devices=2, layout=layout, kind="send"))
    return Curve(send_points(machine, machine.link, layout), *_NOTHING)


def send_table(machine: Machine, layout: Layout) -> AllreduceCost | None:
    """The table of messages between two devices in ``layout``, or else one of the same level (inside, across)."""
    tables = [table for table in machine.halves if table.kind == "send"]
    alike = [table for table in tables if level(machine, table.layout) == level(machine, layout)]
    return min(alike, key=lambda table: table.layout != layout, default=None)


def emulated_link(machine: Machine, layout: Layout) -> Network | None:
    """The link in user space between two devices in ``layout``, whose times are exact; ``None`` where there is none."""
    across = machine.emulated_network and level(machine, layout) == "across"
    network = Network.parse(machine.network) if across else Network()
    return network if network.paced else None


def _halved(points: Floats) -> Floats:
    """Points of costs against size, at half the cost."""
    return np.vstack([points[:1], points[1:] / 2])


def _table_points(table: AllreduceCost, wire_dtype: str) -> Floats:
    return continued(np.array([sizes_on_the_wire(table, wire_dtype), table.time_s], np.float64))


def _known(table: Table, wire_dtype: str) -> tuple[float, float]:
    """The smallest and the largest size that a table covers; nothing where it is of another wire dtype."""
    return (table.sizes_bytes[0], table.sizes_bytes[-1]) if table.wire_dtype == wire_dtype else _NOTHING


def sizes_on_the_wire(table: Table, wire_dtype: str) -> Floats:
    """A table's sizes for a wire dtype. Where it is of another one, messages cost what as many bytes on the wire do.

    ``hierarchical`` sends only some of its bytes in that dtype, and shared memory none: they cost what the table says.
    """
    sizes = np.array(table.sizes_bytes, np.float64)
    share = wire_share(table.wire_dtype) / wire_share(wire_dtype)
    return sizes * share if ALGORITHMS.find(table.algorithm).sixteen_bit_messages else sizes


def table_for(tables: Sequence[Table], collective: Collective) -> Table | None:
    """The table of this kind, algorithm, device count and layout, of the same wire dtype if there is one.

    For flat devices it is also that of so many devices of one node, or of so many nodes, unless there are both.
    """
    key = collective.kind, collective.algorithm, collective.devices
    alike = [table for table in tables if (table.kind, table.algorithm, table.devices) == key]
    fitting = [table for table in alike if table.layout == collective.layout]
    if not fitting and not collective.layout:
        fitting = [table for table in alike if 1 in table.layout.counts(collective.devices)]
        fitting = fitting if len({table.layout for table in fitting}) == 1 else []
    return min(fitting, key=lambda table: table.wire_dtype != collective.wire_dtype, default=None)


@remember
def overlapped_curve(machine: Machine, collective: Collective, overlap: str) -> tuple[Curve, float]:
    """(curve with rows bytes, seconds during a backward, compute seconds lost; seconds of one poll).

    Without a table of this algorithm, device count and mechanism the nearest device count's is taken, as an
    extrapolation: the same compute seconds lost, and the allreduce longer than alone by the same factor. Where the
    machine has no table of the algorithm and mechanism at all, the allreduce takes as long as alone, or longer by the
    machine's contention, and inside a node takes away ``computation_taken`` of its time alone; that is extrapolated
    where it has tables of the mechanism. A reduce-scatter of which it has no table but of the allreduce costs half of
    it, as an extrapolation.
    The simulation charges the seconds to ``thread`` alone: under ``poll`` an allreduce takes as long as alone, and the
    compute seconds lost are added (``dpsim.model.simulate``).
    """
    of_mechanism = [t for t in machine.overlap if t.overlap == overlap]
    of_any_kind = [t for t in of_mechanism if t.algorithm == collective.algorithm]
    of_algorithm = [t for t in of_any_kind if t.kind == collective.kind]
    if of_any_kind and not of_algorithm and collective.kind != "allreduce":
        curve, poll_s = overlapped_curve(machine, whole(collective), overlap)
        return Curve(_halved(curve.points), *_NOTHING), poll_s
    wire_dtype = collective.wire_dtype
    table = table_for(of_algorithm, collective)
    if table is not None:
        points = np.array([sizes_on_the_wire(table, wire_dtype), table.time_s, table.compute_loss_s], np.float64)
        largest = _known(table, wire_dtype)[1]  # small messages count as covered: the allreduce alone tells their cost
        return Curve(continued(points), 0.0, largest), table.poll_s
    idle = idle_curve(machine, collective)
    if not of_algorithm:
        factor = 1.0 if machine.contention is None else machine.contention
        taken = (machine.computation_taken or 0.0) * (level_of(machine, collective) == "inside")
        points = np.vstack([idle.points[0], factor * idle.points[1], taken * idle.points[1]])
        return Curve(points, *(_NOTHING if of_mechanism else (0.0, math.inf))), 0.0
    nearest = min(
        of_algorithm, key=lambda t: (abs(t.devices - collective.devices), t.layout, t.wire_dtype != wire_dtype)
    )
    alone = idle_curve(machine, nearest.collective)
    sizes = sizes_on_the_wire(nearest, wire_dtype)
    ratios = [
        _ratio(time_s, at(alone.points, 1, size))
        for size, time_s in zip(nearest.sizes_bytes, nearest.time_s, strict=True)
    ]
    idle_s = np.array([at(idle.points, 1, size) for size in sizes])
    points = np.array([sizes, idle_s * np.array(ratios), nearest.compute_loss_s])
    return Curve(continued(points), *_NOTHING), nearest.poll_s


def _ratio(overlapped_s: float, alone_s: float) -> float:
    return overlapped_s / alone_s if alone_s > 0 else 1.0


def alpha_beta(
    machine: Machine, algorithm: str, devices: int, wire_dtype: str = "float32", layout: Layout = FLAT
) -> tuple[float, float]:
    """``nearest_line`` of the ``Collective`` with these fields."""
    return nearest_line(machine, Collective(algorithm=algorithm, devices=devices, layout=layout, wire_dtype=wire_dtype))


@remember
def nearest_line(machine: Machine, collective: Collective) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of the line alpha + beta M that is nearest to the allreduce's cost.

    With a table: least squares of the relative error over its points, neither number below 0; a single point is all
    bandwidth. Without one: the same of the scaled tables, or the formula's first value and last slope. (0, 0) on one
    device.
    """
    if collective.devices == 1:
        return 0.0, 0.0
    table = table_for(tables_of(machine, collective.kind), collective)
    if table is not None:
        return fitted_line(sizes_on_the_wire(table, collective.wire_dtype), np.array(table.time_s))
    if (
        collective.kind != "allreduce"
        and not has_tables(machine, collective)
        and has_tables(machine, whole(collective))
    ):
        alpha_s, beta = nearest_line(machine, whole(collective))
        return alpha_s / 2, beta / 2
    curve = idle_curve(machine, collective)
    sizes, times = curve.points
    if curve.scaled is not None:
        return fitted_line(sizes, times)
    return float(times[0]), float((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))


@remember
def compute_slowdown(machine: Machine, devices: int, layout: Layout = FLAT) -> tuple[float, bool]:
    """(factor on every compute time when ``devices`` compute at once, whether that is extrapolated).

    Linear between calibrated device counts, 1 for one device unless it is given; beyond the largest count that of it,
    times exp(``loss_growth``) for each doubling; and at least the devices that share the machine's cores over their
    number (``sharing``).
    """
    factors = {1: 1.0} | {s.devices: s.factor for s in machine.compute_slowdown}
    counts = sorted(factors)
    factor = float(np.interp(devices, counts, [factors[count] for count in counts]))
    if machine.loss_growth:
        factor *= max(1.0, devices / max(counts[-1], 2)) ** (machine.loss_growth / math.log(2))
    oversubscription = sharing(machine, devices, layout)
    unknown = devices > counts[-1] and machine.loss_growth is None
    beyond = unknown and (bool(machine.compute_slowdown) or oversubscription > 1)
    return max(factor, oversubscription) if oversubscription > 1 else factor, beyond


@remember
def added_s(machine: Machine, devices: int) -> float:
    """Seconds that a step's computation takes longer on ``devices`` devices, beside the factor.

    Linear between calibrated device counts, 0 for one device unless it is given, the largest count's beyond it.
    """
    seconds = {1: 0.0} | {slowdown.devices: slowdown.added_s for slowdown in machine.compute_slowdown}
    counts = sorted(seconds)
    return float(np.interp(devices, counts, [seconds[count] for count in counts]))


def sharing(machine: Machine, devices: int, layout: Layout = FLAT) -> float:
    """Devices that compute on the cores of one node, over those cores; 1 where each has one, or nothing is known.

    The devices of a flat layout, and those on an emulated network, are taken to be on one node.
    """
    together = devices if not layout or machine.emulated_network else layout.of_a_node
    return max(1.0, together / machine.cores) if machine.cores else 1.0
