"""``dpsim trace``: timelines of a sweep as a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.sweep import MeasuredPoint, PredictedPoint
    from dpsim.setting import Setting

EXAMPLES = """\
Examples:
  dpsim trace reports/fusion-threshold --output trace.json
  dpsim trace reports/fusion-threshold --fusion-threshold inf"""


_RECORDS = ("results", "predictions", "blind")


class PointFlags(flags.Flags, of="network devices local_batch batch_norm fusion_threshold_bytes overlap"):
    """The flags that choose a point of a sweep."""

    source: Literal["measured", "predicted", "both"] = flags.flag(
        "Which timeline to export; both are shown one above the other.", default="both"
    )
    output: Path = flags.flag("The trace file to write.", default=Path("trace.json"))
    json: flags.Json = False


def trace(
    folder: Annotated[Path, Parameter(help="The folder of a sweep.")],
    /,
    *,
    point: PointFlags,
) -> None:
    """Export a step of a sweep as a Chrome trace, for Perfetto (ui.perfetto.dev).

    The default is the setting that trains most samples per second on the largest number of devices. The predicted step
    is that of the prediction which the report compares with the measurement.
    """
    from dpsim.records.sweep import read_predictions, read_results
    from dpsim.report.trace import write_trace
    from dpsim.timeline import Timeline

    flags.writable(point.output, "trace", inputs=tuple(folder / f"{name}.json" for name in _RECORDS))
    conditions = point.values()
    if "devices" in conditions:
        conditions["devices"] = conditions.pop("layout") or str(conditions["devices"])
    points: list[MeasuredPoint | PredictedPoint] = []
    _check_sweep(folder)
    same_minutes = (folder / "blind.json").is_file()
    predicted = folder / ("blind.json" if same_minutes else "predictions.json")
    if point.source != "predicted":
        points += [p for p in read_results(folder / "results.json").points if p.timeline is not None]
    if point.source != "measured":
        points += [p for p in read_predictions(predicted).points if p.timeline is not None]
    setting = _first(points, conditions)
    timelines = [p.timeline for p in points if p.setting == setting and p.timeline is not None]
    write_trace(point.output, [Timeline.from_record(timeline) for timeline in timelines])
    if point.json:
        summary = {"trace": str(point.output), "timelines": [timeline.source for timeline in timelines]}
        show.print_json("trace", [_point(setting)], summary)
        return
    kinds = {"predicted": "predicted from the same minutes" if same_minutes else "predicted"}
    print(f"{' and '.join(kinds.get(each.source, each.source) for each in timelines)}: {_describe(setting)}")
    print(f"trace file: {point.output}; open it at https://ui.perfetto.dev")


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


def _point(setting: Setting) -> dict[str, Any]:
    """The setting as a flat point of ``--json``."""
    from dpsim.records.columns import run_values

    return run_values(setting) | {"local_batch": setting.plan.local_batch}


def _describe(setting: Setting) -> str:
    from dpsim.units import format_size

    plan = setting.plan
    return (
        f"network {setting.where}, {show.count_devices(plan.devices)}, local batch {plan.local_batch:g}, "
        f"batch norm {plan.batch_norm}, threshold {format_size(plan.threshold_bytes)}, overlap {plan.overlap}"
    )


def _first(points: list[MeasuredPoint | PredictedPoint], conditions: dict[str, object]) -> Setting:
    """The setting that trains fastest on the most devices of those that meet the conditions. Raises ``ConfigError``."""
    import numpy as np

    from dpsim.errors import ConfigError
    from dpsim.records.sweep import MeasuredPoint, clean_values

    step_s = {
        point.setting: float(np.median(clean_values([point]) if isinstance(point, MeasuredPoint) else point.step_s))
        for point in reversed(points)
    }
    settings = sorted(
        dict.fromkeys(point.setting for point in points),
        key=lambda setting: (-setting.plan.devices, step_s[setting] / setting.plan.global_batch),
    )
    for setting in settings:
        if all(setting.value(name) == value for name, value in conditions.items()):
            return setting
    names = {"fusion_threshold_bytes": "threshold"}
    present = {
        names.get(field, field.replace("_", " ")): dict.fromkeys(setting.text(field) for setting in settings)
        for field in PointFlags.several
    }
    raise ConfigError(
        "no setting of this sweep has timelines"
        + "".join(f" and {name} = {value}" for name, value in conditions.items()),
        allowed="; ".join(f"{name} {', '.join(values)}" for name, values in present.items()),
        remedy="choose one of these with --network, --devices, --local-batch, --batch-norm, --fusion-threshold and "
        "--overlap",
    )
