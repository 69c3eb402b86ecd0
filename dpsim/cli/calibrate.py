"""``dpsim calibrate``: a machine file, measured here or imported; and what machine files hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpsim.algorithms import ALGORITHMS
from dpsim.cli import flags, machine_files, readers, show
from dpsim.cli.machine_files import bus_bandwidth, inside_a_node, link_sentence, print_tables
from dpsim.errors import ConfigError
from dpsim.registry import listed
from dpsim.units import parse_bandwidth

if TYPE_CHECKING:
    from dpsim.machine import Machine

EXAMPLES = """\
Examples:
  dpsim calibrate --network node --devices 2 --output machine.json
  dpsim calibrate --network paced:50us,1gbit --algorithm ring,direct
  dpsim calibrate --network paced:50us,1gbit --devices 2x2
    --algorithm ring,hierarchical
  dpsim calibrate --algorithm gloo --devices 2 --output gloo.json
  dpsim calibrate --from allreduce.txt --line-rate 25gbit --output cluster.json
  dpsim calibrate --from osu_2.txt,osu_4.txt --devices 2,4
  srun -l osu_allreduce | dpsim calibrate --from - --devices 8
  dpsim calibrate --list
  dpsim calibrate --show cluster.json --plot cluster.svg
  dpsim calibrate --merge two.json,four.json --output cluster.json"""
SHOWN = (
    "--network --devices --algorithm --budget --output --json --from --line-rate --list --show --compare --merge --plot"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""
_GLOO = "gloo"
_LOCAL_BATCH = 32
"""Samples that a model has at once where overlap is measured with its backward."""


class CollectiveFlags(
    flags.Flags,
    of="network devices... algorithm... model strategy",
    by_set="overlap... dataset local_batch wire_dtype",
):
    """The flags of what is calibrated."""

    algorithm: str | None = flags.flag(
        f"List of {listed(ALGORITHMS)}; or gloo alone: what PyTorch takes on processors, by a script of dpsim's."
    )
    model: str | None = flags.flag(
        "Measure overlap with this model's backward instead of a stand-in; named as for dpsim profile."
    )
    budget: str | None = flags.flag(
        "Time to spend on measuring, like 10s or 2min (4s); up to twice as long until it is settled."
    )
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path = flags.flag("The machine file to write.", default=Path("machine.json"))
    json: flags.Json = False
    from_: list[str] | None = flags.flag(
        "Import these outputs of nccl-tests, OSU or IMB instead of measuring: FILE,FILE; - is standard input.",
        name="--from",
        negative="",
        allow_leading_hyphen=True,
    )
    format: Literal["nccl-tests", "osu", "imb"] | None = flags.flag(
        "With --from: the benchmark that printed the files [recognised by their text]."
    )
    out_of_place: bool = flags.flag("With --from: import the out-of-place times of nccl-tests.", default=False)
    line_rate: str | None = flags.flag(
        "With --from: the nominal rate of a link between nodes, like 25gbit: say what share was reached."
    )
    keep_outliers: bool = flags.flag(
        "With --from: keep rows that jump, alone out of line with both their neighbours.", default=False
    )


class FileFlags(flags.Flags, group="Machines that are there; nothing is measured"):
    """The flags of what is done with machine files; each stands for a calibration."""

    list_: bool = flags.flag(
        "List the links and machines that --machine takes by name; a+b is a inside nodes and b between them.",
        name="--list",
        default=False,
    )
    show: str | None = flags.flag("Show a machine file, or a machine of --list with its source.")
    compare: str | None = flags.flag("Compare machine files with the first: FILE,FILE.")
    merge: str | None = flags.flag(
        "Merge the tables of machine files into --output; its link is fitted to all: FILE,FILE."
    )
    plot: Path | None = flags.flag("With --show, --compare: draw the times of all tables into this file, .svg or .png.")

    def chosen(self) -> list[str]:
        """Return the flags that stand for a calibration. Raises ``ConfigError`` for a plot of none."""
        chosen = [f"--{name.strip('_')}" for name in ("list_", "show", "compare", "merge") if getattr(self, name)]
        if self.plot is not None and chosen not in (["--show"], ["--compare"]):
            raise ConfigError("--plot", allowed="--plot with --show or --compare", remedy="leave --plot out")
        return chosen


def calibrate(*, of: CollectiveFlags, files: FileFlags) -> None:
    """Measure the allreduces of this machine, or import measurements; writes a machine file."""
    if chosen := files.chosen():
        _of_files(of, files, chosen)
    else:
        _calibrate(of)


def _of_files(of: CollectiveFlags, files: FileFlags, chosen: list[str]) -> None:
    """List, show, compare or merge machines."""
    used = ("json", "output") if files.merge is not None else ("json",)
    unused = [of.spelled(name.strip("_")) for name in of.given() if name not in used]
    if names := [*chosen[1:], *unused]:
        remedy = f"leave {', '.join(names)} out: nothing is measured or imported"
        raise ConfigError(f"{', '.join(names)} with {chosen[0]}", remedy=remedy)
    if files.list_:
        machine_files.list_machines(json=of.json)
    elif files.show is not None:
        machine_files.show_machine(Path(files.show), files.plot, json=of.json)
    elif files.compare is not None:
        machine_files.compare(readers.listed("--compare", files.compare, Path) or (), files.plot, json=of.json)
    else:
        machine_files.merge(readers.listed("--merge", files.merge, Path) or (), of.output, json=of.json)


def _calibrate(of: CollectiveFlags) -> None:
    from dpsim import codec
    from dpsim.harness.machines import points as points_of

    machine, shown = _measured(of) if of.from_ is None else _imported(of)
    points = points_of(machine)
    if of.json:
        summary = {"machine": str(of.output), "network": machine.network, "emulated_network": machine.emulated_network}
        summary |= {"link": codec.to_builtins(machine.link), "calibrated_on": machine.calibrated_on}
        show.print_json("calibrate", points, summary | shown)
        return
    for table in shown.get("imported", ()):
        scope = f"{table['kind']} by {table['algorithm']} on {table['layout'] or table['devices']} devices"
        print(f"{table['file']}: {table['benchmark']}: {scope}, {table['sizes']} sizes, {table['measured']}")
    print_tables(machine, _line_rate(of))
    print(link_sentence(machine))
    source = f"network {machine.network}"
    if of.from_ is None:
        source += ", emulated" * machine.emulated_network
    elif machine.network == "node":
        source = machine.name
    print(f"machine file: {of.output} ({source}){', replaced' * shown.get('replaced', False)}")


def _measured(of: CollectiveFlags) -> tuple[Machine, dict[str, Any]]:
    from dpsim import codec
    from dpsim.machine import Network
    from dpsim.study import calibration

    importing = readers.provided(
        format=of.format,
        out_of_place=of.out_of_place or None,
        line_rate=of.line_rate,
        keep_outliers=of.keep_outliers or None,
    )
    _refuse(importing, "without --from nothing is imported")
    flags.writable(of.output, "machine")
    if of.algorithm == _GLOO:
        return _of_gloo(of), {}
    fields = {"local_batch": _LOCAL_BATCH} | of.values()
    if "network" in fields and "algorithm" not in fields:
        fields["algorithm"] = (Network.parse(fields["network"]).default_algorithm(fields.get("wire_dtype")),)
    fields |= readers.provided(algorithms=fields.pop("algorithm", None), overlaps=fields.pop("overlap", None))
    fields |= readers.provided(seconds=readers.budget(of.budget))
    if "strategy" in fields:
        fields |= calibration.devices_to_calibrate(fields["strategy"], fields.get("devices", (2,)))
    with show.measuring(of.wait_until_quiet) as progress:
        machine = calibration.calibrate(calibration.CalibrateConfig(**fields), progress)
    codec.write(of.output, machine)
    return machine, {}


def _of_gloo(of: CollectiveFlags) -> Machine:
    """Measure gloo's collectives in the job's Python: those of DDP, or with ``--strategy`` those of FSDP too."""
    from dpsim import codec
    from dpsim.harness.script.gloo import calibrate_gloo
    from dpsim.launch.job_python import job_python
    from dpsim.machine import NODE, Network

    fields = of.values()
    network, strategies = fields.pop("network", NODE), fields.pop("strategy", None)
    devices = fields.pop("devices", (2,))
    del fields["algorithm"]
    _refuse(fields, f"with --algorithm {_GLOO} it is dpsim's own script that trains")
    if Network.parse(network).paced or not all(isinstance(count, int) and count > 1 for count in devices):
        raise ConfigError(
            f"--algorithm {_GLOO} on {', '.join(map(str, devices))} devices of {network}",
            allowed="2 ranks or more on this machine, on its network node or on a shaped one",
            remedy="write it like dpsim calibrate --algorithm gloo --devices 2",
        )
    more = readers.provided(strategies=strategies and ("data-parallel", strategies), budget_s=readers.budget(of.budget))
    more["network"] = network
    by = job_python()
    by.tell("gloo")
    with show.measuring(of.wait_until_quiet) as progress:
        machine = calibrate_gloo(devices, by, progress, **more)
    codec.write(of.output, machine)
    return machine


def _imported(of: CollectiveFlags) -> tuple[Machine, dict[str, Any]]:
    """Return the machine of the files that are imported, and what ``--json`` says of them beside it."""
    from dpsim import codec
    from dpsim.imports import ImportConfig, import_machine

    fields = of.values()
    config = readers.provided(algorithms=fields.pop("algorithm", None), format=of.format, out_of_place=of.out_of_place)
    config |= {name: fields.pop(name) for name in ("network", "devices") if name in fields}
    config["keep_outliers"] = of.keep_outliers
    _refuse(
        fields | readers.provided(budget=of.budget, wait_until_quiet=of.wait_until_quiet),
        "with --from nothing is measured",
    )
    files = readers.listed("--from", ",".join(of.from_ or ()), str) or ()
    flags.writable(of.output, "machine", inputs=map(Path, files))
    line_rate, replaced = _line_rate(of), of.output.exists()
    machine, tables = import_machine(ImportConfig(files=files, **config))
    codec.write(of.output, machine)
    imported = [
        {"file": table.file, "benchmark": table.benchmark, "measured": table.measured}
        | {"kind": table.cost.kind, "algorithm": table.cost.algorithm}
        | {"devices": table.cost.devices, "layout": table.cost.layout}
        | {"sizes": len(table.cost.sizes_bytes), "busbw_bytes_per_s": bus}
        | ({} if line_rate is None or inside_a_node(table.cost) else {"share_of_line_rate": bus / line_rate})
        for table in tables
        for bus in (bus_bandwidth(table.cost),)
    ]
    doubts = show.doubts(tables)
    notes = [note for table in tables for note in table.notes]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    between_nodes = [bus_bandwidth(table.cost) for table in tables if not inside_a_node(table.cost)]
    if line_rate is not None and max(between_nodes, default=0.0) > line_rate:
        print(
            "warning: more than the line rate was reached: a node has several links, the network adds up on the way,"
            " the devices are in one node, or the rate is meant in bytes (1 GB/s is 8gbit)",
            file=sys.stderr,
        )
    return machine, {
        "doubts": doubts,
        "notes": notes,
        "source": machine.source,
        "replaced": replaced,
        "imported": imported,
    }


def _line_rate(of: CollectiveFlags) -> float | None:
    return None if of.line_rate is None else parse_bandwidth(of.line_rate)


def _refuse(unused: dict[str, object], reason: str) -> None:
    """Raises ``ConfigError`` for flags that would have no effect."""
    if unused:
        names = CollectiveFlags.spelled(*unused)
        raise ConfigError(f"{names}: {reason}", remedy=f"leave {names} out")
