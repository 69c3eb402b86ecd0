"""``dpsim calibrate``: a Machine, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim calibrate --network node --devices 2 --output machine.json
  dpsim calibrate --network paced:50us,1gbit --algorithm ring,direct
  dpsim calibrate --network paced:50us,1gbit --devices 2x2
    --algorithm ring,hierarchical"""


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
) -> None:
    """Measure this machine's allreduces: writes a machine file."""
    from dpsim import codec
    from dpsim.harness import calibrate as harness
    from dpsim.units import format_duration, format_size, parse_duration

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
    points: list[dict[str, Any]] = [
        {"devices": cost.devices, "layout": cost.layout or str(cost.devices), "algorithm": cost.algorithm}
        | {"wire_dtype": cost.wire_dtype, "size_bytes": size, "time_s": time_s}
        for cost in machine.allreduce
        for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)
    ]
    if json:
        summary = {"machine": str(output), "network": machine.network, "emulated_network": machine.emulated_network}
        show.as_json("calibrate", points, summary | {"calibrated_on": machine.calibrated_on})
        return
    table = show.table("algorithm", "devices", "size", "allreduce")
    for point in points:
        size, time_s = format_size(point["size_bytes"]), format_duration(point["time_s"])
        table.add_row(point["algorithm"], point["layout"], size, time_s)
    show.rich(table)
    print(f"machine file: {output} (network {machine.network}{', emulated' if machine.emulated_network else ''})")
