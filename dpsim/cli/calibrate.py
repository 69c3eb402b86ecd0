"""``dpsim calibrate``: write a machine file, measured on this machine or imported from benchmark outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show
from dpsim.cli.machine import bus_bandwidths, link_sentence, print_tables, print_times
from dpsim.errors import ConfigError
from dpsim.units import parse_bandwidth

EXAMPLES = """\
Examples:
  dpsim calibrate --network node --devices 2 --output machine.json
  dpsim calibrate --network paced:50us,1gbit --algorithm ring,direct
  dpsim calibrate --network paced:50us,1gbit --devices 2x2
    --algorithm ring,hierarchical
  dpsim calibrate --from allreduce.txt --line-rate 25gbit --output cluster.json
  dpsim calibrate --from osu_2.txt,osu_4.txt --devices 2,4
  srun -l osu_allreduce | dpsim calibrate --from - --devices 8"""


def calibrate(
    *,
    network: flags.Network = None,
    devices: flags.DevicesList = None,
    algorithm: flags.PricedAlgorithms = None,
    overlap: Annotated[str | None, Parameter(help="Overlap modes to calibrate: poll,thread (both).")] = None,
    model: Annotated[
        str | None,
        Parameter(help="Measure overlap with this model's backward instead of a stand-in; named as for dpsim profile."),
    ] = None,
    dataset: flags.DataSet = None,
    local_batch: Annotated[int, Parameter(help="With --model: samples on a device at once.")] = 32,
    wire_dtype: flags.WireDtype = None,
    strategy: flags.StrategyName = None,
    budget: Annotated[
        str | None,
        Parameter(help="Time to spend on measuring, like 10s or 2min (4s); up to twice as long if the speed changes."),
    ] = None,
    output: Annotated[Path, Parameter(help="The machine file to write.")] = Path("machine.json"),
    json: flags.Json = False,
    from_: Annotated[
        list[str] | None,
        Parameter(
            name="--from",
            negative="",
            allow_leading_hyphen=True,
            help="Import these outputs of nccl-tests, OSU or IMB instead of measuring: FILE,FILE; - is standard input.",
        ),
    ] = None,
    format: Annotated[
        Literal["nccl-tests", "osu", "imb"] | None,
        Parameter(help="With --from: the benchmark that printed the files [recognised by their text]."),
    ] = None,
    out_of_place: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="With --from: import the out-of-place times of nccl-tests."),
    ] = False,
    line_rate: Annotated[
        str | None,
        Parameter(
            help="With --from: the nominal rate of a link between nodes, like 25gbit: say what share was reached."
        ),
    ] = None,
    verbose: Annotated[
        bool, Parameter(negative="", show_default=False, help="Show the time of every size too.")
    ] = False,
) -> None:
    """Measure the allreduces of this machine, or import measurements; writes a machine file."""
    if from_ is not None:
        measuring = flags.provided(
            overlap=overlap, model=model, dataset=dataset, wire_dtype=wire_dtype, strategy=strategy, budget=budget
        )
        _refuse(measuring, "with --from nothing is measured")
        rate = None if line_rate is None else parse_bandwidth(line_rate)
        _import(",".join(from_), format, network, devices, algorithm, out_of_place, rate, output, json, verbose)
        return
    importing = flags.provided(format=format, out_of_place=out_of_place or None, line_rate=line_rate)
    _refuse(importing, "without --from nothing is imported")
    from dpsim import codec
    from dpsim.harness.calibrate import calibrate as harness
    from dpsim.harness.machines import points as points_of

    flags.writable(output)
    algorithm = flags.default_algorithm(algorithm, network, wire_dtype)
    fields = flags.provided(
        network=network,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        algorithms=flags.listed("--algorithm", algorithm, str),
        overlaps=flags.listed("--overlap", overlap, str),
        model=model,
        dataset=dataset,
        local_batch=local_batch,
        wire_dtype=wire_dtype,
        strategy=strategy,
        seconds=flags.budget(budget),
    )
    with show.progress() as progress:
        machine = harness.calibrate(harness.CalibrateConfig(**fields), progress)
    codec.write(output, machine)
    points = points_of(machine)
    if json:
        summary = {"machine": str(output), "network": machine.network, "emulated_network": machine.emulated_network}
        summary |= {"link": codec.to_builtins(machine.link), "calibrated_on": machine.calibrated_on}
        show.print_json("calibrate", points, summary)
        return
    if verbose:
        print_times(points)
    print_tables(machine)
    print(link_sentence(machine))
    print(f"machine file: {output} (network {machine.network}{', emulated' if machine.emulated_network else ''})")


def _import(
    files: str,
    format: Literal["nccl-tests", "osu", "imb"] | None,
    network: str | None,
    devices: str | None,
    algorithm: str | None,
    out_of_place: bool,
    line_rate: float | None,
    output: Path,
    json: bool,
    verbose: bool,
) -> None:
    from dpsim import codec
    from dpsim.harness.imports import ImportConfig, import_machine
    from dpsim.harness.machines import points as points_of

    fields = flags.provided(
        files=flags.listed("--from", files, str),
        format=format,
        network=network,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        algorithms=flags.listed("--algorithm", algorithm, str),
        out_of_place=out_of_place,
    )
    replaced = _replaceable(output)
    machine, tables = import_machine(ImportConfig(**fields))
    codec.write(output, machine)
    points = points_of(machine)
    imported = [
        {"file": table.file, "benchmark": table.benchmark, "measured": table.measured}
        | {"algorithm": table.cost.algorithm, "devices": table.cost.devices, "layout": table.cost.layout}
        | {"sizes": len(table.cost.sizes_bytes), "busbw_bytes_per_s": bus}
        | ({} if line_rate is None else {"share_of_line_rate": bus / line_rate})
        for table, bus in zip(tables, bus_bandwidths(machine), strict=True)
    ]
    doubts = [doubt for table in tables for doubt in table.doubts]
    for doubt in doubts:
        print(f"warning: {doubt}; compare it with the original", file=sys.stderr)
    if line_rate is not None and max(bus_bandwidths(machine)) > line_rate:
        print(
            "warning: more than the line rate was reached: a node has several links, the network adds up on the way,"
            " the devices are in one node, or the rate is meant in bytes (1 GB/s is 8gbit)",
            file=sys.stderr,
        )
    if json:
        summary = {"machine": str(output), "network": machine.network, "emulated_network": machine.emulated_network}
        summary |= {
            "doubts": doubts,
            "link": codec.to_builtins(machine.link),
            "calibrated_on": machine.calibrated_on,
            "source": machine.source,
            "replaced": replaced,
        }
        show.print_json("calibrate", points, summary | {"imported": imported})
        return
    if verbose:
        print_times(points)
    for table in imported:
        scope = f"{table['algorithm']} on {table['layout'] or table['devices']} devices, {table['sizes']} sizes"
        print(f"{table['file']}: {table['benchmark']}: {scope}, {table['measured']}")
    print_tables(machine, line_rate)
    print(link_sentence(machine))
    source = machine.name if machine.network == "node" else f"network {machine.network}"
    print(f"machine file: {output} ({source}){', replaced' if replaced else ''}")


def _refuse(unused: dict[str, object], reason: str) -> None:
    """Raises ``ConfigError`` for flags that would have no effect."""
    if unused:
        names = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(f"{names}: {reason}", remedy=f"leave {names} out")


def _replaceable(output: Path) -> bool:
    """Whether ``output`` is a machine file to replace. Raises ``ConfigError`` if it is any other file."""
    from dpsim import machine as machines
    from dpsim.errors import FileFormatError

    flags.writable(output)
    if not output.exists():
        return False
    try:
        machines.read(output)
    except FileFormatError as error:
        raise ConfigError(
            f"--output {output} exists and is not a machine file",
            allowed="a new file, or a machine file to replace",
            remedy="choose another one with --output",
        ) from error
    return True
