"""The settings of a sweep for the ledger: what is predicted of them alone, and runs of jobs once they are measured."""

from __future__ import annotations

from dpsim.model.ledger import Run, job_of
from dpsim.model.points import rows_of_plans
from dpsim.model.rows import PredictedRow
from dpsim.records.comparison import SweepData
from dpsim.records.sweep import Predictions, clean_values, share_clean


def rows_of(predictions: Predictions) -> list[PredictedRow]:
    """Return the predicted steps of a sweep that is not measured."""
    made = [(*predictions.made_from(point), point.setting.plan) for point in predictions.points]
    return [row for workload, machine, plan in made for row in rows_of_plans(workload, machine, [plan])]


def runs_of(swept: SweepData) -> list[Run]:
    """Return a run for each measured setting; where no sample is known to be clean or not, all of them count."""
    predictions, results = swept.scored, swept.results
    runs = []
    for point in swept.comparison.points:
        workload, _ = predictions.made_from(point.predicted)
        known = share_clean(point.runs) is not None
        marks = [mark for run in point.runs for mark in run.clean]
        runs.append(
            Run(
                job=job_of(workload, point.setting.plan, point.setting.network, results.environment.processor),
                step_s=point.measured_step_s,
                steps=marks.count(True) if known else len(clean_values(point.runs)),
                name=swept.comparison.predictions_sha256,
                at=results.measured_from,
                version=workload.ddp.torch if workload.ddp else "",
            )
        )
    return runs
