"""The report of a reproduction: its answers, tables and figure; the same as data and for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsim.codec import to_builtins
from dpsim.dtypes import in_dtype
from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.plan import Plan
from dpsim.records.columns import CONFIGURATION
from dpsim.records.reproduce import (
    Difference,
    ReproduceRecord,
    Run,
    plan_name,
    promised,
)
from dpsim.report.charts import Panel
from dpsim.report.content import Content, Facts, ReportWarning, environment_facts
from dpsim.report.drift import drift_chart, drift_sentences, drift_table
from dpsim.report.saved import Samples
from dpsim.report.table import Column, Table, table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, listed
from dpsim.report.write import DRIFT_CAPTION, PAGES, figure, write_content
from dpsim.units import format_size

_MOST_SHOWN = 40
ALL_RUNS = "Digests of all runs"
_SHOWN = 12
"""Digits of a digest that a table shows."""
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
    tables = [_counts_table(record), _digests_table(record)]
    if record.divergences:
        tables.append(_differences_table(record))
    if record.drift:
        tables.append(drift_table(record))
    return Content(
        name=name,
        heading=f"The same bits? {name}",
        cards=(),
        rules=RULES,
        answers=tuple(_answers(record)),
        question="Does training end with the same bits, whatever the number of devices, the buckets, the algorithm and "
        "the overlap?",
        tables=tuple(tables),
        warnings=tuple(_warnings(record)),
        facts=_facts(record),
        environment=environment_facts(record.environment),
    )


def title(record: ReproduceRecord) -> str:
    """Return what was trained, in how many configurations, and when."""
    of, runs = record.reproduction, counted(len(record.runs), "run")
    results = counted(len(record.trajectories), "different result")
    return f"reproducibility of {of.model} on {of.dataset}: {runs}, {results}, measured from {record.measured_from}"


def points(record: ReproduceRecord) -> list[dict[str, Any]]:
    """Return every run: its configuration and digests, where it first differs from one device, and its drift."""
    return [_point(record, run) for run in record.runs]


def _point(record: ReproduceRecord, run: Run) -> dict[str, Any]:
    trajectory, difference = record.trajectories[run.trajectory], record.difference(run)
    drift = record.measured_drift(run.plan)
    predicted = record.predicted_drift(run.plan)
    return configuration(run.plan) | {
        "promised": promised(run.plan),
        "digest": trajectory.digest,
        "losses_digest": trajectory.losses_digest,
        "final_loss": trajectory.losses[-1],
        "identical": record.identical(run),
        "first_difference": None if difference is None else to_builtins(difference),
        "parameter_drift": drift.parameters if drift else None,
        "loss_drift": drift.loss if drift else None,
        "statistics_drift": drift.statistics if drift else None,
        "predicted_parameter_drift": predicted.parameters if predicted else None,
        "predicted_statistics_drift": predicted.statistics if predicted else None,
    }


def configuration(plan: Plan) -> dict[str, Any]:
    """Return a plan's settings that tell runs apart, by the names of ``--json``."""
    values: dict[str, Any] = to_builtins({column.name: getattr(plan, column.name) for column in CONFIGURATION})
    return values


def summary(record: ReproduceRecord) -> dict[str, Any]:
    """Return the summary; ``identical`` says whether all promises were kept (``None``: nothing was promised)."""
    saved = record.saved_comparison
    alone = [run for run in record.runs if run.plan.devices == 1]
    return {
        "identical": record.kept_promises if any(promised(run.plan) for run in record.runs) else None,
        "runs": len(record.runs),
        "different_results": len(record.trajectories),
        "digests": {run.plan.batch_norm: record.trajectories[run.trajectory].digest for run in alone},
        "predictions_sha256": record.predictions_sha256,
        "against": saved and to_builtins(saved) | {"compared": [*map(configuration, saved.compared)]},
    }


def samples(record: ReproduceRecord) -> Samples:
    """Return each step of each run: its configuration and its loss. Runs are not timed."""
    losses = [record.trajectories[run.trajectory].losses for run in record.runs]
    values = {
        "step": [step for each in losses for step in range(1, len(each) + 1)],
        "loss": np.array([loss for each in losses for loss in each], np.float64),
    }
    return [configuration(run.plan) for run in record.runs], [len(each) for each in losses], values


def panel(record: ReproduceRecord) -> Panel:
    """Return the figure of the drift from one device. Raises ``ConfigError`` where there is none."""
    chart = drift_chart(record)
    if chart is None:
        raise ConfigError(
            "no drift was measured: every configuration is promised to have the bits of one device",
            allowed="a figure of a record with configurations that drift",
            remedy="look at .frame(), whose column identical says which have the same bits",
        )
    return chart.panels[0]


def write(folder: Path, record: ReproduceRecord, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write the page, the Markdown and, where drift was measured, its figure. Raises ``ConfigError``."""
    drawn = figure("drift", "Drift", DRIFT_CAPTION, drift_chart(record))
    return write_content(folder, content(record), [drawn], pages)


def show(record: ReproduceRecord, page: Path | None, _: bool) -> Iterator[Any]:
    """Yield the tables, warnings and answers; of many runs without the table of each."""
    report, many = content(record), len(record.runs) > _MOST_SHOWN
    tables = [table for table in report.tables if table.title != ALL_RUNS or not many]
    yield TerminalReport(tables=tables, warnings=report.warnings, answers=report.answers)
    if many:
        where = "use --output FOLDER or --json" if page is None else "see the report"
        yield f"each of the {len(record.runs)} runs: {where}"
    if page is not None:
        yield f"report: {page}"


def _modes(record: ReproduceRecord) -> dict[str, list[Run]]:
    """Return the runs by the name of their mode, in the order of the reproduction's batch-norm modes."""
    runs = sorted(record.runs, key=lambda run: record.reproduction.batch_norms.index(run.plan.batch_norm))
    return grouped(runs, lambda run: _mode_name(run.plan))


def _mode_name(plan: Plan) -> str:
    """Return ``batch norm leaf, 8 leaves`` or ``batch norm local, plain sums``."""
    sums = f"{plan.leaves} leaves" if promised(plan) else "plain sums"
    return f"batch norm {plan.batch_norm}, {sums}"


def _first_tensor(difference: Difference) -> str:
    element = f"[{', '.join(map(str, difference.element))}]" if difference.element else ""
    return difference.tensor + element


def _answers(record: ReproduceRecord) -> Iterator[str]:
    for runs in _modes(record).values():
        yield _answer(record, runs)
    for predicted, measured in record.drifts():
        yield from drift_sentences(predicted, measured)
    if (saved := record.saved_comparison) is not None:
        for plan, difference in zip(saved.compared, saved.differences, strict=True):
            verdict = "identical" if difference is None else _in_words(difference)
            if difference is not None and saved.across_machines:
                verdict += f"; not held against it, for {listed(saved.across_machines)}"
            yield f"Compared with {saved.path}, {_mode_name(plan)}: {verdict}."


def _answer(record: ReproduceRecord, runs: Sequence[Run]) -> str:
    mode = _mode_name(runs[0].plan).capitalize()
    differing = [run for run in runs if not record.identical(run)]
    if not differing:
        digest = record.trajectories[record.reference(runs[0].plan)].digest
        counts = ", ".join(dict.fromkeys(str(run.plan.devices) for run in runs))
        count = f"{len(runs)} runs on {counts} devices" if len(runs) > 1 else "1 run on 1 device"
        return f"{mode}: identical, {count}, digest {digest}."
    first = differing[0]
    difference = record.difference(first)
    where = _in_words(difference) if difference is not None else "its ranks ended with different bits"
    verdict = "NOT IDENTICAL as promised" if promised(first.plan) else "not identical, and not promised"
    return (
        f"{mode}: {verdict}; {len(differing)} of {len(runs)} runs differ from the run on 1 device. The first "
        f"({plan_name(first.plan)}): {where}."
    )


def _in_words(difference: Difference) -> str:
    text = f"step {difference.step}, {_first_tensor(difference)}"
    if difference.values_known:
        text += (
            f", {difference.value!r} instead of {difference.reference_value!r}: {difference.ulps:,} "
            f"ULP{'s' * (difference.ulps != 1)}, {difference.relative:.2g} relative"
        )
    return text + (f"; cause: {difference.cause} ({difference.evidence})" if difference.cause else "")


def _warnings(record: ReproduceRecord) -> Iterator[ReportWarning]:
    if broken := [plan_name(run.plan) for run in record.runs if record.broken(run)]:
        yield ReportWarning(
            kind="not-identical",
            text=f"runs that are promised to be identical are not: {listed(broken)}",
            remedy="this is a defect of dpsim; please report it with this folder",
        )
    if record.saved_comparison is not None and record.saved_comparison.across_machines:
        yield ReportWarning(
            kind="across-machines",
            text=f"the saved run is of another machine type: {listed(record.saved_comparison.across_machines)}",
            remedy="differences from it are not held against this run; compare on one machine type to hold them",
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


def _counts_table(record: ReproduceRecord) -> Table:
    sections = {}
    for name, runs in _modes(record).items():
        by_count = grouped(runs, lambda run: run.plan.devices)
        sections[name] = [by_count[count] for count in sorted(by_count)]

    def results(runs: Sequence[Run]) -> set[int]:
        return {run.trajectory for run in runs}

    def digest(runs: Sequence[Run], name: str) -> str:
        return str(getattr(record.trajectories[runs[0].trajectory], name))[:_SHOWN] if len(results(runs)) == 1 else ""

    columns: tuple[Column[list[Run]], ...] = (
        Column(head="devices", cell=lambda runs: str(runs[0].plan.devices)),
        Column(head="runs", cell=lambda runs: str(len(runs))),
        Column(head="as on 1 device", cell=lambda runs: f"{sum(map(record.identical, runs))} of {len(runs)}"),
        Column(head="different results", cell=lambda runs: str(len(results(runs)))),
        Column(head="digest", cell=lambda runs: digest(runs, "digest"), left=True),
        Column(head="losses", cell=lambda runs: digest(runs, "losses_digest"), left=True),
    )
    over = "strategies, " if len({run.plan.strategy for run in record.runs}) > 1 else ""
    return table(
        title="Digests by number of devices",
        columns=columns,
        sections=sections,
        note=f"Over all {over}thresholds, algorithms and overlaps. The digest is shown where all runs have the same.",
    )


def _digests_table(record: ReproduceRecord) -> Table:
    def sent(run: Run, text: str) -> str:
        return text if run.plan.devices > 1 else ""

    strategies, accumulates = ({getattr(run.plan, name) for run in record.runs} for name in ("strategy", "accumulate"))
    varied: list[Column[Run]] = []
    if len(strategies) > 1:
        varied.append(Column(head="strategy", cell=lambda run: sent(run, run.plan.strategy), left=True))
    if len(accumulates) > 1:
        varied.append(Column(head="micro-batches", cell=lambda run: str(run.plan.accumulate)))
    columns: tuple[Column[Run], ...] = (
        Column(head="devices", cell=lambda run: run.plan.layout or str(run.plan.devices)),
        *varied,
        Column(head="threshold", cell=lambda run: sent(run, format_size(run.plan.threshold_bytes))),
        Column(head="algorithm", cell=lambda run: sent(run, run.plan.algorithm), left=True),
        Column(head="overlap", cell=lambda run: sent(run, run.plan.overlap), left=True),
        Column(head="digest", cell=lambda run: record.trajectories[run.trajectory].digest[:_SHOWN], left=True),
        Column(head="losses", cell=lambda run: record.trajectories[run.trajectory].losses_digest[:_SHOWN], left=True),
        Column(head="against 1 device", cell=lambda run: _verdict(record, run), left=True),
    )
    return table(
        title=ALL_RUNS,
        columns=columns,
        sections=_modes(record),
        strong=record.broken,
        note=f"The first {_SHOWN} digits of the SHA-256 of the trained state and of all losses.",
    )


def _verdict(record: ReproduceRecord, run: Run) -> str:
    difference = record.difference(run)
    if not run.ranks_agree and (run.plan.devices == 1 or difference is None):
        return "ranks differ"
    if run.plan.devices == 1:
        return ""
    if record.identical(run):
        return "identical"
    if difference is None:
        return "other digest"
    return f"step {difference.step}, {_first_tensor(difference)}: {difference.cause}"


def _differences_table(record: ReproduceRecord) -> Table:
    sections = {}
    for name, runs in _modes(record).items():
        rows: dict[int, tuple[Plan, Difference]] = {}
        for run in runs:
            if (difference := record.difference(run)) is not None:
                rows.setdefault(run.trajectory, (run.plan, difference))
        if rows:
            sections[name] = list(rows.values())
    columns: tuple[Column[tuple[Plan, Difference]], ...] = (
        Column(head="devices", cell=lambda row: row[0].layout or str(row[0].devices)),
        Column(head="threshold", cell=lambda row: format_size(row[0].threshold_bytes)),
        Column(head="algorithm", cell=lambda row: row[0].algorithm, left=True),
        Column(head="step", cell=lambda row: str(row[1].step)),
        Column(head="first tensor", cell=lambda row: _first_tensor(row[1]), left=True),
        Column(head="ULPs", cell=lambda row: f"{row[1].ulps:,}"),
        Column(head="relative", cell=lambda row: f"{row[1].relative:.2g}"),
        Column(head="most ULPs", cell=lambda row: f"{row[1].max_ulps:,}"),
        Column(head="elements", cell=lambda row: f"{row[1].elements_differing} of {row[1].elements}"),
        Column(head="tensors", cell=lambda row: f"{row[1].tensors_differing} of {row[1].tensors}"),
        Column(head="cause", cell=lambda row: str(row[1].cause), left=True),
    )
    return table(
        title="Where they first differ",
        columns=columns,
        sections=sections,
        note="The first element that differs in the first tensor that differs, in the order in which a step makes "
        "tensors: running statistics, the loss, then layer by layer backwards. ULPs: how many floating-point numbers "
        "the two values are apart; most ULPs: the largest in that tensor. Elements of that tensor and tensors: how "
        "many differ after that step. Runs with the same bits are shown once.",
    )
