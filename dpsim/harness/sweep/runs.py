"""The settings of a finished sweep as runs of jobs, which score what was predicted of them before."""

from __future__ import annotations

from dpsim.model.ledger import Run, job_of
from dpsim.records.comparison import SweepData
from dpsim.records.sweep import clean_values, share_clean


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
