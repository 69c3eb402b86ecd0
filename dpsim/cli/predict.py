"""``dpsim predict``: step times from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.convergence import Convergence

EXAMPLES = """\
Examples:
  dpsim predict --workload w.json --machine m.json --devices 2,4,8
    --global-batch 64 --fusion-threshold 0,32KiB,1MiB,inf
  dpsim predict --workload w.json --machine m.json --devices 4x8
    --fusion-rule ddp,horovod,mg-wfbp --overlap thread"""


def predict(
    *,
    workload: Annotated[Path, Parameter(help="A workload file from dpsim profile.")],
    machine: Annotated[Path, Parameter(help="A machine file from dpsim calibrate.")],
    devices: Annotated[str, Parameter(help="Numbers of devices: 2,4,8, or layouts: 2x4.")],
    global_batch: Annotated[
        str | None, Parameter(help="Samples per step over all devices, one number or a list: strong scaling.")
    ] = None,
    local_batch: Annotated[
        str | None,
        Parameter(help="Samples per step on each device, one number or a list: weak scaling (the largest profiled)."),
    ] = None,
    accumulate: flags.Accumulate = None,
    fusion_rule: flags.FusionRules = None,
    fusion_threshold: flags.Thresholds = None,
    cycle: flags.Cycle = None,
    algorithm: flags.PricedAlgorithms = None,
    overlap: flags.Overlap = None,
    wire_dtype: flags.WireDtype = None,
    strategy: flags.StrategyName = None,
    target_loss: Annotated[
        float | None, Parameter(help="A training loss to reach: also predict the time to it, with --convergence.")
    ] = None,
    convergence: Annotated[
        Path | None, Parameter(help="The file of steps to target losses, from the quality experiment.")
    ] = None,
    output: Annotated[Path | None, Parameter(help="Also write what --json prints to this file.")] = None,
    json: flags.Json = False,
) -> None:
    """Predict step times from a workload file and a machine file; needs no MPI.

    Every rule is combined with every algorithm and every batch. All rows use
    the same overlap.
    """
    from dpsim import codec
    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.predict import predict_points
    from dpsim.predict.time_to_target import add_time_to_target

    flags.writable(output, inputs=tuple(path for path in (workload, machine, convergence) if path))
    profiled, calibrated = workloads.read(workload), machines.read(machine)
    whole = flags.whole("--global-batch"), flags.whole("--local-batch")
    fields = flags.provided(
        rule=flags.listed("--fusion-rule", fusion_rule, str),
        algorithm=flags.listed("--algorithm", algorithm, str),
        global_batch=flags.listed("--global-batch", global_batch, whole[0]),
        local_batch=flags.listed("--local-batch", local_batch, whole[1]),
        overlap=overlap,
        accumulate=accumulate,
        wire_dtype=wire_dtype,
        cycle_s=flags.duration(cycle),
        strategy=strategy,
    )
    counts = flags.listed("--devices", devices, flags.devices_or_layout) or ()
    thresholds = flags.listed("--fusion-threshold", fusion_threshold, flags.threshold) or ()
    fit = _convergence(target_loss, convergence)
    points, summary = predict_points(profiled, calibrated, counts, thresholds, **fields)
    if fit is not None:
        add_time_to_target(points, summary, fit)
    summary |= {"workload": str(workload), "machine": str(machine), "machine_name": calibrated.name}
    if output is not None or json:
        shown = show.json_object("predict", points, summary)
        if output is not None:
            codec.write(output, shown)
        if json:
            print(codec.to_json(shown))
            return
    weak = summary["scaling"] == "weak"
    _print_table(points, calibrated.name if calibrated.network == "node" else calibrated.network, weak=weak)
    for best in summary["best"]:
        faster = _faster(best, summary["best"], "local_batch" if weak else "global_batch")
        print(_sentence(best, faster))
    for sentence in summary.get("time_to_target", []):
        print(sentence)
    for sentence in [*_notes(points, summary), *summary["cautions"]]:
        print(f"Note: {sentence}.")


def _convergence(target_loss: float | None, path: Path | None) -> Convergence | None:
    """The fit of steps to the target loss, ``None`` where none is asked for. Raises ``ConfigError``."""
    from dpsim.errors import ConfigError
    from dpsim.records import convergence

    if (target_loss is None) != (path is None):
        raise ConfigError(
            "--target-loss without --convergence" if path is None else "--convergence without --target-loss",
            allowed="both, or neither",
            remedy="python -m dpsim.experiments.quality --output FOLDER writes FOLDER/convergence.json",
        )
    return None if target_loss is None or path is None else convergence.read(path).find(target_loss)


def _notes(points: list[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    """Sentences that explain the table."""
    notes = [
        "the interval is to hold the median step of a later run with a probability of "
        f"{summary['interval_level']:.0%}, by the scatter of the calibration and what the files leave to be assumed"
    ]
    if summary["extrapolated"]:
        notes[0] += "; it is wider with every step outside of what was measured"
        notes.append("rows marked 'extrapolated' lie beyond the calibrated range: treat them as rough")
    if any(point["memory_bytes"]["activations"] is None for point in points):
        notes.append("activation memory is unknown, because the workload file does not state it: it comes on top (+)")
    return notes


def _print_table(points: list[dict[str, Any]], machine: str, *, weak: bool) -> None:
    from dpsim.report.table import Column
    from dpsim.units import format_duration, format_size

    batch, level = "local_batch" if weak else "global_batch", points[0]["interval_level"]

    def several(key: str) -> bool:
        return len({point[key] for point in points}) > 1

    columns: tuple[Column[dict[str, Any]], ...] = (
        Column(head="devices", cell=lambda point: point["layout"], left=True),
        Column(head=batch.replace("_", " "), cell=lambda point: f"{point[batch]:g}", shown=several(batch)),
        Column(head="rule", cell=lambda point: point["fusion_rule"], shown=several("fusion_rule")),
        Column(head="algorithm", cell=lambda point: point["algorithm"], shown=several("algorithm")),
        Column(
            head="threshold",
            cell=lambda point: "-" if (size := point["fusion_threshold_bytes"]) is None else format_size(size),
        ),
        Column(head="buckets", cell=lambda point: str(point["buckets"])),
        Column(head="overlap", cell=lambda point: point["overlap"]),
        Column(head="step", cell=lambda point: format_duration(point["predicted_step_s"])),
        Column(
            head=f"{level:.0%} interval", cell=lambda point: _band(point["predicted_low_s"], point["predicted_high_s"])
        ),
        Column(head="exposed", cell=lambda point: format_duration(point["predicted_exposed_communication_s"])),
        Column(
            head="communication cost",
            cell=lambda point: format_duration(point["predicted_communication_cost_s"]),
            shown=any(point["devices"] > 1 for point in points),
        ),
        Column(
            head="waiting",
            cell=lambda point: format_duration(point["waiting_for_slowest_s"] + point["waiting_for_input_s"]),
            shown=any(point["waiting_for_slowest_s"] + point["waiting_for_input_s"] > 0 for point in points),
        ),
        Column(
            head="to target",
            cell=lambda point: format_duration(point["time_to_target_s"]),
            shown="time_to_target_s" in points[0],
        ),
        Column(head="memory", cell=lambda point: _memory(point["memory_bytes"])),
        Column(
            head="",
            cell=lambda point: "does not fit " * (point["fits"] is False) + "extrapolated" * point["extrapolated"],
        ),
    )
    show.table(columns, points, title=f"on {machine}")


def _band(low_s: float, high_s: float) -> str:
    """``368-415 ms``."""
    from dpsim.units import format_duration

    low, high = format_duration(low_s).split(), format_duration(high_s).split()
    return f"{low[0]}-{high[0]} {high[1]}" if low[1] == high[1] else f"{' '.join(low)}-{' '.join(high)}"


def _memory(parts: dict[str, int | None]) -> str:
    from dpsim.units import format_size

    return format_size(parts["total"] or 0) + (" +" if parts["activations"] is None else "")


def _faster(best: dict[str, Any], others: list[dict[str, Any]], batch: str) -> dict[str, Any] | None:
    """The prediction with the fewest devices that still trains more samples per second, with the same settings."""
    keys = ("fusion_rule", "algorithm", batch)
    same = [point for point in others if all(point[key] == best[key] for key in keys)]
    fewer = [p for p in same if p["devices"] < best["devices"] and p["images_per_s"] > best["images_per_s"]]
    return min(fewer, key=lambda point: int(point["devices"]), default=None)


def _sentence(best: dict[str, Any], faster: dict[str, Any] | None) -> str:
    """The advice for one number of devices: the best setting and its speed, or fewer devices that are ``faster``."""
    from dpsim.units import format_duration, format_size

    layout = "" if best["layout"] == str(best["devices"]) else f" ({best['layout']})"
    setting = (
        f"{show.count_devices(best['devices'])}{layout}, batch {best['global_batch']}, {best['fusion_rule']}, "
        f"{best['algorithm']}"
    )
    speed = (
        f"{format_duration(best['predicted_step_s'])} per step, speedup {best['speedup']:.2f}, scaling efficiency "
        f"{best['scaling_efficiency']:.0%}"
    )
    if best["devices"] == 1:
        return f"1 device: {format_duration(best['predicted_step_s'])} per step."
    if faster is not None:
        return f"{setting}: do not use them, {show.count_devices(faster['devices'])} would be faster: {speed}."
    if best["speedup"] < 1:
        return f"{setting}: do not use them, they are slower than one device: {speed}."
    if best["any_threshold"]:
        return f"{setting}: the threshold makes no difference (within its uncertainty): {speed}."
    if best["fusion_threshold_bytes"] is None:
        return f"{setting}: {speed}."
    threshold = format_size(best["fusion_threshold_bytes"])
    if best["thresholds_compared"] == 1:
        return f"{setting}, threshold {threshold}: {speed}."
    near = ", ".join(map(format_size, best["equally_fast_bytes"]))
    others = f" (no certain difference: {near})" if near else ""
    return f"{setting}: fastest at threshold {threshold}{others}: {speed}."
