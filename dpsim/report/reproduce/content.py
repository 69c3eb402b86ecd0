"""The report of a reproduction: answers, the table of digests, the differences, and the drift."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from dpsim.records.reproduce import Configuration, Difference, MeasuredDrift, PredictedDrift, ReproduceRecord, Run
from dpsim.report.content import Content
from dpsim.report.sweep.facts import Facts, environment_facts
from dpsim.report.sweep.tables import Column, Section, Table
from dpsim.report.sweep.warnings import ReportWarning
from dpsim.units import format_size

RULES = (
    "Every combination is trained from the beginning, by as many processes as it has devices. After every step the "
    "SHA-256 of every tensor is kept: parameters, optimizer state and running statistics, and the loss.",
    "Runs of one batch-norm mode are held against the one on one device. The digest is that of dpsim train: "
    "parameters, optimizer state and running statistics after the last step, tensor by tensor in name order.",
    "Where two differ, both are trained again up to the first step that differs, and the digest of what every layer "
    "made of every sample in it tells the cause: forward the same and gradient sums different is the order of "
    "summation; a layer that makes other bits of the same input is its shape, or batch norm's statistics.",
    "The drift of what is not promised was predicted from the run on one device, and the predictions hashed, before "
    "any other run began.",
    "A digest belongs to one machine type: processor, BLAS architecture, library versions, OPENBLAS_* and OMP_* "
    "variables.",
)
ALL_RUNS = "Digests of all runs"
_SHOWN = 12


def content(record: ReproduceRecord) -> Content:
    """What the report says."""
    asked = record.reproduction
    name = f"{asked.model} on {asked.dataset}, {asked.steps} steps"
    if asked.wire_dtype is not None:
        name += f", gradients sent as {asked.wire_dtype}"
    tables = [counts_table(record), digests_table(record)]
    if record.found:
        tables.append(differences_table(record))
    if record.drift:
        tables.append(drift_table(record))
    return Content(
        name=name,
        heading=f"The same bits? {name}",
        cards=(),
        rules=RULES,
        answers=tuple(answers(record)),
        question="Does training come to the same bits, whatever the number of devices, the buckets, the algorithm and "
        "the overlap?",
        tables=tuple(tables),
        warnings=warnings(record),
        facts=_facts(record),
        environment=environment_facts(record.environment),
    )


def answers(record: ReproduceRecord) -> Iterator[str]:
    """A sentence a mode, one on drift, and one on the saved run."""
    for _, runs in _modes(record):
        yield _answer(record, runs)
    for predicted, measured in drifts(record):
        yield from _drift_sentence(predicted, measured)
    if (beside := record.against) is not None:
        for one, difference in zip(beside.compared, beside.differences, strict=True):
            yield f"Held against {beside.path}, {mode_name(one)}: {told(difference) if difference else 'identical'}."


def _answer(record: ReproduceRecord, runs: Sequence[Run]) -> str:
    one = runs[0].configuration
    digest = record.trajectories[record.reference(one)].digest
    differing = [run for run in runs if not record.identical(run)]
    counts = ", ".join(dict.fromkeys(str(run.configuration.devices) for run in runs))
    if not differing:
        ran = f"{len(runs)} runs on {counts} devices" if len(runs) > 1 else "1 run on 1 device"
        return f"{mode_name(one).capitalize()}: identical, {ran}, digest {digest}."
    first = differing[0]
    difference = record.difference(first)
    where = told(difference) if difference else "ranks ended with different bits"
    words = "NOT IDENTICAL as promised" if one.promised else "not identical, and not promised"
    return (
        f"{mode_name(one).capitalize()}: {words}; {len(differing)} of {len(runs)} runs differ from the one on 1 "
        f"device. The first ({first.configuration.name}): {where}."
    )


def told(difference: Difference) -> str:
    """Step, tensor, element, size and cause of a difference, in one line."""
    text = f"step {difference.step}, {_place(difference)}"
    if difference.kept:
        text += (
            f", {difference.value!r} for {difference.reference_value!r}: {difference.ulps:,} ULPs, "
            f"{difference.relative:.2g} relative"
        )
    return text + (f"; cause: {difference.cause} ({difference.evidence})" if difference.cause else "")


def _place(difference: Difference) -> str:
    element = f"[{', '.join(map(str, difference.element))}]" if difference.element else ""
    return difference.tensor + element


def _drift_sentence(predicted: PredictedDrift, measured: Sequence[MeasuredDrift]) -> Iterator[str]:
    for what, unit, value, found in (
        ("parameters drifted by", "of their size", predicted.parameters, [one.parameters for one in measured]),
        (
            "the first batch norm's means were off by",
            "deviations of a sample",
            predicted.statistics,
            [one.statistics for one in measured if one.statistics is not None],
        ),
    ):
        if value is not None and found:
            yield (
                f"Batch norm {predicted.batch_norm}, {predicted.devices} devices: {what} {spread(found)} {unit}; "
                f"predicted {value:.3g}."
            )


def spread(values: Sequence[float]) -> str:
    """One number, or the range of several."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def mode_name(one: Configuration) -> str:
    """``batch norm leaf, 8 leaves`` or ``batch norm local, plain sums``."""
    return f"batch norm {one.batch_norm}, " + (f"{one.leaves} leaves" if one.promised else "plain sums")


def _modes(record: ReproduceRecord) -> list[tuple[str, list[Run]]]:
    runs = sorted(record.runs, key=lambda run: record.reproduction.batch_norms.index(run.configuration.batch_norm))
    groups = itertools.groupby(runs, key=lambda run: mode_name(run.configuration))
    return [(name, list(group)) for name, group in groups]


def drifts(record: ReproduceRecord) -> list[tuple[PredictedDrift, list[MeasuredDrift]]]:
    """Each prediction with what was measured of it."""
    points = record.predictions.points if record.predictions else ()
    return [(point, [one for one in record.drift if _of(one.configuration, point)]) for point in points]


def _of(one: Configuration, point: PredictedDrift) -> bool:
    return (one.batch_norm, one.devices) == (point.batch_norm, point.devices)


def counts_table(record: ReproduceRecord) -> Table:
    """What all runs on each number of devices came to."""
    columns = (
        Column(head="devices"),
        Column(head="runs"),
        Column(head="as on 1 device"),
        Column(head="different results"),
        Column(head="digest", left=True),
        Column(head="losses", left=True),
    )
    sections = []
    for name, runs in _modes(record):
        by_count: dict[int, list[Run]] = {}
        for run in sorted(runs, key=lambda run: run.configuration.devices):
            by_count.setdefault(run.configuration.devices, []).append(run)
        rows = tuple(_count_row(record, count, some) for count, some in by_count.items())
        sections.append(Section(title=name, rows=rows))
    return Table(
        title="Digests by number of devices",
        columns=columns,
        sections=tuple(sections),
        note="Over all thresholds, algorithms and overlaps. The digest is shown where all runs came to one.",
    )


def _count_row(record: ReproduceRecord, devices: int, runs: Sequence[Run]) -> tuple[str, ...]:
    results = {run.trajectory for run in runs}
    same = sum(record.identical(run) for run in runs)
    digests = ("", "")
    if len(results) == 1:
        trajectory = record.trajectories[runs[0].trajectory]
        digests = trajectory.digest[:_SHOWN], trajectory.losses_digest[:_SHOWN]
    return (str(devices), str(len(runs)), f"{same} of {len(runs)}", str(len(results)), *digests)


def digests_table(record: ReproduceRecord) -> Table:
    """Every run with its digests."""
    columns = (
        Column(head="devices"),
        Column(head="threshold"),
        Column(head="algorithm", left=True),
        Column(head="overlap", left=True),
        Column(head="digest", left=True),
        Column(head="losses", left=True),
        Column(head="against 1 device", left=True),
    )
    sections = []
    for name, runs in _modes(record):
        rows = tuple(_run_row(record, run) for run in runs)
        strong = tuple(i for i, run in enumerate(runs) if run.configuration.promised and not record.identical(run))
        sections.append(Section(title=name, rows=rows, strong=strong))
    return Table(
        title=ALL_RUNS,
        columns=columns,
        sections=tuple(sections),
        note=f"The first {_SHOWN} digits of the SHA-256 of the trained state and of all losses.",
    )


def _run_row(record: ReproduceRecord, run: Run) -> tuple[str, ...]:
    one, trajectory = run.configuration, record.trajectories[run.trajectory]
    how = ("", "", "") if one.devices == 1 else (format_size(one.fusion_threshold_bytes), one.algorithm, one.overlap)
    difference = record.difference(run)
    if one.devices == 1:
        verdict = "" if run.ranks_agree else "ranks differ"
    elif record.identical(run):
        verdict = "identical"
    elif difference is None:
        verdict = "other digest" if run.ranks_agree else "ranks differ"
    else:
        verdict = f"step {difference.step}, {_place(difference)}: {difference.cause}"
    digests = trajectory.digest[:_SHOWN], trajectory.losses_digest[:_SHOWN]
    return (one.layout or str(one.devices), *how, *digests, verdict)


def differences_table(record: ReproduceRecord) -> Table:
    """Where every trajectory that differs leaves its reference."""
    columns = (
        Column(head="devices"),
        Column(head="threshold"),
        Column(head="algorithm", left=True),
        Column(head="step"),
        Column(head="first tensor", left=True),
        Column(head="ULPs"),
        Column(head="relative"),
        Column(head="most ULPs"),
        Column(head="elements"),
        Column(head="tensors"),
        Column(head="cause", left=True),
    )
    sections = []
    for name, runs in _modes(record):
        shown = {run.trajectory: run for run in reversed(runs) if record.difference(run) is not None}
        rows = [_difference_row(record, run) for run in reversed(shown.values())]
        if rows:
            sections.append(Section(title=name, rows=tuple(rows)))
    return Table(
        title="Where they differ first",
        columns=columns,
        sections=tuple(sections),
        note="The first element that differs in the first tensor that does, in the order in which a step makes them: "
        "running statistics, the loss, then layer by layer backwards. Most: in that tensor; elements and tensors: how "
        "many differ after that step. Runs that came to the same bits are shown once.",
    )


def _difference_row(record: ReproduceRecord, run: Run) -> tuple[str, ...]:
    one, found = run.configuration, record.difference(run)
    if found is None:
        return ()
    return (
        one.layout or str(one.devices),
        format_size(one.fusion_threshold_bytes),
        one.algorithm,
        str(found.step),
        _place(found),
        f"{found.ulps:,}",
        f"{found.relative:.2g}",
        f"{found.max_ulps:,}",
        f"{found.elements_differing} of {found.elements}",
        f"{found.tensors_differing} of {found.tensors}",
        str(found.cause),
    )


def drift_table(record: ReproduceRecord) -> Table:
    """Measured drift beside the predicted one."""
    columns = (
        Column(head="devices"),
        Column(head="parameters"),
        Column(head="predicted"),
        Column(head="batch-norm means"),
        Column(head="predicted"),
        Column(head="last loss"),
    )
    rows: dict[str, list[tuple[str, ...]]] = {}
    for point, measured in drifts(record):
        if not measured:
            continue
        statistics = [one.statistics for one in measured if one.statistics is not None]
        rows.setdefault(f"batch norm {point.batch_norm}", []).append(
            (
                str(point.devices),
                spread([one.parameters for one in measured]),
                _number(point.parameters),
                spread(statistics) if statistics else "",
                _number(point.statistics),
                spread([one.loss for one in measured]),
            )
        )
    return Table(
        title="Drift from one device",
        columns=columns,
        sections=tuple(Section(title=name, rows=tuple(some)) for name, some in rows.items()),
        note="Parameters: |w_n - w_1| / |w_1| after the last step, predicted from rounding as a random walk (which "
        "no longer holds once a rectifier or a maximum tips over). "
        "Batch-norm means: of the first batch norm, a device's against the whole batch's, before training; root mean "
        "square over the first 16 batches, in deviations of a sample; predicted as the root of 1/b - 1/B. Last loss: "
        "relative difference. Ranges are over thresholds, algorithms and overlaps.",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def warnings(record: ReproduceRecord) -> tuple[ReportWarning, ...]:
    """Broken promises, and comparisons across machines."""
    found = []
    broken = [run.configuration.name for run in record.runs if run.configuration.promised and not record.identical(run)]
    if broken:
        found.append(
            ReportWarning(
                kind="not-identical",
                text=f"what is promised to be identical is not: {_listed(broken)}",
                remedy="this is a defect of dpsim; please report it with this folder",
            )
        )
    if record.against and record.against.across_machines:
        found.append(
            ReportWarning(
                kind="across-machines",
                text=f"the saved run is of another machine type: {_listed(record.against.across_machines)}",
                remedy="differences may come from that; compare on one machine type",
            )
        )
    return tuple(found)


def _listed(parts: Iterable[str]) -> str:
    some = list(parts)
    return "; ".join(some[:3]) + (f"; and {len(some) - 3} more" if len(some) > 3 else "")


def _facts(record: ReproduceRecord) -> Facts:
    asked = record.reproduction
    facts = (
        ("model and data", f"{asked.model} on {asked.dataset}, global batch {asked.global_batch}, seed {asked.seed}"),
        ("optimizer", str(asked.optimizer)),
        ("gradients sent as", asked.wire_dtype or ""),
        ("steps", str(asked.steps)),
        ("runs", f"{len(record.runs)}, which came to {len(record.trajectories)} different results"),
        ("measured", f"{record.measured_from} to {record.measured_until}"),
        ("predicted at", record.predictions.predicted_at if record.predictions else ""),
        ("predictions' SHA-256", record.predictions_sha256),
        ("held against", record.against.path if record.against else ""),
    )
    return tuple((name, value) for name, value in facts if value)
