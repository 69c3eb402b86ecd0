"""``python -m dpsim.experiments.bubble`` sets the measured bubble of pipelines beside the predicted one and a formula.

The bubble is the share of the time from a step's first forward to its last backward in which a stage computes nothing,
the mean over stages: of the measured step nearest to the median, of the predicted one, and (p - 1) / (m + p - 1) for p
equal stages, m micro-batches and messages that take no time. One stage is the control: it has no bubble.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np

from dpsim.codec import Noun
from dpsim.experiments import command
from dpsim.harness.sweep.experiment import experiment_of_plans
from dpsim.harness.sweep.sweep import measure
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.sweep import Environment
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, LOSS_EVENT, RECOMPUTE_EVENT
from dpsim.setting import Setting
from dpsim.study.environment import environment
from dpsim.timeline import Timeline

_MICRO_BATCHES = (1, 2, 4, 8)
_COMPUTES = (FORWARD_EVENT, RECOMPUTE_EVENT, LOSS_EVENT, BACKWARD_EVENT)
_BUDGET_S = 20.0


class Case(Noun, frozen=True):
    """A pipeline of ``stages`` with a device each, and data parallelism as its control, on a network."""

    stages: int
    network: str
    compute: str
    global_batch: int
    model: str = "mlp:256x8"

    def plans(self) -> list[Plan]:
        """Return a plan for each number of micro-batches, and one with a single stage."""
        pipeline, single = f"pipeline:stages={self.stages}", "pipeline:stages=1"
        cases = [(pipeline, number) for number in _MICRO_BATCHES] + [(single, _MICRO_BATCHES[-1])]
        return [
            Plan(
                devices=self.stages,
                global_batch=self.global_batch,
                accumulate=number,
                strategy=strategy,
                overlap="off",
                algorithm="auto" if self.network == "node" else "ring",
            )
            for strategy, number in cases
        ]


CASES = (
    Case(stages=2, network="node", compute="real", global_batch=256),
    Case(stages=4, network="paced:200us,1gbit", compute="emulated", global_batch=512),
)


class Bubble(Noun, frozen=True):
    """The bubble of one setting: a share of the time in which its stages compute."""

    setting: Setting
    measured: float
    predicted: float

    @property
    def formula(self) -> float:
        """(p - 1) / (m + p - 1) for p stages and m micro-batches."""
        stages, number = self.setting.plan.parallelism.stages, self.setting.plan.accumulate
        return (stages - 1) / (number + stages - 1)


class BubbleRecord(Noun, frozen=True):
    """The bubbles of one run."""

    environment: Environment
    bubbles: tuple[Bubble, ...]
    schema: str = "dpsim.bubble/1"


def idle_share(timeline: Timeline) -> float:
    """Return the mean over ranks of the time without computation from the first forward to the last backward."""
    computes = np.isin(timeline.kind, _COMPUTES)
    start_s, end_s, ranks = timeline.start_s[computes], timeline.end_s[computes], timeline.rank[computes]
    busy_s = np.bincount(np.unique(ranks, return_inverse=True)[1], end_s - start_s)
    return float(1 - np.mean(busy_s) / (end_s.max() - start_s.min()))


def bubbles(case: Case, progress: Progress) -> list[Bubble]:
    """Measure a case, and return its bubbles."""
    base = {"model": case.model, "network": case.network, "compute": case.compute}
    experiment = experiment_of_plans("bubble", case.plans(), **base)
    experiment = msgspec.structs.replace(experiment, budget_s=_BUDGET_S)
    with tempfile.TemporaryDirectory() as folder:
        swept = measure(experiment, Path(folder) / "measured", progress)
    predicted = {point.setting: point.timeline for point in swept.predictions.points}
    pairs = [(point.setting, point.timeline, predicted[point.setting]) for point in swept.results.points]
    return [
        Bubble(setting, *(idle_share(Timeline.from_record(record)) for record in (measured, expected)))
        for setting, measured, expected in pairs
        if not setting.repeat and measured is not None and expected is not None
    ]


def lines(record: BubbleRecord) -> list[str]:
    """Return a line for each bubble."""
    return [
        f"{each.setting.plan.devices} devices, {each.setting.where}, {each.setting.plan.strategy},"
        f" {each.setting.plan.accumulate} micro-batches: bubble measured {each.measured:.1%},"
        f" predicted {each.predicted:.1%}, by the formula {each.formula:.1%}"
        for each in record.bubbles
    ]


def run(progress: Progress) -> BubbleRecord:
    """Measure all cases."""
    return BubbleRecord(environment(), tuple(bubble for case in CASES for bubble in bubbles(case, progress)))


def main() -> int:
    return command.recorded("bubble", __doc__, run, lines)


if __name__ == "__main__":
    raise SystemExit(main())
