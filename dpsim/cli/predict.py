"""``dpsim predict``: step times from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim predict --workload w.json --machine m.json --devices 2,4,8
    --global-batch 64 --fusion-threshold 0,32KiB,1MiB,inf"""


def predict(
    *,
    workload: Annotated[Path, Parameter(help="A workload file, as dpsim profile writes it.")],
    machine: Annotated[Path, Parameter(help="A machine file, as dpsim calibrate writes it.")],
    devices: Annotated[str, Parameter(help="Numbers of devices: 2,4,8, or layouts: 2x4.")],
    global_batch: Annotated[int | None, Parameter(help="Samples a step over all devices: strong scaling.")] = None,
    local_batch: Annotated[
        int | None, Parameter(help="Samples a step on each device: weak scaling [the largest that was profiled].")
    ] = None,
    accumulate: flags.Accumulate = None,
    fusion_rule: flags.FusionRule = None,
    fusion_threshold: flags.Thresholds = None,
    algorithm: flags.Algorithm = None,
    overlap: flags.Overlap = None,
    wire_dtype: flags.WireDtype = None,
    output: Annotated[Path | None, Parameter(help="Also write the points to this JSON file.")] = None,
    json: flags.Json = False,
) -> None:
    """Predict step times from a workload file and a machine file; needs no MPI."""
    from dpsim import codec
    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.predict import predict_points
    from dpsim.units import parse_size

    flags.writable(output)
    counts = flags.listed("--devices", devices, flags.devices_or_layout) or ()
    thresholds = flags.listed("--fusion-threshold", fusion_threshold, parse_size) or ()
    chosen: dict[str, Any] = flags.given(
        rule=fusion_rule, algorithm=algorithm, overlap=overlap, accumulate=accumulate,
        global_batch=global_batch, local_batch=local_batch, wire_dtype=wire_dtype,
    )  # fmt: skip
    points, summary = predict_points(workloads.read(workload), machines.read(machine), counts, thresholds, **chosen)
    if output is not None:
        codec.write(output, {"points": points, "summary": summary})
    if json:
        show.as_json("predict", points, summary)
        return
    show.rich(_table(points))
    for best in summary["best"]:
        print(_sentence(best))
    if summary["extrapolated"]:
        print("some points lie outside what was calibrated: their band is not to be relied on")


def _table(points: list[dict[str, Any]]) -> Any:
    from dpsim.units import format_duration, format_size

    table = show.table("network", "devices", "threshold", "buckets", "overlap", "step", "exposed", "memory", "")
    for point in points:
        threshold = point["fusion_threshold_bytes"]
        table.add_row(
            point["network"], point["layout"], "-" if threshold is None else format_size(threshold),
            str(point["buckets"]), point["overlap"], format_duration(point["predicted_step_s"]),
            format_duration(point["predicted_exposed_communication_s"]), format_size(point["memory_bytes"]["total"]),
            ("" if point["fits"] else "does not fit ") + ("extrapolated" if point["extrapolated"] else ""),
        )  # fmt: skip
    return table


def _sentence(best: dict[str, Any]) -> str:
    from dpsim.units import format_duration, format_size

    threshold = best["fusion_threshold_bytes"]
    with_threshold = "" if threshold is None else f" at threshold {format_size(threshold)}"
    layout = "" if best["layout"] == str(best["devices"]) else f" ({best['layout']})"
    return (
        f"{show.count_devices(best['devices'])}{layout}: fastest{with_threshold},"
        f" {format_duration(best['predicted_step_s'])} a step, speedup {best['speedup']:.2f},"
        f" scaling efficiency {best['scaling_efficiency']:.0%}"
    )
