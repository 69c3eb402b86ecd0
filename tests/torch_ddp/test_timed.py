"""The steps of a script in turns: where a step begins, what is kept of it, and which cap DDP gets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dpsim[torch]'")

from dpsim.torch_ddp import timed  # noqa: E402
from dpsim.torch_ddp.record import EnoughSteps, Refused  # noqa: E402
from dpsim.torch_ddp.visit import Visit  # noqa: E402

pytestmark = pytest.mark.torch


class Model:
    """What the timer needs of a DDP model."""

    training = True
    require_backward_grad_sync = True
    device_type = "cpu"

    def __init__(self) -> None:
        self.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)
        self.steps = 0

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        self.steps += 1
        return {
            "bucket_sizes": "40",
            "rebuilt_bucket_sizes": "8, 32",
            "backward_compute_time": 3_000_000,
            "backward_comm_time": 2_000_000,
            "backward_compute_comm_overlap_time": -1,
        }


def turns(*steps: int) -> tuple[timed.TakeTurn, list[Visit]]:
    visits: list[Visit] = []
    left = iter((*steps, 0))

    def take_turn(visit: Visit) -> int:
        visits.append(visit)
        return next(left)

    return take_turn, visits


def test_a_turn_has_a_moment_for_each_step_and_one_for_its_end() -> None:
    take_turn, visits = turns(3, 2)
    timer, model = timed.StepTimer(take_turn), Model()
    with pytest.raises(EnoughSteps):
        for _ in range(10):
            timer.before_forward(model)
            timer.after_backward()
    assert [len(visit.moments_s) for visit in visits] == [1, 4, 3]
    assert visits[1].moments_s == sorted(visits[1].moments_s)
    assert visits[1].logged_s["backward"] == pytest.approx([3e-3] * 3)
    assert visits[1].logged_s["overlap"] == [0.0] * 3, "DDP logs -1 where nothing was recorded"
    assert visits[1].bucket_bytes == (8, 32) and visits[1].waited_s == [0.0] * 3


def test_accumulation_and_evaluation_begin_no_step() -> None:
    take_turn, visits = turns(2)
    timer, model = timed.StepTimer(take_turn), Model()
    with pytest.raises(EnoughSteps):
        for _ in range(4):
            for synchronises in (False, False, True):
                model.require_backward_grad_sync = synchronises
                timer.before_forward(model)
                timer.after_backward()
            with torch.no_grad():
                timer.before_forward(model)
            model.training = False
            timer.before_forward(model)
            model.training = True
    assert [len(visit.moments_s) for visit in visits] == [1, 3]


def test_a_second_model_is_refused() -> None:
    timer = timed.StepTimer(turns(5)[0])
    timer.before_forward(Model())
    with pytest.raises(Refused, match="trains two models"):
        timer.before_forward(Model())


@pytest.mark.parametrize(("size_bytes", "expected"), [(2.0**20, 1.0), (0.0, 2.0**-20), (math.inf, 2.0**30)])
def test_the_cap_in_mib(size_bytes: float, expected: float) -> None:
    assert timed.cap_in_mib(size_bytes) == expected
