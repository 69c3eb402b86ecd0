"""The three parts of a report on training quality: sentences, and a table each. A sweep's report may show them too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from dpsim.records.quality_results import (
    DivergenceResult,
    GapPoint,
    GapResult,
    MeanInterval,
    StepsPoint,
    StepsResult,
    WayOut,
    median,
)
from dpsim.report.table import Column, Table, table
from dpsim.report.words import digits, percent

FORM = "saturating form c x / (1 + k x), x = 1/b - 1/B"
EMULATED = "devices are emulated as leaves of one rank"


def gap_sentences(result: GapResult) -> Iterator[str]:
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
        f"{_ratio(smallest.test_gap)}; accuracy {_share(smallest.accuracy)} against "
        f"{_share(result.accuracy)} ({seeds})."
    )
    yield f"Gap, {study.name}: {_errors(result.errors, 'held-out local batches', FORM)}" + (
        f" No prediction: {result.predicted.reason}." if result.predicted.reason else ""
    )
    for other in result.others:
        yield (
            f"Without statistics of a batch, {other.model}: training loss {_ratio(other.gap)}, test loss "
            f"{_ratio(other.test_gap)}, accuracy {_share(other.accuracy)}, at any local batch: "
            f"{_better(result, other)}."
        )


def gaps_together(results: Sequence[GapResult]) -> Iterator[str]:
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


def divergence_sentences(results: Sequence[DivergenceResult]) -> Iterator[str]:
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


def steps_sentences(result: StepsResult) -> Iterator[str]:
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


def gap_table(result: GapResult) -> Table:
    """Return the gaps by local batch with their intervals, and the way out below."""
    columns: tuple[Column[GapPoint], ...] = (
        Column(head="local batch", cell=lambda point: str(point.local_batch)),
        Column(head="", cell=lambda point: "held out" if point.held_out else "fitted", left=True),
        Column(head="training loss", cell=lambda point: digits(point.training_loss.mean, 3)),
        Column(head="gap", cell=lambda point: _interval(point.gap)),
        Column(head="predicted", cell=lambda point: digits(point.predicted, 3)),
        Column(head="gap, evaluated", cell=lambda point: _interval(point.training_set_gap)),
        Column(head="gap in test loss", cell=lambda point: _interval(point.test_gap)),
        Column(head="accuracy", cell=lambda point: _share(point.accuracy)),
    )
    return table(
        title="Gap of batch norm",
        columns=columns,
        sections={result.study.name: list(result.points)},
        note="A gap is the log of the loss over that with the global batch's statistics, paired by seed, with its 95 % "
        f"interval. The training loss is that of the last epoch, with batch statistics; evaluated: the training "
        f"set, with running statistics. {EMULATED.capitalize()}.",
    )


def others_table(result: GapResult) -> Table:
    """Return the models without batch norm."""
    columns: tuple[Column[WayOut], ...] = (
        Column(head="model", cell=lambda other: other.model, left=True),
        Column(head="gap", cell=lambda other: _interval(other.gap)),
        Column(head="gap in test loss", cell=lambda other: _interval(other.test_gap)),
        Column(head="accuracy", cell=lambda other: _share(other.accuracy)),
    )
    return table(
        title="Instead of batch norm",
        columns=columns,
        sections={result.study.name: list(result.others)},
        note="The same at any local batch. Gaps are against batch norm with the global batch's statistics.",
    )


def divergence_table(result: DivergenceResult) -> Table:
    """Return the divergence at every norm, statistic and local batch."""
    rows = [(point, value) for point, value in zip(result.points, result.measured, strict=True)]
    sections = {
        f"local batch {b}": [row for row in rows if row[0].local_batch == b] for b in result.study.local_batches
    }
    return table(
        title=f"Divergence of statistics: {result.study.name}",
        columns=(
            Column(head="batch norm", cell=lambda row: row[0].layer, left=True),
            Column(head="statistic", cell=lambda row: row[0].statistic, left=True),
            Column(head="measured", cell=lambda row: digits(row[1], 3)),
            Column(head="predicted", cell=lambda row: digits(row[0].predicted, 3)),
            Column(head="unscaled", cell=lambda row: digits(row[0].unscaled, 3)),
            Column(head="independent rows", cell=lambda row: digits(row[0].independent_rows, 3)),
        ),
        sections=sections,
        note="RMS over channels and local batches; means in standard deviations, variances in variances. "
        f"{EMULATED.capitalize()}.",
    )


def steps_table(result: StepsResult) -> Table:
    """Return the steps by global batch."""
    columns: tuple[Column[StepsPoint], ...] = (
        Column(head="global batch", cell=lambda point: str(point.global_batch)),
        Column(head="", cell=lambda point: "held out" if point.held_out else "fitted", left=True),
        Column(head="steps, median", cell=lambda point: digits(point.median, 4)),
        Column(head="least", cell=lambda point: digits(min(point.steps, default=math.nan), 4)),
        Column(head="most", cell=lambda point: digits(max(point.steps, default=math.nan), 4)),
        Column(head="predicted", cell=lambda point: digits(point.predicted, 4)),
        Column(head="runs", cell=lambda point: f"{len(point.steps)} of {point.seeds}"),
    )
    study = result.study
    return table(
        title="Steps to target",
        columns=columns,
        sections={result.study.name: list(result.points)},
        note=f"Learning rate {study.learning_rate:g} at batch {study.reference_batch}, growing with the batch; "
        f"momentum {study.momentum:g}; loss on the whole training set.",
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


def _better(result: GapResult, other: WayOut) -> str:
    """Return at which of the measured local batches the training loss is below batch norm's."""
    batches = [str(point.local_batch) for point in result.points if point.gap.mean > other.gap.mean]
    if other.gap.mean < 0:
        return "a lower training loss than batch norm's even with the global batch"
    if not batches:
        return "at no measured local batch a lower training loss than batch norm's"
    return f"a lower training loss than batch norm's at local batch {', '.join(batches)}"


def _interval(value: MeanInterval) -> str:
    text = f"{value.mean:.3f} ({value.low:.3f} to {value.high:.3f})"
    return text if value.visible else f"{text}, no gap visible"


def _ratio(value: MeanInterval) -> str:
    if not value.visible:
        return "no gap visible"
    return f"{math.exp(value.mean):.2f} times ({math.exp(value.low):.2f} to {math.exp(value.high):.2f})"


def _share(value: MeanInterval) -> str:
    return f"{value.mean:.1%} ({value.low:.1%} to {value.high:.1%})"
