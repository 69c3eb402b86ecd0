"""The scores of every committed sweep, computed a second time from its records by pandas alone."""

from pathlib import Path

import pytest
from scores_by_pandas import network_scores

from dpsim.harness.sweep.compare import with_groups
from dpsim.harness.sweep.sweep import read_swept
from dpsim.report.sweep.saved import summary

REPORTS = Path(__file__).parents[2] / "reports"
SWEEPS = sorted(path.parent.name for path in REPORTS.glob("*/predictions.json"))


@pytest.mark.parametrize("name", SWEEPS)
def test_skill_regret_and_best_guess_follow_from_the_records_alone(name: str) -> None:
    data = read_swept(REPORTS / name)
    assert data.results == with_groups(data.results, data.predictions, data.blind)
    computed, networks = network_scores(REPORTS / name), summary(data)["networks"]
    assert len(computed) == len(networks) > 0
    for network in networks:
        again = computed[network["network"], network["runtime"]]
        for quantity in ("median_abs_error", "null_median_abs_error", "skill", "regret"):
            assert again[quantity] == pytest.approx(network[quantity], abs=0.001), quantity
