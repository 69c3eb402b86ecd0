"""Reasons to doubt a sweep, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.report.content import ReportWarning
from dpsim.report.words import counted, devices_name, listed, network_name, percent, threshold_noun
from dpsim.units import format_size

FEW_SAMPLES = 10
WIDE_INTERVAL = 0.05
LEAST_DRIFT = 0.02
LEAST_CHANGE = 0.1
WIDE_SLOWDOWN = 0.03
SLOW_SHARE = 0.05
_COMPARED: dict[tuple[str, ...], str] = {("fusion_threshold_bytes",): "threshold", ("devices",): "number of devices"}


_NAMED = ("network", "runtime", "devices", "local_batch")


def warnings(comparison: Comparison) -> tuple[ReportWarning, ...]:
    """Return every reason to doubt a comparison."""
    return (
        *_of_order(comparison),
        *_of_profile(comparison),
        *_of_slowdown(comparison),
        *_of_disturbance(comparison),
        *_of_points(comparison),
        *(warning for group in comparison.groups for warning in _of_group(comparison, group)),
        *_of_run(comparison),
    )


def instant(text: str) -> datetime | None:
    """Return the time in a record, or ``None`` for a text that is not a time. Without a zone it is UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _of_order(comparison: Comparison) -> Iterator[ReportWarning]:
    """Warn unless the prediction was made before the measurement."""
    predicted, measured = instant(comparison.predicted_at), instant(comparison.measured_from)
    if predicted is None or measured is None:
        yield ReportWarning(
            kind="no-time",
            text=f"it is unknown whether the prediction ({comparison.predicted_at!r}) was made before "
            f"the measurement ({comparison.measured_from!r})",
            remedy="run the sweep again; times are written as ISO 8601",
        )
    elif predicted >= measured:
        yield ReportWarning(
            kind="predicted-after-measured",
            text=f"the prediction ({comparison.predicted_at}) is not older than the measurement "
            f"({comparison.measured_from}): it is no prediction",
            remedy="run the sweep again; check the clock if this recurs",
        )


def _of_profile(comparison: Comparison) -> Iterator[ReportWarning]:
    """Warn where the profile's own times changed while it was taken."""
    if comparison.relative_uncertainty > LEAST_CHANGE:
        yield ReportWarning(
            kind="unsteady",
            text="this machine changed its speed by itself while it was profiled: from one stretch as long as the "
            f"profile to the next, mean times differ by {comparison.relative_uncertainty:.0%} (one standard error)",
            remedy="trust the order of the settings more than their times; stop other processes, or use a machine "
            "whose cores are not shared",
        )


def _of_slowdown(comparison: Comparison) -> Iterator[ReportWarning]:
    if comparison.compute_slowdown_half_width > WIDE_SLOWDOWN:
        yield ReportWarning(
            kind="wide-slowdown",
            text="the slowdown of several devices that compute at once is only known to within "
            f"{comparison.compute_slowdown_half_width:.1%}",
            remedy="stop other processes, or raise the budget",
        )


def _of_disturbance(comparison: Comparison) -> Iterator[ReportWarning]:
    """Warn where other processes took a core in many steps; that is no change of the machine's speed."""
    share = comparison.share_clean
    if share is None or 1 - share <= SLOW_SHARE:
        return
    few = [point for point in comparison.points if point.too_few_clean]
    names = [f"{_name(comparison, point)}: {point.too_few_clean}" for point in few]
    unknown = f", and too few are left of {counted(len(few), 'point')} ({listed(names)})" if few else ""
    yield ReportWarning(
        kind="busy",
        text=f"other processes took a core in {percent(1 - share)} of the steps: these do not count{unknown}",
        remedy="stop other processes, or raise the budget",
    )


@dataclass(frozen=True, kw_only=True)
class _Doubt:
    """A doubt about points. ``text`` has a place for their number (``{count}``), and their names follow it."""

    kind: str
    applies: Callable[[ComparedPoint], bool]
    noun: str
    text: str
    remedy: str


_DOUBTS = (
    _Doubt(
        kind="few-samples",
        applies=lambda point: point.samples * (1.0 if point.share_clean is None else point.share_clean) < FEW_SAMPLES,
        noun="point",
        text=f"{{count}} with fewer than {FEW_SAMPLES} samples that count",
        remedy="raise the budget, or sweep fewer settings",
    ),
    _Doubt(
        kind="wide-interval",
        applies=lambda point: point.measured_high_s - point.measured_low_s > WIDE_INTERVAL * point.measured_step_s,
        noun="point",
        text=f"the 95% interval of {{count}} is wider than {WIDE_INTERVAL:.0%} of the step",
        remedy="raise the budget, or stop other processes",
    ),
    _Doubt(
        kind="extrapolated",
        applies=lambda point: point.extrapolated,
        noun="prediction",
        text="{count} outside what was calibrated or profiled",
        remedy="calibrate or profile over a wider range",
    ),
    _Doubt(
        kind="other-buckets",
        applies=lambda point: point.buckets != point.predicted_buckets,
        noun="point",
        text="{count} ran with another number of buckets than predicted",
        remedy="none under the rule horovod, which decides while it runs; under any other rule this is a defect",
    ),
    _Doubt(
        kind="busy",
        applies=lambda point: point.share_clean is None and point.slow_samples > SLOW_SHARE,
        noun="point",
        text=f"more than {SLOW_SHARE:.0%} of the samples of {{count}} took over 1.5 times their median: other "
        "processes may have been busy",
        remedy="stop other processes and run the sweep again",
    ),
)


def _of_points(comparison: Comparison) -> Iterator[ReportWarning]:
    for doubt in _DOUBTS:
        points = [point for point in comparison.points if doubt.applies(point)]
        if points:
            names = [_name(comparison, point) for point in points]
            text = doubt.text.format(count=counted(len(points), doubt.noun))
            yield ReportWarning(kind=doubt.kind, text=f"{text} ({listed(names)})", remedy=doubt.remedy)


def _name(comparison: Comparison, point: ComparedPoint) -> str:
    """``node, 2 devices, 64 KiB``, or the values that tell a setting of any grid apart."""
    if comparison.compared in _COMPARED:
        return f"{_place(point)}, {devices_name(point.devices)}, {format_size(point.fusion_threshold_bytes)}"
    apart = [name for name in comparison.experiment.varied if name not in _NAMED]
    batch = [f"local batch {point.local_batch:g}"] * ("local_batch" in comparison.experiment.varied)
    values = [point.setting.text(name) for name in apart]
    return ", ".join([_place(point), devices_name(point.devices), *batch, *values])


def _place(item: ComparedPoint | Group) -> str:
    """The network, and who trains on it where that is PyTorch's DDP."""
    return item.network if item.runtime == "dpsim" else network_name(item)


def _of_group(comparison: Comparison, group: Group) -> Iterator[ReportWarning]:
    where = ", ".join([_place(group), *group.apart])
    setting = _COMPARED.get(comparison.compared, "setting").replace("threshold", threshold_noun(group.runtime))
    if group.below_noise and len(comparison.members(group)) > 1:
        yield ReportWarning(
            kind="below-noise",
            text=f"on {where} the {setting} changes the speed by {percent(group.effect)}, less than the uncertainty of "
            f"these medians ({percent(group.noise_floor)}, the largest of the A/A noise and the intervals' half "
            "widths): no setting can be called the best",
            remedy=f"raise the budget, or accept that the {setting} does not matter here",
        )
    if group.noise is None:
        yield ReportWarning(
            kind="no-noise",
            text=f"no configuration was run twice on {where}: the noise is unknown",
            remedy="run the sweep again with its A/A pairs",
        )
    if group.drift is not None and abs(group.drift) > max(LEAST_DRIFT, group.noise or 0.0):
        yield ReportWarning(
            kind="drift",
            text=f"on {where} the step time changed by {group.drift:+.1%} from the first third of the run to the last",
            remedy="warm up for longer, or let the machine settle; interleaving keeps the comparison fair",
        )
    if not group.regret_halves:
        yield ReportWarning(
            kind="one-half",
            text=f"on {where} there are too few rounds to choose the best setting on one half and time it on the other",
            remedy="raise the budget",
        )


def _of_run(comparison: Comparison) -> Iterator[ReportWarning]:
    if missing := comparison.not_measured:
        yield ReportWarning(
            kind="not-measured",
            text=f"{counted(len(missing), 'predicted point')} not measured ({listed(missing)})",
            remedy="raise the budget",
        )
    if not comparison.same_environment:
        yield ReportWarning(
            kind="other-environment",
            text="the prediction was made in another environment than the measurement",
            remedy="compare the two environments in the records, or run the sweep again on one machine",
        )
    oversubscribed = sorted(
        {p.devices for p in comparison.points if p.devices > comparison.cores and not p.emulated_compute}
    )
    if oversubscribed:
        yield ReportWarning(
            kind="shared-cores",
            text=f"{' and '.join(map(str, oversubscribed))} devices are more than this machine has cores "
            f"({comparison.cores}): several ranks shared a core in turn, and the times include that",
            remedy="read them as the times of this machine; to know those of more devices, run on as many cores",
        )
    if comparison.experiment.measures_drift and not comparison.drift_measured:
        yield ReportWarning(
            kind="no-drift",
            text="the drift has not been measured yet",
            remedy="run the sweep's command again: it measures what is missing",
        )
    if comparison.identical is False:
        yield ReportWarning(
            kind="not-identical",
            text="training with leaves is not the same on every number of devices, although that is promised",
            remedy="this is a defect of dpsim: run dpsim reproduce with the same flags, and please report it",
        )
    for text in comparison.harness_warnings:
        yield ReportWarning(kind="run", text=text, remedy="correct the cause, and run the sweep again")
