"""``dpsim trace``: stored timelines of a sweep as a Chrome trace."""

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
        Literal["measured", "predicted", "both"], Parameter(help="Whose timeline; both stand one below the other.")
    ] = "both",
    output: Annotated[Path, Parameter(help="The trace file to write.")] = Path("trace.json"),
    json: flags.Json = False,
) -> None:
    """Export steps of a sweep as a Chrome trace, to look at in Perfetto (ui.perfetto.dev).

    Without flags it is the setting with the most devices that was measured to
    be fastest.
    """
    from dpsim.records.sweep import read_predictions, read_results
    from dpsim.report.trace import write_trace
    from dpsim.timeline import Timeline

    flags.writable(output, inputs=(folder / "results.json", folder / "predictions.json"))
    threshold = None if fusion_threshold is None else flags.threshold(fusion_threshold)
    count, layout = (None, None) if devices is None else flags.layout(devices)
    wanted = flags.given(
        network=network, devices=count, layout=layout or None, fusion_threshold_bytes=threshold, overlap=overlap
    )
    points: list[MeasuredPoint | PredictedPoint] = []
    _check_sweep(folder)
    if source != "predicted":
        points += [p for p in read_results(folder / "results.json").points if p.timeline is not None]
    if source != "measured":
        points += [p for p in read_predictions(folder / "predictions.json").points if p.timeline is not None]
    key = _first(points, wanted)
    chosen = [p.timeline for p in points if p.key == key and p.timeline is not None]
    write_trace(output, [Timeline.from_record(timeline) for timeline in chosen])
    if json:
        from dpsim import codec

        summary = {"trace": str(output), "timelines": [timeline.source for timeline in chosen]}
        show.as_json("trace", [codec.to_builtins(key)], summary)
        return
    print(f"{' and '.join(timeline.source for timeline in chosen)}: {_describe(key)}")
    print(f"trace file: {output}; open it at https://ui.perfetto.dev")


def _check_sweep(folder: Path) -> None:
    """Refuse a folder that holds another kind of record."""
    from dpsim.errors import ConfigError
    from dpsim.records.bench import RECORD

    if (folder / RECORD).is_file():
        raise ConfigError(
            f"{folder} holds a benchmark of the allreduce, which keeps no timelines",
            allowed="the folder of dpsim sweep fusion-threshold or dpsim sweep devices",
            remedy="run a sweep with --output, and give its folder",
        )


def _step_s(point: MeasuredPoint | PredictedPoint) -> float:
    """Seconds per step: the median of what was measured, or the predicted ones."""
    return point.step_s if isinstance(point.step_s, float) else statistics.median(point.step_s)


def _describe(key: PointKey) -> str:
    from dpsim.units import format_size

    threshold = format_size(key.fusion_threshold_bytes)
    return f"network {key.network}, {show.count_devices(key.devices)}, threshold {threshold}, overlap {key.overlap}"


def _first(points: list[MeasuredPoint | PredictedPoint], wanted: dict[str, object]) -> PointKey:
    from dpsim.errors import ConfigError
    from dpsim.units import format_size

    step_s = {point.key: _step_s(point) for point in reversed(points)}
    kept = sorted(dict.fromkeys(point.key for point in points), key=lambda key: (-key.devices, step_s[key]))
    for key in kept:
        if all(getattr(key, name) == value for name, value in wanted.items()):
            return key
    held = {
        "network": [key.network for key in kept],
        "devices": [key.layout or str(key.devices) for key in kept],
        "threshold": [format_size(key.fusion_threshold_bytes) for key in kept],
        "overlap": [key.overlap for key in kept],
    }
    raise ConfigError(
        "no setting of this sweep that kept its timelines is like that: "
        + (", ".join(f"{name} = {value}" for name, value in wanted.items()) or "none were kept"),
        allowed="; ".join(f"{what} {', '.join(dict.fromkeys(values))}" for what, values in held.items()),
        remedy="choose among these with --network, --devices, --fusion-threshold and --overlap",
    )
