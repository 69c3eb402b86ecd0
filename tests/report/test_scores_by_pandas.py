"""The scores of every committed sweep, computed a second time from its records by pandas alone."""

import json
from pathlib import Path

import pytest
from scores_by_pandas import network_scores

from dpsim.codec import to_builtins
from dpsim.harness.sweep.sweep import read_swept
from dpsim.report.sweep.question import QUESTIONS
from dpsim.report.sweep.saved import summary

REPORTS = Path(__file__).parents[2] / "reports"
SWEEPS = sorted(path.parent.name for path in REPORTS.glob("*/predictions.json"))


@pytest.mark.parametrize("name", SWEEPS)
def test_skill_regret_and_best_guess_follow_from_the_records_alone(name: str) -> None:
    data = read_swept(REPORTS / name)
    groups = {json.dumps(to_builtins(point.setting)): point.group for point in data.comparison.scored}
    question = QUESTIONS[data.comparison.experiment.question]
    computed = network_scores(REPORTS / name, groups, (*question.nulls, "free_communication", "nothing_hidden"))
    networks = summary(data)["networks"]
    assert len(computed) == len(networks) > 0
    for network in networks:
        again = computed[network["network"], network["runtime"]]
        for quantity in ("median_abs_error", "null_median_abs_error", "skill", "regret"):
            assert again[quantity] == pytest.approx(network[quantity], abs=0.001), quantity
