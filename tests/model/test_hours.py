"""Hours, cost and tokens of a training: as the formula of a step says, and the other way round."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from published_files import WORKLOAD

from dpsim.errors import ConfigError
from dpsim.model.hours import Training

Dpsim = Callable[..., tuple[int, str, str]]
ASKED = f"predict --workload {WORKLOAD} --machine 10gbe --local-batch 16"
OF = "--samples 1.28M --epochs 90 --price 0.9 --tokens-per-sample 196"


def test_columns_follow_from_the_step_and_the_global_batch(dpsim: Dpsim) -> None:
    code, text, _ = dpsim(*f"{ASKED} --devices 1,8 {OF} --json".split())
    answer = json.loads(text)
    assert code == 0 and any("not of a quality" in each for each in answer["summary"]["cautions"])
    for point in [*answer["points"], *answer["summary"]["best"]]:
        for end, step_s in (("", "predicted_step_s"), ("_low", "predicted_low_s"), ("_high", "predicted_high_s")):
            hours = 1.28e6 * 90 / point["global_batch"] * point[step_s] / 3600
            assert point[f"hours{end}"] == pytest.approx(hours)
            assert point[f"cost{end}"] == pytest.approx(hours * point["devices"] * 0.9)
        for end, step_s in (("", "predicted_step_s"), ("_low", "predicted_high_s"), ("_high", "predicted_low_s")):
            assert point[f"images_per_s{end}"] == pytest.approx(point["global_batch"] / point[step_s])
            assert point[f"tokens_per_s{end}"] == pytest.approx(196 * point["global_batch"] / point[step_s])


@pytest.mark.parametrize(("goal", "most"), [("hours", False), ("cost", True)])
def test_a_target_is_met_by_the_devices_that_are_found_and_missed_by_the_next(
    dpsim: Dpsim, goal: str, most: bool
) -> None:
    found = f"{ASKED} --devices 200 {OF} --find devices --target {goal}={400 if most else 24} --json"
    point = json.loads(dpsim(*found.split())[1])["points"][0]
    assert point["value_low"] <= point["value"] <= point["value_high"]
    beside = point["value"] + (1 if most else -1)
    counts = f"{ASKED} --devices {point['value']:.0f},{beside:.0f} {OF} --json"
    reached, missed = (each[goal] for each in json.loads(dpsim(*counts.split())[1])["points"])
    assert reached <= point["target"] < missed


def test_tokens_are_samples_of_so_many(dpsim: Dpsim) -> None:
    lines = (f"{ASKED} --devices 8 --tokens-per-sample 2k --samples {each} --json" for each in ("10Btokens", "5e6"))
    hours = [json.loads(dpsim(*line.split())[1])["points"][0]["hours"] for line in lines]
    assert hours[0] == hours[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--price 2", "--price without --samples"),
        ("--epochs 3", "--epochs without --samples"),
        ("--samples many", "--samples 'many' is not understood"),
        ("--samples nan", "--samples 'nan' is not understood"),
        ("--samples 0", "--samples is 0"),
        ("--samples 1M --price -1", "--price is -1"),
        ("--samples 1M --price inf", "--price is inf"),
        ("--samples 1Mtokens", "--samples 1Mtokens"),
        ("--samples 1M --find devices --target cost=5", "a target of cost without --samples and --price"),
        ("--find devices --target hours=5", "a target of hours without --samples"),
        ("--samples 1M --rank strategy", "--rank and --samples"),
    ],
)
def test_what_is_no_training_is_one_message(dpsim: Dpsim, flags: str, said: str) -> None:
    code, out, error = dpsim(*ASKED.split(), "--devices", "8", *flags.split())
    assert code == 2 and not out
    assert error.startswith("dpsim: ") and said in error and "Traceback" not in error


def test_a_training_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--samples is 0"):
        Training(samples=0.0)
