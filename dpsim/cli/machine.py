"""``dpsim machine``: show, compare and merge machine files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.machine import Machine

EXAMPLES = """\
Examples:
  dpsim machine show machine.json
  dpsim machine compare old.json new.json --plot both.svg
  dpsim machine merge two.json four.json --output cluster.json"""
_SHOW_EXAMPLES = """\
Examples:
  dpsim machine show machine.json
  dpsim machine show cluster.json --plot cluster.svg"""
_COMPARE_EXAMPLES = """\
Examples:
  dpsim machine compare old.json new.json --plot both.png"""
_MERGE_EXAMPLES = """\
Examples:
  dpsim machine merge two.json four.json --output cluster.json"""

_Plot = Annotated[Path | None, Parameter(help="Draw the times of all tables into this file, .svg or .png.")]


def group() -> App:
    """``dpsim machine`` with its commands."""
    app = flags.group("machine", "Show, compare and merge machine files.", EXAMPLES)
    app.command(show_machine, name="show", help_epilogue=_SHOW_EXAMPLES)
    app.command(compare, help_epilogue=_COMPARE_EXAMPLES)
    app.command(merge, help_epilogue=_MERGE_EXAMPLES)
    return app


def show_machine(
    file: Annotated[Path, Parameter(help="A machine file from dpsim calibrate.")],
    /,
    *,
    plot: _Plot = None,
    json: flags.Json = False,
) -> None:
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
    print(f"source: {machine.source or 'not stated'}; measured on {machine.calibrated_on or 'an unknown machine'}")


def compare(first: Path, second: Path, /, *, plot: _Plot = None, json: flags.Json = False) -> None:
    """Divide the times of the second machine file by those of the first."""
    from dpsim import machine as machines
    from dpsim.errors import ConfigError
    from dpsim.harness.machines import points
    from dpsim.report.table import Column
    from dpsim.units import format_duration, format_size

    both = {path.name: machines.read(path) for path in (first, second)}
    _draw(plot, both)
    keys = ("algorithm", "layout", "wire_dtype", "size_bytes")
    times = [{tuple(p[k] for k in keys): p["time_s"] for p in points(machines.read(path))} for path in (first, second)]
    common = [key for key in times[0] if key in times[1]]
    if not common:
        raise ConfigError(
            f"{first} and {second} have no allreduce of one algorithm, device count and size in common",
            allowed="machine files with a table of the same allreduce",
            remedy="see what each contains with dpsim machine show",
        )
    rows = [dict(zip(keys, key, strict=True)) | {"ratio": times[1][key] / times[0][key]} for key in common]
    if json:
        show.print_json("machine compare", rows, {"first": str(first), "second": str(second)})
        return
    show.table(
        (
            Column(head="algorithm", cell=lambda row: row["algorithm"], left=True),
            Column(head="devices", cell=lambda row: row["layout"]),
            Column(head="size", cell=lambda row: format_size(row["size_bytes"])),
            Column(head=first.name, cell=lambda row: format_duration(times[0][tuple(row[key] for key in keys)])),
            Column(head=second.name, cell=lambda row: format_duration(times[1][tuple(row[key] for key in keys)])),
            Column(head="ratio", cell=lambda row: f"{row['ratio']:.2f}"),
        ),
        rows,
    )


def merge(
    *files: Annotated[Path, Parameter(help="Machine files with different tables.")],
    output: Annotated[Path, Parameter(help="The machine file to write.")],
    json: flags.Json = False,
) -> None:
    """Merge the tables of several machine files; the link is fitted to all of them."""
    from dpsim import codec
    from dpsim import machine as machines
    from dpsim.errors import ConfigError
    from dpsim.harness.machines import merged, points

    flags.writable(output)
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
            Column(head="size", cell=lambda point: format_size(point["size_bytes"])),
            Column(head="allreduce", cell=lambda point: format_duration(point["time_s"])),
        ),
        points,
    )


def link_sentence(machine: Machine) -> str:
    """A sentence about the link, which prices the settings that no table covers."""
    from dpsim.units import format_duration, format_size

    if machine.link is None:
        return "no link: only settings that the tables cover can be priced"
    text = (
        f"link for settings that no table covers: {format_duration(machine.link.latency_s)}, "
        f"{format_size(machine.link.bandwidth_bytes_per_s)}/s"
    )
    if not machine.link.fitted_to:
        return text
    return (
        f"{text}, fitted to {machine.link.fitted_to} (residual {machine.link.median_residual:.0%} in the median, "
        f"{machine.link.largest_residual:.0%} at most)"
    )


def _draw(path: Path | None, machines: Mapping[str, Machine]) -> None:
    from dpsim.errors import ConfigError

    if path is None:
        return
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}", allowed="a name that ends in .svg or .png")
    flags.writable(path, flag="--plot")
    from dpsim.report.figures import save_as
    from dpsim.report.figures.machine import draw

    save_as(draw(machines), path)
    print(f"picture: {path}", file=sys.stderr)
