"""The steps of a script in turns: where a step begins, what is kept of it, and which cap DDP gets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

from torch import distributed  # noqa: E402

from dpsim.errors import ConfigError  # noqa: E402
from dpsim.plan import Plan  # noqa: E402
from dpsim.setting import Setting  # noqa: E402
from dpsim.study.runners.script import ScriptSetting  # noqa: E402
from dpsim.study.runners.script_processes import Processes  # noqa: E402
from dpsim.torch.script.probe import process_group  # noqa: E402
from dpsim.torch.script.probe.around import cap_in_mib  # noqa: E402
from dpsim.torch.script.probe.endings import EnoughSteps, Refused  # noqa: E402
from dpsim.torch.script.probe.in_turns import timed  # noqa: E402
from dpsim.torch.script.probe.in_turns.visit import Turn, Visit  # noqa: E402
from dpsim.torch.script.reductions import MpiReduction  # noqa: E402

pytestmark = pytest.mark.torch

BATCH = (torch.zeros(8, 2),)


class Model:
    """What the timer needs of a DDP model."""

    training = True
    require_backward_grad_sync = True
    device_type = "cpu"
    modules_buffers: tuple[Any, ...] = ()

    def modules(self) -> tuple[Any, ...]:
        return (self,)

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


def forward(timer: timed.StepTimer, model: Any, *arguments: Any, **keywords: Any) -> None:
    """Let a timer see a forward of ``model``, which does nothing."""
    timer.forward(lambda *_, **__: None, model, *arguments, **keywords)


def backward(timer: timed.StepTimer) -> None:
    """Let a timer see a backward that does nothing."""
    timer.backward(lambda: None)


def turns(*steps: int) -> tuple[timed.TakeTurn, list[Visit]]:
    visits: list[Visit] = []
    left = iter((*steps, 0))

    def take_turn(visit: Visit) -> Turn:
        visits.append(visit)
        return Turn(next(left))

    return take_turn, visits


def test_a_turn_has_a_moment_for_each_step_and_one_for_its_end() -> None:
    take_turn, visits = turns(3, 2)
    timer, model = timed.StepTimer(take_turn), Model()
    with pytest.raises(EnoughSteps):
        for _ in range(10):
            forward(timer, model, *BATCH)
            backward(timer)
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
                forward(timer, model, *BATCH)
                backward(timer)
            with torch.no_grad():
                forward(timer, model, *BATCH)
            model.training = False
            forward(timer, model, *BATCH)
            model.training = True
    assert [len(visit.moments_s) for visit in visits] == [1, 3]


def test_a_step_that_reduces_in_each_micro_batch_has_the_communication_of_all() -> None:
    take_turn, visits = turns(2)
    timer, model = timed.StepTimer(take_turn), Model()
    with pytest.raises(EnoughSteps):
        for number in range(12):
            forward(timer, model, *BATCH)
            backward(timer)
            if number % 3 == 0:
                timer.before_update("optimizer")
                timer.after_update("optimizer")
    assert [len(visit.moments_s) for visit in visits] == [1, 3]
    assert visits[1].logged_s["backward"] == pytest.approx([3e-3, 3 * 3e-3])


@pytest.mark.parametrize("inner_trains", [True, False], ids=["the wrapper alone", "the whole model"])
def test_training_in_evaluation_mode_is_timed_once_a_backward_shows_it(inner_trains: bool) -> None:
    take_turn, visits = turns(2)
    timer, model = timed.StepTimer(take_turn), Model()
    model.training = False
    inner = SimpleNamespace(training=inner_trains)
    model.modules = lambda: (model, inner)  # type: ignore[method-assign, assignment]
    forward_passes = 0
    with pytest.raises(EnoughSteps):
        for _ in range(9):
            forward(timer, model, *BATCH)
            forward_passes += 1
            backward(timer)
    assert [len(visit.moments_s) for visit in visits] == [1, 3]
    assert forward_passes == (2 if inner_trains else 3), "that the first one trains is seen by its backward"


def test_a_step_has_the_samples_of_its_smallest_forward() -> None:
    take_turn, visits = turns(3)
    timer, model = timed.StepTimer(take_turn), Model()
    with pytest.raises(EnoughSteps):
        for samples in (8, 8, 8, 3, 8, 8, 8, 8):
            model.require_backward_grad_sync = not model.require_backward_grad_sync  # every second one synchronises
            forward(timer, model, x={"x": torch.zeros(samples, 2), "scale": torch.tensor(1.0)})
            backward(timer)
    assert visits[1].local_batches == [8, 3, 8]


def visited(*local_batches: int) -> timed.Visit:
    """A turn whose steps took 1, 2, 3 ... seconds."""
    moments_s = [number * (number + 1) / 2 for number in range(len(local_batches) + 1)]
    logged_s = {name: [0.0] * len(local_batches) for name in timed.LOGGED.values()}
    ready_s = [[float(number)] for number in range(1, len(local_batches) + 1)]
    return timed.Visit(
        moments_s=moments_s,
        logged_s=logged_s,
        waited_s=[0.0] * len(local_batches),
        ready_s=ready_s,
        local_batches=[*local_batches],
        bucket_bytes=(40,),
    )


@pytest.mark.parametrize(
    ("in_a_hook_s", "logged_s", "expected_s"), [((0.25, 0.5), (2.0, 1.0), 0.25), ((0.0, 0.0), (2.0, 0.5), 1.5)]
)
def test_communication_is_exposed_for_the_rank_that_waits_least(
    in_a_hook_s: tuple[float, float], logged_s: tuple[float, float], expected_s: float
) -> None:
    """Inside a hook where it waits there; by DDP's own times elsewhere."""
    plan = Plan(devices=2, global_batch=16, fusion_rule="ddp", algorithm="mpi", overlap="thread")
    measured = ScriptSetting(
        Setting(model="script", plan=plan, network="node", runtime="torch-ddp-mpi"), Processes(), None
    )
    visits = [visited(*[8] * 5) for _ in in_a_hook_s]
    for visit, waited_s in zip(visits, in_a_hook_s, strict=True):
        visit.waited_s = [waited_s] * 5
        visit.logged_s["communication"], visit.logged_s["overlap"] = [logged_s[0]] * 5, [logged_s[1]] * 5
    measured._add(visits, number=0)
    assert measured.point().exposed_communication_s == (expected_s,) * 3


def test_short_batches_at_the_end_of_an_epoch_do_not_count() -> None:
    plan = Plan(devices=2, global_batch=16, fusion_rule="ddp", algorithm="mpi", overlap="thread")
    setting = Setting(model="script", plan=plan, network="node", runtime="torch-ddp-mpi")
    measured = ScriptSetting(setting, Processes(), None)
    measured._add([visited(8, 8, 8, 3, 8)] * 2, number=0)
    assert measured.samples.step_s == [3.0, 5.0] and measured.ready_s == [[3.0]] * 2 + [[5.0]] * 2
    with pytest.raises(ConfigError, match="trains on 3 samples at once, and was profiled with 8"):
        ScriptSetting(setting, Processes(), None)._add([visited(*[3] * 5)] * 2, number=0)


def test_a_second_model_is_refused() -> None:
    timer = timed.StepTimer(turns(5)[0])
    forward(timer, Model(), *BATCH)
    with pytest.raises(Refused, match="trains two models"):
        forward(timer, Model(), *BATCH)


@pytest.mark.parametrize(("size_bytes", "expected"), [(2.0**20, 1.0), (0.0, 2.0**-20), (math.inf, 2.0**30)])
def test_the_cap_in_mib(size_bytes: float, expected: float) -> None:
    assert cap_in_mib(size_bytes) == expected


def test_sparse_gradients_are_refused_where_a_hook_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook reduces flat arrays of DDP's buckets; a sparse gradient has none."""
    model = torch.nn.parallel.DistributedDataParallel
    for name in ("__init__", "register_comm_hook"):
        monkeypatch.setattr(model, name, getattr(model, name))
    process_group.register()
    distributed.init_process_group(process_group.BACKEND, store=distributed.HashStore(), rank=0, world_size=2)
    try:
        timed.StepTimer(turns(5)[0], Mock(spec=MpiReduction)).listen_to_construction()
        model(torch.nn.Embedding(4, 2))
        with pytest.raises(Refused, match="sparse gradients") as refused:
            model(torch.nn.Embedding(4, 2, sparse=True))
    finally:
        distributed.destroy_process_group()
    assert "--algorithm gloo" in refused.value.error.remedy
