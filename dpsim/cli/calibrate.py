"""``dpsim calibrate``: a Machine, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.machine import Machine

EXAMPLES = """\
Examples:
  dpsim calibrate --network node --devices 2 --output machine.json
  dpsim calibrate --network paced:50us,1gbit --algorithm ring,direct
  dpsim calibrate --network paced:50us,1gbit --devices 2x2
    --algorithm ring,hierarchical
  dpsim calibrate --from allreduce.txt --output cluster.json
  dpsim calibrate --from osu_2.txt,osu_4.txt --devices 2,4"""


def calibrate(
    *,
    network: flags.Network = None,
    devices: flags.DevicesList = None,
    algorithm: flags.Algorithms = None,
    overlap: Annotated[str | None, Parameter(help="Mechanisms to measure beside computation: poll,thread.")] = None,
    model: Annotated[str | None, Parameter(help="Measure beside this model's own backward, not a stand-in.")] = None,
    dataset: flags.DataSet = None,
    local_batch: Annotated[int, Parameter(help="With --model: samples on a device at once.")] = 32,
    wire_dtype: flags.WireDtype = None,
    budget: Annotated[str | None, Parameter(help="Time for each device count and algorithm, like 4s.")] = None,
    output: Annotated[Path, Parameter(help="The machine file to write.")] = Path("machine.json"),
    json: flags.Json = False,
    from_: Annotated[
        str | None,
        Parameter(name="--from", help="Measure nothing: import these outputs of nccl-tests, OSU or IMB, FILE,FILE."),
    ] = None,
    format: Annotated[
        Literal["nccl-tests", "osu", "imb"] | None,
        Parameter(help="With --from: what printed the files [what they look like]."),
    ] = None,
    out_of_place: Annotated[
        bool, Parameter(negative="", show_default=False, help="With --from: nccl-tests' out-of-place times.")
    ] = False,
) -> None:
    """Measure this machine's allreduces, or import others' figures: writes a machine file."""
    if from_ is not None:
        measuring = flags.given(overlap=overlap, model=model, dataset=dataset, wire_dtype=wire_dtype, budget=budget)
        _unused(measuring, "--from measures nothing")
        _import(from_, format, network, devices, algorithm, out_of_place, output, json)
        return
    _unused(flags.given(format=format, out_of_place=out_of_place or None), "without --from nothing is imported")
    from dpsim import codec
    from dpsim.harness import calibrate as harness
    from dpsim.units import parse_duration

    flags.writable(output)
    algorithm = flags.usual_algorithm(algorithm, network, wire_dtype)
    chosen: dict[str, Any] = flags.given(
        network=network,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        algorithms=flags.listed("--algorithm", algorithm, str),
        overlaps=flags.listed("--overlap", overlap, str),
        model=model,
        dataset=dataset,
        local_batch=local_batch,
        wire_dtype=wire_dtype,
        seconds=None if budget is None else parse_duration(budget),
    )
    with show.progress() as tell:
        machine = harness.calibrate(harness.CalibrateConfig(**chosen), tell)
    codec.write(output, machine)
    points = _points(machine)
    if json:
        summary = {"machine": str(output), "network": machine.network, "emulated_network": machine.emulated_network}
        show.as_json("calibrate", points, summary | {"calibrated_on": machine.calibrated_on})
        return
    _print(points)
    print(f"machine file: {output} (network {machine.network}{', emulated' if machine.emulated_network else ''})")


def _import(
    files: str,
    format: Literal["nccl-tests", "osu", "imb"] | None,
    network: str | None,
    devices: str | None,
    algorithm: str | None,
    out_of_place: bool,
    output: Path,
    json: bool,
) -> None:
    from dpsim import codec
    from dpsim.harness.imports import ImportConfig, import_machine

    chosen: dict[str, Any] = flags.given(
        files=flags.listed("--from", files, str),
        format=format,
        network=network,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        algorithms=flags.listed("--algorithm", algorithm, str),
        out_of_place=out_of_place,
    )
    replaced = _replaceable(output)
    machine, tables = import_machine(ImportConfig(**chosen))
    codec.write(output, machine)
    points = _points(machine)
    told = [
        {"file": table.file, "benchmark": table.benchmark, "measured": table.measured}
        | {"algorithm": table.cost.algorithm, "devices": table.cost.devices, "layout": table.cost.layout}
        | {"sizes": len(table.cost.sizes_bytes)}
        for table in tables
    ]
    if json:
        summary = {"machine": str(output), "network": machine.network, "emulated_network": machine.emulated_network}
        summary |= {"calibrated_on": machine.calibrated_on, "source": machine.source, "replaced": replaced}
        show.as_json("calibrate", points, summary | {"imported": told})
        return
    _print(points)
    for table in told:
        on = f"{table['algorithm']} on {table['layout'] or table['devices']} devices, {table['sizes']} sizes"
        print(f"{table['file']}: {table['benchmark']}: {on}, {table['measured']}")
    print(f"machine file: {output} (network {machine.network}){', replaced' if replaced else ''}")


def _unused(given: dict[str, object], why: str) -> None:
    """Refuse flags that would change nothing."""
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{names}: {why}", remedy=f"leave {names} out")


def _replaceable(output: Path) -> bool:
    """Whether there is a machine file to replace; any other file that is there is not overwritten."""
    from dpsim import machine as machines
    from dpsim.errors import FileFormatError

    flags.writable(output)
    if not output.exists():
        return False
    try:
        machines.read(output)
    except FileFormatError as error:
        raise ConfigError(
            f"--output {output} is there already and is no machine file",
            allowed="a new file, or a machine file to replace",
            remedy="choose another one with --output",
        ) from error
    return True


def _points(machine: Machine) -> list[dict[str, Any]]:
    """Every time of a machine's allreduce tables, as ``--json`` lists them."""
    return [
        {"devices": cost.devices, "layout": cost.layout or str(cost.devices), "algorithm": cost.algorithm}
        | {"wire_dtype": cost.wire_dtype, "size_bytes": size, "time_s": time_s}
        for cost in machine.allreduce
        for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)
    ]


def _print(points: list[dict[str, Any]]) -> None:
    from dpsim.units import format_duration, format_size

    table = show.table("algorithm", "devices", "size", "allreduce")
    for point in points:
        size, time_s = format_size(point["size_bytes"]), format_duration(point["time_s"])
        table.add_row(point["algorithm"], point["layout"], size, time_s)
    show.rich(table)
