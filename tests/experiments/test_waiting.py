"""The experiment on waiting for the slowest: its spreads, its prediction, and what a run records."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.errors import FileFormatError
from dpsim.experiments.accuracy.lines import waiting_line
from dpsim.experiments.waiting import STUDY, Case, Shape, error, predicted_s, quantiles, workload_of
from dpsim.runtime.describe import describe
from dpsim.study import models


@pytest.mark.parametrize("shape", ["normal", "exponential"])
def test_a_spread_has_mean_1_and_the_deviation_asked_for(shape: Shape) -> None:
    spread = quantiles(shape, 0.15)
    assert np.mean(spread) == pytest.approx(1) and np.std(spread) == pytest.approx(0.15)
    assert list(spread) == sorted(spread) and spread[0] > 0


@pytest.mark.parametrize(
    ("devices", "shape", "deviations"),
    [
        (2, "normal", 1 / math.sqrt(math.pi)),
        (4, "normal", 1.029),
        (2, "exponential", 1 / 2),
        (4, "exponential", 13 / 12),
    ],
)
def test_the_prediction_is_the_mean_of_the_largest_of_independent_draws(
    devices: int, shape: Shape, deviations: float
) -> None:
    """In standard deviations above the mean: 1 / sqrt(pi) of 2 normal draws, 1/2 + ... + 1/n of n exponential ones."""
    case = Case(devices=devices, shape=shape)
    data = load_dataset("digits")
    bare = describe(models.load("mlp:16", data.input_shape, data.classes).replica(), "mlp:16")
    workload = msgspec.structs.replace(workload_of(bare, case), step_spread=quantiles(shape, case.deviation))
    assert predicted_s(workload, case) == pytest.approx(deviations * case.deviation * case.compute_s, rel=0.05)
    assert predicted_s(msgspec.structs.replace(workload, step_spread=()), case) == 0


def test_a_slow_rank_is_predicted_from_the_times_of_the_others() -> None:
    """A rank that is half as fast, and hardly a spread: the step waits for as long again as a fast rank computes."""
    case = Case(devices=2, shape="normal", deviation=1e-6, compute_s=0.01, rounds=2, slow_devices=(2.0,))
    (waiting,) = STUDY.measure([case]).measured
    assert waiting.samples["predicted_s"][0] == pytest.approx(0.01, rel=1e-4)
    assert statistics.median(waiting.samples["drawn_s"]) > 0.019
    assert case.title == "2 ranks, normal spread of 0%, one 2 times as slow"


def test_a_run_keeps_the_samples_of_both_kinds_of_step(tmp_path: Path) -> None:
    case = Case(devices=2, shape="normal", deviation=0.4, compute_s=0.01, rounds=2)
    record = STUDY.measure([case])
    (waiting,) = record.measured
    assert len(waiting.samples["equal_s"]) == len(waiting.samples["drawn_s"]) == 16
    # A step after a late one is shorter, for moments follow one another: only most steps last as long as they compute.
    assert statistics.median(waiting.samples["equal_s"]) > 0.009 and waiting.samples["predicted_s"][0] > 0
    line = waiting_line(record)
    assert line.points == 16 and line.value == abs(error(waiting))
    assert line.note.startswith("predicted and measured share of the step: 2 devices ")
    codec.write(tmp_path / "waiting.json", record)
    assert STUDY.read(tmp_path / "waiting.json") == record
    text = (tmp_path / "waiting.json").read_text().replace('"drawn_s"', '"drown_s"')
    (tmp_path / "waiting.json").write_text(text)
    with pytest.raises(FileFormatError, match="has no samples drawn_s"):
        STUDY.read(tmp_path / "waiting.json")
