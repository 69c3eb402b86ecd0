"""The report of a reproduction: its answers, warnings and facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsim.dtypes import in_dtype
from dpsim.records.reproduce import Difference, MeasuredDrift, PredictedDrift, ReproduceRecord, Run
from dpsim.report.content import Content, Facts, ReportWarning, environment_facts
from dpsim.report.reproduce.tables import (
    counts_table,
    differences_table,
    digests_table,
    drift_table,
    drifts,
    mode_name,
    modes,
    place,
    span,
)
from dpsim.report.words import listed

RULES = (
    "Every combination is trained from the start, by as many processes as it has devices. After every step the "
    "SHA-256 of every tensor is kept (parameters, optimizer state and running statistics), and the loss.",
    "Every run is compared with the run on one device in the same batch-norm mode. The digest is the one that dpsim "
    "train prints: of parameters, optimizer state and running statistics after the last step, tensor by tensor in name "
    "order.",
    "Where two runs differ, both are trained again up to the first step that differs. In that step the output of every "
    "layer for every sample is compared, which shows the cause. If all outputs are the same and the sums of gradients "
    "differ, the cause is the summation order; if a layer computes other bits from the same input, it is the shape in "
    "which it computed, or batch norm's statistics.",
    "Where the same bits are not promised, the drift was predicted from the run on one device, and the predictions "
    "were hashed before any other run began.",
    "A digest belongs to one machine type: processor, BLAS architecture, library versions, OPENBLAS_* and OMP_* "
    "variables.",
)


def content(record: ReproduceRecord) -> Content:
    """Return what the report of a reproduction says."""
    reproduction = record.reproduction
    name = f"{reproduction.model} on {reproduction.dataset}, {reproduction.steps} steps"
    if reproduction.wire_dtype is not None:
        name += f", gradients sent as {reproduction.wire_dtype}"
    name += in_dtype(reproduction.compute_dtype)
    tables = [counts_table(record), digests_table(record)]
    if record.divergences:
        tables.append(differences_table(record))
    if record.drift:
        tables.append(drift_table(record))
    return Content(
        name=name,
        heading=f"The same bits? {name}",
        cards=(),
        rules=RULES,
        answers=tuple(answers(record)),
        question="Does training end with the same bits, whatever the number of devices, the buckets, the algorithm and "
        "the overlap?",
        tables=tuple(tables),
        warnings=tuple(warnings(record)),
        facts=_facts(record),
        environment=environment_facts(record.environment),
    )


def answers(record: ReproduceRecord) -> Iterator[str]:
    """Yield a sentence for each mode, then on the drift, then on the saved run."""
    for runs in modes(record).values():
        yield _answer(record, runs)
    for predicted, measured in drifts(record):
        yield from _drift_sentences(predicted, measured)
    if (saved := record.saved_comparison) is not None:
        for configuration, difference in zip(saved.compared, saved.differences, strict=True):
            verdict = "identical" if difference is None else in_words(difference)
            yield f"Compared with {saved.path}, {mode_name(configuration)}: {verdict}."


def _answer(record: ReproduceRecord, runs: Sequence[Run]) -> str:
    mode = mode_name(runs[0].configuration).capitalize()
    differing = [run for run in runs if not record.identical(run)]
    if not differing:
        digest = record.trajectories[record.reference(runs[0].configuration)].digest
        counts = ", ".join(dict.fromkeys(str(run.configuration.devices) for run in runs))
        count = f"{len(runs)} runs on {counts} devices" if len(runs) > 1 else "1 run on 1 device"
        return f"{mode}: identical, {count}, digest {digest}."
    first = differing[0]
    difference = record.difference(first)
    where = in_words(difference) if difference is not None else "its ranks ended with different bits"
    verdict = "NOT IDENTICAL as promised" if first.configuration.promised else "not identical, and not promised"
    return (
        f"{mode}: {verdict}; {len(differing)} of {len(runs)} runs differ from the run on 1 device. The first "
        f"({first.configuration.name}): {where}."
    )


def in_words(difference: Difference) -> str:
    """Return the step, tensor, element, size and cause of a difference as one line."""
    text = f"step {difference.step}, {place(difference)}"
    if difference.values_known:
        text += (
            f", {difference.value!r} instead of {difference.reference_value!r}: {difference.ulps:,} "
            f"ULP{'s' * (difference.ulps != 1)}, {difference.relative:.2g} relative"
        )
    return text + (f"; cause: {difference.cause} ({difference.evidence})" if difference.cause else "")


def _drift_sentences(predicted: PredictedDrift, measured: Sequence[MeasuredDrift]) -> Iterator[str]:
    mode = f"Batch norm {predicted.batch_norm}, {predicted.devices} devices"
    prediction = predicted.reason if predicted.parameters is None else f"predicted {predicted.parameters:.3g}"
    if prediction and measured:
        drift = span([each.parameters for each in measured])
        yield f"{mode}: parameters drifted by {drift} of their size; {prediction}."
    statistics = [each.statistics for each in measured if each.statistics is not None]
    if predicted.statistics is not None and statistics:
        yield (
            f"{mode}: the first batch norm's means were off by {span(statistics)} standard deviations of a sample; "
            f"predicted {predicted.statistics:.3g}."
        )


def warnings(record: ReproduceRecord) -> Iterator[ReportWarning]:
    """Yield a warning for broken promises, and for a comparison across machine types."""
    broken = [run.configuration.name for run in record.runs if run.configuration.promised and not record.identical(run)]
    if broken:
        yield ReportWarning(
            kind="not-identical",
            text=f"runs that are promised to be identical are not: {listed(broken)}",
            remedy="this is a defect of dpsim; please report it with this folder",
        )
    if record.saved_comparison is not None and record.saved_comparison.across_machines:
        yield ReportWarning(
            kind="across-machines",
            text=f"the saved run is of another machine type: {listed(record.saved_comparison.across_machines)}",
            remedy="differences may come from that; compare on one machine type",
        )


def _facts(record: ReproduceRecord) -> Facts:
    run, predictions, saved = record.reproduction, record.predictions, record.saved_comparison
    facts = (
        ("model and data", f"{run.model} on {run.dataset}, global batch {run.global_batch}, seed {run.seed}"),
        ("optimizer", str(run.optimizer)),
        ("gradients sent as", run.wire_dtype or ""),
        ("products in", run.compute_dtype if run.compute_dtype != "float32" else ""),
        ("steps", str(run.steps)),
        ("runs", f"{len(record.runs)}, with {len(record.trajectories)} different results"),
        ("measured", f"{record.measured_from} to {record.measured_until}"),
        ("predicted at", predictions.predicted_at if predictions is not None else ""),
        ("predictions' SHA-256", record.predictions_sha256),
        ("compared with", saved.path if saved is not None else ""),
    )
    return tuple((name, value) for name, value in facts if value)
