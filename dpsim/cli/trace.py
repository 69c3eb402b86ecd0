"""``dpsim trace``: timelines of a sweep as a Chrome trace."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.sweep import MeasuredPoint, PointKey, PredictedPoint

EXAMPLES = """\
Examples:
  dpsim trace reports/fusion-threshold --output trace.json
  dpsim trace reports/fusion-threshold --fusion-threshold inf"""


def trace(
    folder: Annotated[Path, Parameter(help="The folder of a sweep.")],
    /,
    *,
    network: flags.Network = None,
    devices: flags.Devices = None,
    fusion_threshold: flags.Threshold = None,
    overlap: flags.Overlap = None,
    source: Annotated[
        Literal["measured", "predicted", "both"],
        Parameter(help="Which timeline to export; both are shown one above the other."),
    ] = "both",
    output: Annotated[Path, Parameter(help="The trace file to write.")] = Path("trace.json"),
    json: flags.Json = False,
) -> None:
    """Export a step of a sweep as a Chrome trace, for Perfetto (ui.perfetto.dev).

    The default is the fastest setting on the largest number of devices.
    """
    from dpsim.records.sweep import read_predictions, read_results
    from dpsim.report.trace import write_trace
    from dpsim.timeline import Timeline

    flags.writable(output, inputs=(folder / "results.json", folder / "predictions.json"))
    threshold = None if fusion_threshold is None else flags.threshold(fusion_threshold)
    count, layout = (None, None) if devices is None else flags.layout(devices)
    conditions = flags.provided(
        network=network, devices=count, layout=layout or None, fusion_threshold_bytes=threshold, overlap=overlap
    )
    points: list[MeasuredPoint | PredictedPoint] = []
    _check_sweep(folder)
    if source != "predicted":
        points += [p for p in read_results(folder / "results.json").points if p.timeline is not None]
    if source != "measured":
        points += [p for p in read_predictions(folder / "predictions.json").points if p.timeline is not None]
    key = _first(points, conditions)
    timelines = [p.timeline for p in points if p.key == key and p.timeline is not None]
    write_trace(output, [Timeline.from_record(timeline) for timeline in timelines])
    if json:
        from dpsim import codec

        summary = {"trace": str(output), "timelines": [timeline.source for timeline in timelines]}
        show.print_json("trace", [codec.to_builtins(key)], summary)
        return
    print(f"{' and '.join(timeline.source for timeline in timelines)}: {_describe(key)}")
    print(f"trace file: {output}; open it at https://ui.perfetto.dev")


def _check_sweep(folder: Path) -> None:
    """Raises ``ConfigError`` for a folder that holds another kind of record."""
    from dpsim.errors import ConfigError
    from dpsim.records.bench import RECORD

    if (folder / RECORD).is_file():
        raise ConfigError(
            f"{folder} holds a benchmark of the allreduce, which keeps no timelines",
            allowed="a folder of dpsim sweep fusion-threshold or dpsim sweep devices",
            remedy="run a sweep with --output, and give its folder",
        )


def _step_s(point: MeasuredPoint | PredictedPoint) -> float:
    """Seconds per step: the median of the measured ones, or the prediction."""
    return point.step_s if isinstance(point.step_s, float) else statistics.median(point.step_s)


def _describe(key: PointKey) -> str:
    from dpsim.units import format_size

    threshold = format_size(key.fusion_threshold_bytes)
    return f"network {key.network}, {show.count_devices(key.devices)}, threshold {threshold}, overlap {key.overlap}"


def _first(points: list[MeasuredPoint | PredictedPoint], conditions: dict[str, object]) -> PointKey:
    """The fastest setting on the largest number of devices that meets the conditions. Raises ``ConfigError``."""
    from dpsim.errors import ConfigError
    from dpsim.units import format_size

    step_s = {point.key: _step_s(point) for point in reversed(points)}
    settings = sorted(dict.fromkeys(point.key for point in points), key=lambda key: (-key.devices, step_s[key]))
    for key in settings:
        if all(getattr(key, name) == value for name, value in conditions.items()):
            return key
    present = {
        "network": [key.network for key in settings],
        "devices": [key.layout or str(key.devices) for key in settings],
        "threshold": [format_size(key.fusion_threshold_bytes) for key in settings],
        "overlap": [key.overlap for key in settings],
    }
    raise ConfigError(
        "no setting of this sweep has timelines"
        + "".join(f" and {name} = {value}" for name, value in conditions.items()),
        allowed="; ".join(f"{name} {', '.join(dict.fromkeys(values))}" for name, values in present.items()),
        remedy="choose one of these with --network, --devices, --fusion-threshold and --overlap",
    )
