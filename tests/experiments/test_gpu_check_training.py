"""gpu_check's figures of training on one GPU, at toy size in numba's simulator; and the targets they are held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from python_path import extended_path

from dpsim.experiments.gpu_check import record as r
from dpsim.experiments.gpu_check import training
from dpsim.experiments.gpu_check.journal import kept_in
from dpsim.launch import jobs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[tuple[r.Training, ...]]]:
    """What the task says, and the figures that it left: beside another library, alone, and without time."""
    pytest.importorskip("numba_cuda")
    folder = tmp_path_factory.mktemp("figures")
    paths = [folder / f"{name}.trainings" for name in ("beside", "alone", "late")]
    env = {
        "PYTHONPATH": extended_path(Path(__file__).parents[1] / "support"),
        "NUMBA_ENABLE_CUDASIM": "1",
    }
    argument = {"results": [str(path) for path in paths]}
    said = jobs.on_ranks("ranks_gpu_check:run", argument, devices=1, timeout_s=100, env=env)
    return said, [kept_in(path, r.Training) for path in paths]


def test_every_figure_is_taken_and_each_has_a_target(ran: tuple[dict[str, Any], list[tuple[r.Training, ...]]]) -> None:
    said, (figures, *_) = ran
    assert said["beside"] == {"left_out": []}
    assert [figure.name for figure in figures] == list(r.TARGETS)
    for figure in figures:
        samples = (training.TOY.rounds, training.TOY.rounds) if figure.unit == "s" else (1, 1)
        assert (len(figure.own), len(figure.other)) == samples
        assert all(math.isfinite(each) for each in (*figure.own, *figure.other))
    by_name = {figure.name: figure for figure in figures}
    assert min(by_name[r.REPRODUCIBLE].own) > 0 and by_name[r.REPRODUCIBLE].setting.endswith("16, 8 leaves")
    assert by_name[r.ACTIVATION_BYTES].own[0] > 0
    assert by_name[r.BFLOAT16_SPEED].setting == f"{by_name[r.MLP_SPEED].setting}, bfloat16"
    weights = 784 * 4 + 4 + 4 * 4 + 4 + 4 * 10 + 10
    assert by_name[r.STATE_BYTES].other == (3 * 4 * weights,)  # parameters, gradients, momentum


def test_without_pytorch_the_other_figures_are_taken(ran: tuple[dict[str, Any], list[tuple[r.Training, ...]]]) -> None:
    said, (_, figures, _) = ran
    missing = (r.MLP_SPEED, r.PICTURE_SPEED, r.ACTIVATION_BYTES, r.BFLOAT16_SPEED)
    reason = "ImportError: PyTorch is not compared with the simulator"
    assert said["alone"]["left_out"] == [f"{name}: {reason}" for name in missing]
    assert [figure.name for figure in figures] == [name for name in r.TARGETS if name not in missing]


def test_what_there_is_no_time_for_is_said(ran: tuple[dict[str, Any], list[tuple[r.Training, ...]]]) -> None:
    said, (*_, figures) = ran
    assert figures == () and said["late"]["left_out"] == [f"{name}: no time left" for name in r.TARGETS]


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
    (claim,) = r.training_claims([r.Training(name=name, setting="a", unit="s", own=(own,), other=(other,))])
    assert (claim.measured, claim.met) == (pytest.approx(measured), met)


def test_both_take_turns_and_the_first_round_does_not_count() -> None:
    asked: list[tuple[str, int]] = []

    def steps(name: str) -> Callable[[int], None]:
        return lambda count: asked.append((name, count))

    effort = training.Effort(rounds=3, counted=2)
    own, other = training.in_turns(effort, steps("own"), steps("other"))
    assert len(own) == len(other) == 3
    assert [name for name, _ in asked] == ["own", "other", "other", "own", "own", "other", "other", "own"]
    assert {count for _, count in asked} == {2}


@pytest.mark.torch
def test_pytorch_trains_the_same_shapes() -> None:
    from dpsim.experiments.gpu_check.torch_model import TorchModel

    cases = [
        ("mlp:8,8", (4, 4, 1), "float32"),
        ("mlp:8,8", (4, 4, 1), "bfloat16"),
        ("resnet20", (32, 32, 3), "float32"),
    ]
    for token, shape, compute_dtype in cases:
        model = TorchModel(token, shape, 4, "cpu", compute_dtype)
        model.steps(2)
        assert model.activation_bytes() == 0  # only a GPU tells
        model.close()
