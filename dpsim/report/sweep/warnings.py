"""What a reader of a comparison should know before trusting it, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from dpsim.codec import Noun
from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.words import counted, devices_name, percent
from dpsim.units import format_size

FEW_SAMPLES = 10
WIDE_INTERVAL = 0.05
LEAST_DRIFT = 0.02
LEAST_SPEED_CHANGE = 0.03
TWO_SPEEDS = 1.12
LEAST_SLOW_SHARE = 0.05
WIDE_SLOWDOWN = 0.03
SLOW_SHARE = 0.05


class ReportWarning(Noun, frozen=True):
    """What is doubtful, and what to do about it. ``kind`` is a fixed word for programs."""

    kind: str
    text: str
    remedy: str


def warnings(comparison: Comparison) -> tuple[ReportWarning, ...]:
    """Everything doubtful about a comparison. Pure."""
    return (
        *_of_time(comparison),
        *_of_speed(comparison),
        *_of_points(comparison),
        *(w for group in comparison.groups for w in _of_group(group)),
        *_of_run(comparison),
    )


def instant(text: str) -> datetime | None:
    """The time that a record names, None for a text that is no time."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _of_time(comparison: Comparison) -> Iterator[ReportWarning]:
    predicted, measured = instant(comparison.predicted_at), instant(comparison.measured_from)
    if predicted is None or measured is None:
        yield ReportWarning(
            kind="no-time",
            text=f"it cannot be told whether the prediction ({comparison.predicted_at!r}) came before "
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


def _of_speed(comparison: Comparison) -> Iterator[ReportWarning]:
    for speed in comparison.speeds:
        at_work = f"with {devices_name(speed.devices)} at work"
        calibrated = _slow(speed.calibrated_slow_factor, speed.calibrated_slow_share)
        measured = _slow(speed.measured_slow_factor, speed.measured_slow_share)
        if calibrated or measured:
            yield ReportWarning(
                kind="speed-changed",
                text=f"{at_work} this machine changed its speed by itself: in the calibration it was "
                f"{calibrated or 'steady'}, in the measurement {measured or 'steady'}",
                remedy="read the errors at equal speed beside the errors; stop other processes, or take a machine "
                "whose cores nobody shares",
            )
        if abs(speed.mean_change) > LEAST_SPEED_CHANGE:
            slower = "slower" if speed.mean_change > 0 else "faster"
            yield ReportWarning(
                kind="other-speed",
                text=f"{at_work} this machine was {abs(speed.mean_change):.1%} {slower} in the measurement than in the "
                "calibration, by the mean time of the reference computation",
                remedy="read the errors at equal speed beside the errors, or run the sweep again",
            )
    if comparison.compute_slowdown_half_width > WIDE_SLOWDOWN:
        yield ReportWarning(
            kind="wide-slowdown",
            text="how much slower several devices compute at once is known to "
            f"{comparison.compute_slowdown_half_width:.1%} only: the time for preparing was used up",
            remedy="raise the budget, or quieten the machine",
        )


def _slow(factor: float, share: float) -> str:
    """``1.45 times slower for 40% of the time``; nothing where that is no more than noise."""
    return f"{factor:.2f} times slower for {share:.0%} of the time" * (
        factor >= TWO_SPEEDS and share >= LEAST_SLOW_SHARE
    )


def _where(points: Iterable[ComparedPoint]) -> str:
    names = [f"{p.network}, {devices_name(p.devices)}, {format_size(p.fusion_threshold_bytes)}" for p in points]
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _of_points(comparison: Comparison) -> Iterator[ReportWarning]:
    few = [p for p in comparison.points if p.samples < FEW_SAMPLES]
    if few:
        yield ReportWarning(
            kind="few-samples",
            text=f"{counted(len(few), 'point')} with fewer than {FEW_SAMPLES} samples ({_where(few)})",
            remedy="raise the budget, or sweep fewer settings",
        )
    wide = [p for p in comparison.points if p.measured_high_s - p.measured_low_s > WIDE_INTERVAL * p.measured_step_s]
    if wide:
        yield ReportWarning(
            kind="wide-interval",
            text=f"the 95 % interval of {counted(len(wide), 'point')} is wider than {WIDE_INTERVAL:.0%} of the step "
            f"({_where(wide)})",
            remedy="raise the budget, or quieten the machine",
        )
    guessed = [p for p in comparison.points if p.extrapolated]
    if guessed:
        yield ReportWarning(
            kind="extrapolated",
            text=f"{counted(len(guessed), 'prediction')} outside what was calibrated or profiled ({_where(guessed)})",
            remedy="calibrate or profile over a wider range",
        )
    other = [p for p in comparison.points if p.buckets != p.predicted_buckets]
    if other:
        yield ReportWarning(
            kind="other-buckets",
            text=f"{counted(len(other), 'point')} ran with another number of buckets than predicted ({_where(other)})",
            remedy="expected under the rule horovod, which decides while running; a defect under any other",
        )
    slow = [p for p in comparison.points if p.slow_samples > SLOW_SHARE]
    if slow:
        yield ReportWarning(
            kind="busy",
            text=f"more than {SLOW_SHARE:.0%} of the samples of {counted(len(slow), 'point')} took over 1.5 times "
            f"their median: other processes may have been busy ({_where(slow)})",
            remedy="stop other processes and run the sweep again",
        )


def _of_group(group: Group) -> Iterator[ReportWarning]:
    where = f"{group.network}, {devices_name(group.devices)}" if group.devices else group.network
    what = "threshold" if group.devices else "number of devices"
    if group.below_noise:
        yield ReportWarning(
            kind="below-noise",
            text=f"on {where} the {what} changes the speed by {percent(group.effect)}, less than the uncertainty of "
            f"these medians ({percent(group.noise_floor)}, the larger of the A/A noise and the intervals' half "
            "widths): no best setting can be told",
            remedy=f"raise the budget; or take it that the {what} does not matter here",
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
            text=f"on {where} steps took {group.drift:+.1%} in the last third of the run against the first",
            remedy="warm up for longer, or let the machine settle; interleaving keeps the comparison fair",
        )
    if not group.regret_on_halves:
        yield ReportWarning(
            kind="one-half",
            text=f"on {where} there are too few rounds to choose the best setting on one half and time it on the other",
            remedy="raise the budget",
        )


def _of_run(comparison: Comparison) -> Iterator[ReportWarning]:
    if comparison.not_measured:
        count = len(comparison.not_measured)
        yield ReportWarning(
            kind="not-measured",
            text=f"{counted(count, 'predicted point')} not measured ({'; '.join(comparison.not_measured[:3])}"
            + ("; ...)" if count > 3 else ")"),
            remedy="raise the budget",
        )
    if not comparison.same_environment:
        yield ReportWarning(
            kind="other-environment",
            text="the prediction was made in another environment than the measurement",
            remedy="compare the two environments in the records, or run the sweep again on one machine",
        )
    oversubscribed = sorted({p.devices for p in comparison.points if p.devices > comparison.cores})
    if oversubscribed:
        yield ReportWarning(
            kind="shared-cores",
            text=f"{' and '.join(map(str, oversubscribed))} devices are more than this machine has cores "
            f"({comparison.cores}): their times are real, but of cores that several ranks share in turn",
            remedy="take them for what this machine does, not for more devices; run on as many cores to know that",
        )
    if comparison.scaling is not None and comparison.scaling.kind == "strong" and not comparison.drift_measured:
        yield ReportWarning(
            kind="no-drift",
            text="the drift was not measured yet",
            remedy="give the sweep's command again to go on",
        )
    if comparison.identical is False:
        yield ReportWarning(
            kind="not-identical",
            text="training with leaves, promised to be the same on any number of devices, is not",
            remedy="this is a defect of dpsim; see dpsim reproduce with the same flags, and please report it",
        )
    for text in comparison.harness_warnings:
        yield ReportWarning(kind="run", text=text, remedy="see the text; run the sweep again when it is mended")
