"""gpu_check's figures of training on one GPU, at toy size in numba's simulator; and the targets they are held to."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpsim.experiments.gpu_check import record as r
from dpsim.experiments.gpu_check import training
from dpsim.experiments.gpu_check.journal import kept_in
from dpsim.nn import build_model

Python = Callable[..., subprocess.CompletedProcess[str]]
SUPPORT = Path(__file__).parents[1] / "support"
SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1"}


def test_every_figure_is_taken_and_each_has_a_target(python: Python, tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda")
    path = tmp_path / "a.trainings"
    done = python(str(SUPPORT / "gpu_check_figures.py"), str(path), env=SIMULATED, timeout_s=100)
    assert done.returncode == 0, done.stderr
    figures = kept_in(path, r.Training)
    assert [figure.name for figure in figures] == list(r.TARGETS)
    for figure in figures:
        samples = (training.TOY.rounds, training.TOY.rounds) if figure.unit == "s" else (1, 1)
        assert (len(figure.own), len(figure.other)) == samples
        assert all(math.isfinite(each) for each in (*figure.own, *figure.other))
    by_name = {figure.name: figure for figure in figures}
    assert min(by_name[r.REPRODUCIBLE].own) > 0 and by_name[r.REPRODUCIBLE].setting.endswith("16, 8 leaves")
    assert re.search(r", [1-9]\d* events a step$", by_name[r.TIMELINES].setting)
    assert by_name[r.ACTIVATION_BYTES].own[0] > 0
    assert by_name[r.BFLOAT16_SPEED].setting == f"{by_name[r.MLP_SPEED].setting}, bfloat16"
    weights = 784 * 4 + 4 + 4 * 4 + 4 + 4 * 10 + 10
    assert by_name[r.STATE_BYTES].other == (3 * 4 * weights,)  # parameters, gradients, momentum


def test_a_figure_that_needs_pytorch_is_left_out_with_the_reason(python: Python, tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda")
    path = tmp_path / "a.trainings"
    done = python("-m", "dpsim.experiments.gpu_check.training", str(path), r.MLP_SPEED, env=SIMULATED)
    reason = "PyTorch is not compared with the simulator\n"
    assert (done.returncode, done.stdout) == (0, reason), done.stderr
    assert kept_in(path, r.Training) == ()


def test_initial_values_that_are_drawn_quickly_have_the_distribution_of_the_models_own() -> None:
    model = build_model("mlp:300,200", training.MLP_SHAPE, training.CLASSES)
    quick, own = training._initial(model, 1), model.initial_parameters(1)
    assert {name: value.shape for name, value in quick.items()} == {name: value.shape for name, value in own.items()}
    for name, value in quick.items():
        assert value.dtype == np.float32
        assert np.std(value) == pytest.approx(np.std(own[name]), rel=0.05)


@pytest.mark.parametrize(
    ("name", "own", "other", "measured", "met"),
    [
        (r.MLP_SPEED, 1.0, 0.9, 0.9, True),
        (r.MLP_SPEED, 1.0, 0.8, 0.8, False),
        (r.PICTURE_SPEED, 1.0, 0.6, 0.6, True),
        (r.BFLOAT16_SPEED, 1.0, 0.8, 0.8, False),
        (r.REPRODUCIBLE, 1.25, 1.0, 1.25, True),
        (r.TIMELINES, 1.03, 1.0, 1.03, False),
        (r.STATE_BYTES, 1.05, 1.0, 1.05, True),
        (r.ACTIVATION_BYTES, 1.3, 1.0, 1.3, False),
    ],
)
def test_targets_are_those_of_speed_at_least_and_of_cost_at_most(
    name: str, own: float, other: float, measured: float, met: bool
) -> None:
    taken = r.Training(name=name, setting="a", unit="s", own=(own,), other=(other,))
    claim = r.TARGETS[name].of_training(taken)
    assert (claim["measured"], claim["met"]) == (pytest.approx(measured), met)


def test_both_take_turns_and_the_first_round_does_not_count() -> None:
    asked: list[tuple[str, int]] = []

    def steps(name: str) -> Callable[[int], None]:
        return lambda count: asked.append((name, count))

    effort = training.Effort(rounds=3, counted=2)
    figure = training._timed("a", effort, "b", steps("own"), steps("other"), own_too_s=5.0)
    assert len(figure.own) == len(figure.other) == 3
    assert min(figure.own) >= 5 > max(figure.other)
    assert [{name for name, _ in asked[i : i + 2]} for i in range(0, 8, 2)] == [{"own", "other"}] * 4
    assert {count for _, count in asked} == {2}


@pytest.mark.torch
def test_pytorch_trains_the_same_shapes() -> None:
    cases = [
        ("mlp:8,8", (4, 4, 1), "float32"),
        ("mlp:8,8", (4, 4, 1), "bfloat16"),
        ("resnet20", (32, 32, 3), "float32"),
    ]
    for token, shape, compute_dtype in cases:
        model = training.TorchModel(token, shape, 4, compute_dtype, "cpu")
        model.steps(2)
        assert model.activation_bytes() == 0  # only a GPU tells
        model.close()
