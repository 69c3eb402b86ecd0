"""What ``dpsim calibrate`` does without measuring: machines are listed, shown, compared and merged."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.cli import flags, outputs, show

if TYPE_CHECKING:
    from dpsim.machine import AllreduceCost, Link, Machine


def list_machines(*, json: bool) -> None:
    """List the links and machines that ``--machine`` takes by name."""
    from dpsim.harness.machines import listed
    from dpsim.report.table import Column
    from dpsim.units import format_duration

    points = listed()
    if json:
        show.print_json("machine list", points, {})
        return
    show.table(
        (
            Column(head="name", cell=lambda point: point["name"], left=True),
            Column(head="latency", cell=lambda point: format_duration(point["latency_s"])),
            Column(head="GB/s", cell=lambda point: f"{point['bandwidth_bytes_per_s'] / 1e9:.3g}"),
            Column(
                head="90% interval",
                cell=lambda point: "-".join(f"{point[f'bandwidth_{end}'] / 1e9:.3g}" for end in ("low", "high")),
            ),
            Column(head="published", cell=lambda point: point["date"], left=True),
            Column(head="what", cell=lambda point: point["what"], left=True),
        ),
        points,
    )
    print("A link between nodes is one adapter's; a+b is a inside nodes and b between them.")
    print("dpsim calibrate --show NAME names the source of each.")


def show_machine(file: Path, plot: Path | None, *, json: bool) -> None:
    """Show a machine file: its tables, its link and where they come from."""
    from dpsim import codec
    from dpsim import machine as machines
    from dpsim.harness.machines import points

    machine = machines.read(file)
    _draw(plot, {file.name: machine})
    if json:
        shown = {key: value for key, value in codec.to_builtins(machine).items() if key not in ("allreduce", "schema")}
        show.print_json("machine show", points(machine), shown)
        return
    print(f"{machine.name}, network {machine.network}")
    print_times(points(machine))
    print(link_sentence(machine))
    date = f" ({machine.date})" if machine.date else ""
    print(
        f"source: {machine.source or 'not stated'}{date}; measured on {machine.calibrated_on or 'an unknown machine'}"
    )


def compare(files: Sequence[Path], plot: Path | None, *, json: bool) -> None:
    """Divide the times of machine files by those of the first.

    Each table's latency and bandwidth are those of the line nearest to it. A time is interpolated where only one of two
    tables has the size.
    """
    from dpsim import machine as machines
    from dpsim.codec import to_builtins
    from dpsim.report.compare.machines import compare_machines, tables
    from dpsim.report.terminal import TerminalReport

    by_name = {name: machines.read(path) for name, path in zip(_names(files), files, strict=True)}
    comparison = compare_machines(by_name)
    _draw(plot, by_name)
    if json:
        ratios, lines, unmatched = (
            to_builtins(rows) for rows in (comparison.ratios, comparison.lines, comparison.unmatched)
        )
        described = [
            {"label": name, "path": str(path), "name": machine.name, "network": machine.network}
            | {"calibrated_on": machine.calibrated_on, "source": machine.source}
            for (name, machine), path in zip(by_name.items(), files, strict=True)
        ]
        show.print_json("machine compare", ratios, {"machines": described, "lines": lines, "unmatched": unmatched})
        return
    for name, machine in by_name.items():
        print(f"{name}: {machine.name}, network {machine.network}, {machine.calibrated_on or 'an unknown machine'}")
        print(f"  {link_sentence(machine)}")
    show.rich(TerminalReport(tables=tables(comparison)))


def _names(files: Sequence[Path]) -> list[str]:
    """A different name for each file: its own, its path, or the path with its number."""
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        names = [str(path) for path in files]
    return [
        name if name not in names[:number] else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


def merge(files: Sequence[Path], output: Path, *, json: bool) -> None:
    """Merge the tables of several machine files; the link is fitted to all of them."""
    from dpsim import codec
    from dpsim import machine as machines
    from dpsim.errors import ConfigError
    from dpsim.harness.machines import merged, points

    flags.writable(output, "machine", inputs=files)
    if len(files) < 2:
        raise ConfigError(f"{len(files)} machine files to merge", allowed="two or more")
    machine = merged([machines.read(path) for path in files])
    codec.write(output, machine)
    if json:
        show.print_json("machine merge", points(machine), {"machine": str(output), "source": machine.source})
        return
    print_times(points(machine))
    print(link_sentence(machine))
    print(f"machine file: {output}")


def print_times(points: Sequence[dict[str, Any]]) -> None:
    """Print a table of all times."""
    from dpsim.report.table import Column
    from dpsim.units import format_duration, format_size

    show.table(
        (
            Column(head="algorithm", cell=lambda point: point["algorithm"], left=True),
            Column(head="devices", cell=lambda point: point["layout"]),
            Column(head="collective", cell=lambda point: point["kind"], left=True),
            Column(head="size", cell=lambda point: format_size(point["size_bytes"])),
            Column(head="time", cell=lambda point: format_duration(point["time_s"])),
        ),
        points,
    )


def bus_bandwidth(table: AllreduceCost) -> float:
    """Return the largest bus bandwidth of a table in bytes a second: what a ring sends over each link.

    It is 2 (n - 1) / n times the size over the time of an allreduce, and half of that of one of its halves.
    """
    n, sends = table.devices, 2 if table.kind == "allreduce" else 1
    times = zip(table.sizes_bytes, table.time_s, strict=True)
    return max((sends * (n - 1) / n * size / time_s for size, time_s in times if time_s), default=0.0)


def inside_a_node(table: AllreduceCost) -> bool:
    """Return whether a table is of the devices of one node, of which the rate of a link between nodes says nothing."""
    return table.collective.counts[0] == 1


def print_tables(machine: Machine, line_rate: float | None = None) -> None:
    """Print a line for each table of allreduces or halves of them: its smallest size's time, and its bus bandwidth.

    With the share of ``line_rate`` in bytes a second that this is, or of the rate of an emulated network; not of tables
    inside a node.
    """
    from dpsim.machine import Network
    from dpsim.units import format_bandwidth, format_duration, format_size

    nominal = line_rate or Network.parse(machine.network).bandwidth_bytes_per_s
    halves = [cost for cost in machine.halves if cost.kind not in ("ordered-sum", "send", "copy")]
    for cost in (each for each in machine.halves if each.kind == "send"):
        print(
            f"send between {cost.layout or cost.devices} devices: {format_size(cost.sizes_bytes[0])} in"
            f" {format_duration(cost.time_s[0])}, {format_size(cost.sizes_bytes[-1])} in"
            f" {format_duration(cost.time_s[-1])}"
        )
    for cost in (*machine.allreduce, *halves):
        bus = bus_bandwidth(cost)
        kind = "" if cost.kind == "allreduce" else f"{cost.kind} by "
        between_nodes = nominal < float("inf") and not inside_a_node(cost)
        share = f", {bus / nominal:.0%} of {format_bandwidth(nominal)}" if between_nodes else ""
        print(
            f"{kind}{cost.algorithm} on {cost.layout or cost.devices} devices: {format_size(cost.sizes_bytes[0])} in"
            f" {format_duration(cost.time_s[0])}, bus bandwidth up to {format_bandwidth(bus)}{share}"
        )


def link_sentence(machine: Machine) -> str:
    """Sentences about the links, which price the settings that no table covers."""
    if machine.link is None:
        return "no link: only settings that the tables cover can be priced"
    inside = f"; inside a node {_link(machine.link_in_node)}" if machine.link_in_node else ""
    racks = f"; between racks of {machine.nodes_per_rack} nodes " if machine.link_between_racks else ""
    racks += _link(machine.link_between_racks) if machine.link_between_racks else ""
    return f"link for settings that no table covers: {_link(machine.link)}{inside}{racks}"


def _link(link: Link) -> str:
    from dpsim.units import format_bandwidth, format_duration

    text = f"{format_duration(link.latency_s)}, {format_bandwidth(link.bandwidth_bytes_per_s)} each way"
    if link.relative_uncertainty is not None:
        text += f", known to {link.relative_uncertainty:.0%} (one standard error)"
    for seconds, of in ((link.message_overhead_s, "message"), (link.bucket_overhead_s, "bucket")):
        if seconds:
            text += f", and {format_duration(seconds)} of the host for each {of}"
    if not link.fitted_to:
        return text
    return (
        f"{text}, fitted to {link.fitted_to} (residual {link.median_residual:.0%} in the median, "
        f"{link.largest_residual:.0%} at most)"
    )


def _draw(path: Path | None, machines: Mapping[str, Machine]) -> None:
    outputs.drawable(path)
    if path is None:
        return
    from dpsim.report.machine import machines_chart

    outputs.draw_plot(path, machines_chart(machines))
    print(f"picture: {path}", file=sys.stderr)
