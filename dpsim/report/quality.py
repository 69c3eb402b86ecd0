"""The report of a study of training quality: sentences, tables and figures. A sweep's report may show them too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpsim.codec import to_builtins
from dpsim.records.columns import FRAMES
from dpsim.records.quality import (
    DivergencePoint,
    DivergenceResult,
    GapPoint,
    GapResult,
    MeanInterval,
    QualityResults,
    StepsPoint,
    StepsResult,
    median,
)
from dpsim.report.charts import Chart, Lines
from dpsim.report.content import Card, Content, Facts, ReportFigure, Tile, environment_facts
from dpsim.report.quality_charts import HEIGHT_IN, PANELS
from dpsim.report.quality_tables import EMULATED, divergence_table, gap_table, others_table, share_text, steps_table
from dpsim.report.saved import Samples
from dpsim.report.table import Table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, percent
from dpsim.report.write import PAGES, write_content

_OF_A_RUN = ("final_loss", "training_set_loss", "test_loss", "test_accuracy")
FORM = "saturating form c x / (1 + k x), x = 1/b - 1/B"
RULES = (
    "Devices are emulated as leaves of one rank: batch norm with B / b leaves takes the statistics that B / b devices "
    "with b samples each take. No number here is a time.",
    "Fitted runs came first; the predictions were then written and hashed, and only then were the others trained.",
    "The gap is in the log of the mean training loss of the last epoch, with batch statistics, paired by seed. "
    "Noisy statistics raise it in every step, so it tells local batches apart where other losses do not; a part of it "
    "is the noise of the forward passes themselves, which an evaluation with running statistics does not have: see the "
    "gap there, in test loss and in accuracy. Intervals are Student's 95 % intervals of the mean over seeds.",
    "The divergence is predicted from the spread of samples in one forward pass with the global batch's statistics, "
    "and scaled at each norm by a pass at one small local batch. It is measured on other batches.",
    "Steps to the target are interpolated in the log of the loss on the whole training set. The gradient noise scale "
    "is from the gradients of the eighths of a global batch and of the whole, each averaged over the training.",
)
_FEW_GAPS = 2
"""Studies of the gap whose every sentence stands at the top of the page; of more, the details stand at the tables."""
CAPTIONS = {
    "gap": (
        "Gap of batch norm",
        "The gap of batch norm against the local batch: log of the training loss over that with the global batch's "
        "statistics. Filled dots were fitted, open dots were held out; bars are 95 % intervals over seeds. Line: the "
        "fit. Devices are emulated as leaves of one rank.",
    ),
    "divergence": (
        "Divergence of statistics",
        "Divergence of a local batch's statistics from the global batch's, predicted against measured, one dot a norm "
        "and local batch. On the line they are equal. The legend names the dots of means and of variances, and those "
        "of a simple guess, independent rows. Devices are emulated as leaves of one rank.",
    ),
    "steps_to_target": (
        "Steps to target",
        "Steps to the target loss against the global batch. Filled dots were fitted, open dots were held out; bars "
        "span all seeds. Line: S_min (1 + B_noise / B); dashed: the power law. Both axes are logarithmic.",
    ),
}
"""Title and caption of the figure of each part of a study."""


def answers(results: QualityResults) -> Iterator[str]:
    """Yield every figure of the study with its baseline, as sentences; of many gaps the main one of each."""
    for gap in results.gap:
        sentences = list(_gap_sentences(gap))
        yield from sentences if len(results.gap) <= _FEW_GAPS else sentences[:1]
    yield from _gaps_together(results.gap)
    yield from _divergence_sentences(results.divergence)
    for steps in results.steps_to_target:
        yield from _steps_sentences(steps)


def tables(results: QualityResults) -> tuple[Table, ...]:
    """Return a table for each part of the study, with the sentences that ``answers`` leaves out."""
    of_gaps: list[Table] = []
    for gap in results.gap:
        _, *details = _gap_sentences(gap)
        own = [gap_table(gap), *([others_table(gap)] if gap.others else [])]
        if len(results.gap) > _FEW_GAPS:
            own = [
                replace(each, note=" ".join((*of_table, each.note)))
                for each, of_table in zip(own, (details[:1], details[1:]), strict=False)
            ]
        of_gaps += own
    return (*of_gaps, *map(divergence_table, results.divergence), *map(steps_table, results.steps_to_target))


def _cards(results: QualityResults) -> tuple[Card, ...]:
    errors: dict[str, list[Sequence[float]]] = {
        "gap of batch norm at held-out local batches": [gap.errors.get("predicted", ()) for gap in results.gap],
        "divergence of statistics": [each.errors("predicted") for each in results.divergence],
        "steps to the target at held-out batches": [
            each.errors.get("predicted", ()) for each in results.steps_to_target
        ],
    }
    tiles = []
    for label, studies in errors.items():
        finite = [value for values in studies for value in values if math.isfinite(value)]
        if finite:
            tiles.append(Tile(value=percent(statistics.median(finite)), label=f"{label} ({len(finite)} values)"))
    return (Card(title="Median errors of what was predicted", tiles=tuple(tiles)),) if tiles else ()


def content(results: QualityResults) -> Content:
    """Return what the report says."""
    return Content(
        name=results.record.predictions.study.name,
        heading="What local batch, batch norm and global batch do to the quality of training",
        question="How much worse does training become with small local batches and large global ones, and can it be "
        "predicted?",
        answers=tuple(answers(results)),
        cards=_cards(results),
        tables=tables(results),
        warnings=(),
        rules=RULES,
        facts=_facts(results),
        environment=environment_facts(results.record.environment),
    )


def _facts(results: QualityResults) -> Facts:
    record = results.record
    return (
        ("study", record.predictions.study.name),
        ("trainings", counted(len(record.runs), "run")),
        ("emulation", record.emulation),
        ("predicted at", record.predictions.predicted_at),
        ("predictions' SHA-256", record.predictions_sha256),
        ("measured until", record.measured_until),
    )


def title(results: QualityResults) -> str:
    """Return what was studied, in how many trainings, and until when."""
    record = results.record
    return (
        f"training quality, study {record.predictions.study.name}: {counted(len(points(results)), 'point')}, "
        f"{counted(len(record.runs), 'training')}, measured until {record.measured_until}"
    )


def points(results: QualityResults) -> list[dict[str, Any]]:
    """Return a row for each value that was fitted or predicted, beside what was measured."""
    rows = [_row("gap", gap.study, point, point.gap.mean) for gap in results.gap for point in gap.points]
    rows += [
        _row("divergence", each.study, point, measured)
        for each in results.divergence
        for point, measured in zip(each.points, each.measured, strict=True)
    ]
    return rows + [
        _row("steps_to_target", steps.study, point, point.median)
        for steps in results.steps_to_target
        for point in steps.points
    ]


def _row(
    measure: str, study: object, point: GapPoint | DivergencePoint | StepsPoint, value: float | None
) -> dict[str, Any]:
    """Return a row: what the point says of each column, or else its study."""
    names = [column.name for column in FRAMES["quality"]["points"]]
    row = {name: getattr(point, name, getattr(study, name, None)) for name in names}
    error = point.predicted / value - 1 if point.predicted is not None and value else None
    held_out = getattr(point, "held_out", True)
    return row | {"measure": measure, "held_out": held_out, "measured": value, "error": error}


def samples(results: QualityResults) -> Samples:
    """Return each training: its setting, and its losses and accuracy at the end."""
    rows = [
        to_builtins(run.case)
        | {name: getattr(run, name) for name in _OF_A_RUN}
        | {"target_loss": run.case.target_loss or None}
        for run in results.record.runs
    ]
    return rows, [1] * len(rows), {}


def panel(results: QualityResults) -> Lines:
    """Return the first figure of what the study has: the gap of batch norm, the divergence, or the steps."""
    part = next(part for part in PANELS if getattr(results, part))
    return PANELS[part](getattr(results, part)[0])


def summary(results: QualityResults) -> dict[str, str]:
    """Return the summary of ``--json``."""
    return {"title": title(results)}


def write(folder: Path, results: QualityResults, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write the report; returns the paths. Raises ``ConfigError``."""
    return write_content(folder, content(results), list(quality_figures(results)), pages)


def show(results: QualityResults, page: Path | None, _: bool) -> Iterator[Any]:
    """Yield the tables, warnings and answers, and where the report is."""
    shown = content(results)
    yield TerminalReport(tables=shown.tables, warnings=shown.warnings, answers=shown.answers)
    if page is not None:
        yield f"report: {page}"


def quality_figures(results: QualityResults) -> Iterator[ReportFigure]:
    """Yield the figures of the parts that the study has."""
    for name, (title, caption) in CAPTIONS.items():
        if shown := getattr(results, name):
            chart = Chart(panels=[PANELS[name](result) for result in shown], height_in=HEIGHT_IN)
            yield ReportFigure(name=name, title=title, caption=caption, chart=chart)


def _gap_sentences(result: GapResult) -> Iterator[str]:
    """Yield what the gap is, how well it was predicted, and what else helps."""
    study, smallest = result.study, result.points[0]
    seeds = f"{study.seeds} seeds; {EMULATED}"
    if not any(point.gap.visible for point in result.points):
        yield f"Batch norm, {study.name}: no gap visible in the training loss at any local batch ({seeds})."
        return
    yield (
        f"Batch norm, {study.name}: with local batch {smallest.local_batch} the training loss is "
        f"{math.exp(smallest.gap.mean):.2f} times that with the global batch's statistics "
        f"(95 % interval {math.exp(smallest.gap.low):.2f} to {math.exp(smallest.gap.high):.2f}); the training "
        f"set, evaluated with running statistics: {_ratio(smallest.training_set_gap)}; test loss: "
        f"{_ratio(smallest.test_gap)}; accuracy {share_text(smallest.accuracy)} against "
        f"{share_text(result.accuracy)} ({seeds})."
    )
    yield f"Gap, {study.name}: {_errors(result.errors, 'held-out local batches', FORM)}" + (
        f" No prediction: {result.predicted.reason}." if result.predicted.reason else ""
    )
    for other in result.others:
        yield (
            f"Without statistics of a batch, {other.model}: training loss {_ratio(other.gap)}, test loss "
            f"{_ratio(other.test_gap)}, accuracy {share_text(other.accuracy)}, at any local batch: "
            f"{_better(result, other)}."
        )


def _gaps_together(results: Sequence[GapResult]) -> Iterator[str]:
    """Yield the errors over the held-out local batches of all studies, and where a baseline did better."""
    judged = [result for result in results if result.errors]
    if len(judged) < 2:
        return
    together = {name: tuple(v for result in judged for v in result.errors[name]) for name in judged[0].errors}
    yield f"Gap, all {len(judged)} settings: {_errors(together, 'held-out local batches', FORM)}"
    straight = "linear interpolation in log b"
    worse = [r.study.name for r in judged if (median(r.errors[straight]) or 0) < (median(r.errors["predicted"]) or 0)]
    if worse:
        yield f"Linear interpolation in log b was better than the model at {'; '.join(worse)}."


def _divergence_sentences(results: Sequence[DivergenceResult]) -> Iterator[str]:
    """Yield the median errors over all norms, both statistics and all local batches, with the baselines."""
    for result in results:
        norms = len({point.layer for point in result.points})
        errors = {name: median(result.errors(name)) for name in ("predicted", "unscaled", "independent_rows")}
        if errors["predicted"] is None:
            continue
        of_means, of_variances = (median(result.errors(statistic=name)) for name in ("mean", "variance"))
        yield (
            f"Divergence of statistics, {result.study.name}, {norms} batch norm{'s' * (norms > 1)}: median error "
            f"{percent(errors['predicted'])} (means {percent(of_means or 0)}, variances {percent(of_variances or 0)}); "
            f"without the scale from local batch {result.study.scaled_at}: {percent(errors['unscaled'] or 0)}; "
            f"baseline of independent rows: {percent(errors['independent_rows'] or 0)} ({EMULATED})."
        )


def _steps_sentences(result: StepsResult) -> Iterator[str]:
    """Yield S_min and B_noise, how well they predict other batches, and the gradient noise scale beside."""
    name, parameters = result.study.name, result.predicted.parameters
    if not parameters:
        yield f"Steps to target, {name}: no fit. {result.predicted.reason}."
        return
    low, high = result.noise_interval or (math.nan, math.nan)
    yield (
        f"Steps to target, {name}: S = {parameters['min_steps']:.3g} (1 + {parameters['noise_batch']:.3g} / B), "
        f"B_noise from {low:.3g} to {high:.3g} over resampled seeds (95 %)."
    )
    for outside, where in ((False, "batches inside the fitted range"), (True, "batches outside it")):
        chosen = {p.global_batch for p in result.points if p.held_out and p.outside == outside and p.median}
        places = [place for place, batch in enumerate(result.predicted.batches) if batch in chosen]
        errors = {key: tuple(values[place] for place in places) for key, values in result.errors.items()}
        if places:
            yield f"Steps to target, {name}: {_errors(errors, where, 'S_min (1 + B_noise / B)')}"
    for point in result.points:
        if point.median is None:
            yield (
                f"Steps to target, {name}: at global batch {point.global_batch} {point.seeds - len(point.steps)} of "
                f"{point.seeds} runs never reached the target."
            )
    if result.gradient_noise_batch is not None:
        ratio = parameters["noise_batch"] / result.gradient_noise_batch
        yield (
            f"Gradient noise scale on the way to the target, {name}: tr(Sigma)/|G|^2 = "
            f"{result.gradient_noise_batch:.3g}; B_noise from the steps is {ratio:.2g} times that."
        )


def _errors(errors: dict[str, tuple[float, ...]], where: str, name: str) -> str:
    finite = {key: [v for v in values if math.isfinite(v)] for key, values in errors.items()}
    if not finite.get("predicted"):
        return f"nothing to judge at {where}."
    worst = max(finite["predicted"])
    nulls = ", ".join(
        f"{key} {percent(statistics.median(values))}" for key, values in finite.items() if key != "predicted" and values
    )
    typical = percent(statistics.median(finite["predicted"]))
    return f"{name}: median error at {where} {typical} (worst {percent(worst)}); baselines: {nulls}."


def _better(result: GapResult, other: GapPoint) -> str:
    """Return at which of the measured local batches the training loss is below batch norm's."""
    batches = [str(point.local_batch) for point in result.points if point.gap.mean > other.gap.mean]
    if other.gap.mean < 0:
        return "a lower training loss than batch norm's even with the global batch"
    if not batches:
        return "at no measured local batch a lower training loss than batch norm's"
    return f"a lower training loss than batch norm's at local batch {', '.join(batches)}"


def _ratio(value: MeanInterval) -> str:
    if not value.visible:
        return "no gap visible"
    return f"{math.exp(value.mean):.2f} times ({math.exp(value.low):.2f} to {math.exp(value.high):.2f})"
