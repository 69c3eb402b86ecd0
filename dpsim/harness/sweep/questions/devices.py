"""What the report of a sweep over the number of devices says: the speedup, and the drift from one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dpsim.errors import ConfigError
from dpsim.harness.sweep.grids import of_devices, one_threshold, places
from dpsim.harness.sweep.scores import DEVICES_NULLS
from dpsim.model.drift import unpredictable_drift
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.records.sweep import Experiment
from dpsim.report.charts import Chart, Lines, Look
from dpsim.report.content import Tile
from dpsim.report.sweep.cells import PointColumns, points_table
from dpsim.report.sweep.charts import curve
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.summary_table import model_chose, speedup, where
from dpsim.report.sweep.tables import (
    ALONE,
    LEGEND,
    by_network,
)
from dpsim.report.sweep.verdict import verdict
from dpsim.report.table import Column, Table
from dpsim.report.words import (
    SHORT,
    devices_name,
    milliseconds,
    network_name,
    percent,
)

RULES = (
    "After the timing, every device count trained the same steps from the same start, on this machine's own network: "
    "an emulated network changes times, not bits. The drift was predicted from the run on one device, and the "
    "predictions were written and hashed before any other of these runs began.",
)
_WEAK = "Drift is not measured under weak scaling: every device count trains other batches, and so another model."


def question(comparison: Comparison) -> str:
    """Return the question that the sweep answers."""
    run, first = comparison.experiment, comparison.points[0]
    batch = first.local_batch if run.weak else first.global_batch
    where = "at once on each device" if run.weak else "per step over all devices"
    return (
        f"How fast does training {first.model} on {run.dataset} become on more devices, with {batch:g} "
        f"samples {where}, does it stay the same training, and does the model know both without "
        "measuring them?"
    )


def _more_answers(comparison: Comparison) -> tuple[str, ...]:
    """Return the error on one device, and what the number of devices does to the training."""
    sentences = []
    median = comparison.single_device_median_abs_error
    if median is not None:
        sentences.append(f"{ALONE}: error {percent(median)}.")
    return *sentences, *_drift(comparison)


def _worth(comparison: Comparison, group: Group) -> str:
    """Return that one device is faster than any more, where that is sure."""
    best = verdict(comparison, group).best
    if best is None or best.devices > 1:
        return ""
    return (
        f"do not use {' or '.join(p.layout for p in comparison.members(group) if p.devices > 1)} devices, 1 is faster."
    )


def drift_sentence(comparison: Comparison) -> str | None:
    """Return what training on more devices changed; ``None`` where that was not measured."""
    if comparison.experiment.weak:
        return _WEAK
    points = [point for point in comparison.scored if point.digest]
    if not points:
        return None
    on_several = unique(point for point in points if point.devices > 1)
    after = f"after {comparison.experiment.steps} steps with batch norm {points[0].batch_norm}"
    if comparison.identical is not None:
        counts = ", ".join(point.layout for point in on_several)
        verdict = "the same to the bit as" if comparison.identical else "NOT THE SAME, as promised, as"
        return (
            f"The training is {verdict} on one device {after} and {points[0].leaves} leaves, on {counts} devices: "
            f"digest {points[0].digest[:SHORT]}."
        )
    parameters = _each((point.layout, point.measured_drift, point.predicted_drift) for point in on_several)
    text = f"Drift from one device {after}: parameters {parameters}"
    reason = unpredictable_drift(points[0].compute_dtype)
    if reason and all(point.predicted_statistics_drift is None for point in on_several):
        text += f", {reason}"
    if any(point.measured_statistics_drift is not None for point in on_several):
        means = _each((p.layout, p.measured_statistics_drift, p.predicted_statistics_drift) for p in on_several)
        text += f"; error of a device's means in the first batch norm, in standard deviations, {means}"
    return text + "."


def unique(points: Iterable[ComparedPoint]) -> list[ComparedPoint]:
    """Return the first point of each layout: networks with the same algorithm share a training."""
    first: dict[str, ComparedPoint] = {}
    for point in points:
        first.setdefault(point.layout, point)
    return list(first.values())


def _each(drifts: Iterable[tuple[str, float | None, float | None]]) -> str:
    """Return ``0.0011 on 2 devices (predicted 0.001), ...``."""
    return ", ".join(
        f"{measured:.2g} on {layout} devices" + (f" (predicted {predicted:.2g})" if predicted is not None else "")
        for layout, measured, predicted in drifts
        if measured is not None
    )


def _tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    """Return the speedup on the most devices."""
    most = max(comparison.members(group), key=lambda point: point.devices)
    if most.measured_speedup is None or most.predicted_speedup is None:
        return ()
    label = f"speedup on {devices_name(most.devices)}, predicted {most.predicted_speedup:.2f}x"
    return (Tile(value=f"{most.measured_speedup:.2f}x", label=label),)


def _drift_tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    most = max(comparison.members(group), key=lambda point: point.devices)
    if comparison.identical is not None:
        value = "same bits" if comparison.identical else "OTHER BITS"
        return (Tile(value=value, label=f"digest {most.digest[:SHORT]}"),)
    if most.measured_statistics_drift is not None and most.predicted_statistics_drift is not None:
        label = (
            f"error of a device's batch-norm mean on {devices_name(most.devices)}, in standard deviations; "
            f"predicted {most.predicted_statistics_drift:.2g}"
        )
        return (Tile(value=f"{most.measured_statistics_drift:.2g}", label=label),)
    if most.measured_drift is not None:
        label = f"drift of the parameters on {devices_name(most.devices)}"
        return (Tile(value=f"{most.measured_drift:.2g}", label=label),)
    return ()


def _points(comparison: Comparison) -> Table:
    """Return a row for each network and device count: step, speedup and drift, measured and predicted."""
    points = comparison.scored
    show = PointColumns(comparison=comparison)
    trained = any(point.digest for point in points)
    drift_predicted = any(point.predicted_drift is not None for point in points)
    means = any(point.measured_statistics_drift is not None for point in points)
    return points_table(
        comparison,
        columns=(
            show("layout", head="devices"),
            show("algorithm", 3, shown=len({point.algorithm for point in points}) > 1),
            show("measured_step_s"),
            show.interval(7),
            show("predicted_step_s"),
            show.predicted_interval(),
            show("error"),
            show("measured_speedup"),
            show("predicted_speedup"),
            Column(head="speedup error", cell=_speedup_error, dispensable=2),
            show("efficiency", 2),
            *show.exposed(4, 8),
            show("measured_drift", shown=trained),
            show("predicted_drift", shown=drift_predicted),
            show("measured_statistics_drift", 1, shown=means),
            show("predicted_statistics_drift", 1, shown=means),
            show("digest", 5, shown=trained),
            *show.last(9),
        ),
        sections={
            f"{network}, overlap {comparison.chosen_overlap.get(members[0].setting.where, 'off')}": members
            for network, members in by_network(points).items()
        },
        note=_note(comparison, trained=trained, means=means),
    )


def _speedup_error(point: ComparedPoint) -> str:
    if point.devices == 1 or point.measured_speedup is None or point.predicted_speedup is None:
        return ""
    return percent(point.predicted_speedup / point.measured_speedup - 1, sign=True)


def _note(comparison: Comparison, *, trained: bool, means: bool) -> str:
    batch = "local" if comparison.experiment.weak else "global"
    text = (
        f"{LEGEND}. Median step and the 95% bootstrap interval of the median. Error = predicted / measured - 1. "
        f"Speedup = samples/s over those of one device at the same {batch} batch. Efficiency = speedup / devices. "
        "Exposed: communication not hidden by computation."
    )
    if trained:
        text += (
            f" Drift = |w_n - w_1| / |w_1| of all parameters after {comparison.experiment.steps} steps; 0 means "
            f"the same bits. Digest: the first {SHORT} digits of the trained state's SHA-256."
        )
    if means:
        text += (
            " Batch-norm means: the difference between a device's mean and the whole batch's, in the first batch norm "
            "before training, as a root mean square over the first 16 batches, in standard deviations. Their effect on "
            "the parameters is not predicted."
        )
    return text


def _chart(comparison: Comparison) -> Chart:
    panels = [_curve(group, comparison.members(group)) for group in comparison.groups]
    return Chart(panels=panels, height_in=3.7)


def _curve(group: Group, points: Sequence[ComparedPoint]) -> Lines:
    """Return the speedup on each number of devices; that of a baseline on one device is 1."""
    parallel_point = next(point for point in points if point.devices > 1)

    def gained(point: ComparedPoint, step_s: float, source: Look) -> float:
        if point.devices == 1 and source == "predicted":
            return 1.0
        reached = point.measured_speedup if source == "measured" else point.predicted_speedup
        own_s = point.measured_step_s if source == "measured" else point.predicted_step_s
        return (reached or 1.0) * own_s / step_s

    def nulls_s(point: ComparedPoint) -> Mapping[str, float]:
        return point.null_step_s or parallel_point.null_step_s

    counts = [point.devices for point in points]
    edge = max(counts) - 1
    return Lines(
        title=network_name(group),
        subtitle=f"samples/s over one device's, {parallel_point.algorithm}",
        x_label="devices",
        series=curve(points, counts, gained, nulls_s),
        x_ticks={point.devices: point.layout for point in points},
        x_span=(1 - 0.04 * edge, max(counts) + 0.06 * edge),
    ).within(math.inf)


def _screen(comparison: Comparison, groups: Sequence[Group]) -> list[Column[Group]]:
    layouts = list(dict.fromkeys(point.layout for group in groups for point in comparison.members(group)))

    def column(layout: str) -> Column[Group]:
        def cell(group: Group) -> str:
            points = [point for point in comparison.members(group) if point.layout == layout]
            return milliseconds(points[0].measured_step_s) if points else ""

        return Column(head=f"{layout} device{'s' * (layout != '1')}", cell=cell, dispensable=2)

    return [
        Column(head="ms a step", cell=where, left=True),
        *map(column, layouts),
        Column(head="speedup", cell=lambda group: speedup(comparison, group)),
        model_chose(comparison, lambda point: point.layout),
    ]


def _label(comparison: Comparison, point: ComparedPoint) -> str:
    return f"{point.layout} device{'s' * (point.layout != '1')}"


def _drift(comparison: Comparison) -> tuple[str, ...]:
    sentence = drift_sentence(comparison)
    return () if sentence is None else (sentence,)


def _completed(experiment: Experiment) -> Experiment:
    thresholds = one_threshold(experiment)
    if experiment.weak and experiment.value("leaves"):
        raise ConfigError(
            f"weak scaling with {experiment.value('leaves')} leaves: each device count trains another global batch",
            allowed="leaves with strong scaling, where every device count trains the same batch",
            remedy="leave out --reproducible and leaves, or give --global-batch for strong scaling",
        )
    return of_devices(experiment, thresholds)


def _apart(experiment: Experiment) -> tuple[str, ...]:
    return places(experiment)


QUESTION = Question(
    name="devices",
    about="the number of devices",
    completed=_completed,
    apart=_apart,
    nulls=DEVICES_NULLS,
    question=question,
    more_answers=_more_answers,
    tiles=_tiles,
    more_tiles=_drift_tiles,
    points=_points,
    chart=_chart,
    figure_name="speedup",
    figure_title="Speedup",
    caption="Speedup against the number of devices: samples/s over those of one device. Dots: measured, with the 95% "
    "interval of the step; line: predicted, with its {band}; dashed: predictions of the baselines, of "
    "which perfect scaling is the ideal.",
    constant="the network, one device among them",
    effect="device count by samples/s",
    rules=RULES,
    noun=lambda group: "number of devices",
    label=_label,
    short=lambda point: devices_name(point.devices),
    worth=_worth,
    screen=_screen,
    more_verdicts=_drift,
)
