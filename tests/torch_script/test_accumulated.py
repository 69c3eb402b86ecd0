"""A script that updates after every backward accumulates under DDP as one that does so by hand, or is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

from dpsim.errors import ConfigError  # noqa: E402
from dpsim.torch.script.probe.accumulated import Accumulation  # noqa: E402
from dpsim.torch.script.probe.endings import Refused  # noqa: E402
from dpsim.torch.script.profile_script import profile_script  # noqa: E402
from dpsim.torch.script.request import ScriptRequest  # noqa: E402

pytestmark = pytest.mark.torch

RANKS = 2
SCRIPT = Path(__file__).parent / "scripts" / "accumulating.py"
PREAMBLE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(4, 4), **{options})
optimizer = torch.optim.{optimizer}(ddp.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for number in range(1000):
"""


class Model(torch.nn.Linear):
    """What ``Accumulation`` needs of a DDP model."""

    static_graph = False
    require_backward_grad_sync = True

    @property
    def module(self) -> Model:
        return self


def trained(state: Accumulation, model: Model) -> bool:
    """Let a model go forward and back under ``Accumulation``; return whether DDP was to synchronise."""
    loss = state.forward(lambda model, batch: model(batch), model, torch.ones(3, 2)).sum()
    state.backward(torch.autograd.backward, loss)
    return bool(model.require_backward_grad_sync)


@pytest.mark.parametrize(("micro_batches", "wrapper"), [(2, "ddp"), (3, "ddp"), (2, "fsdp")])
def test_accumulated_parameters_are_those_of_a_script_that_accumulates_by_hand(
    micro_batches: int, wrapper: str, tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path / "store", str(rank), str(RANKS), str(micro_batches), wrapper],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    assert [process.communicate()[0].strip() for process in ranks] == ["equal"] * RANKS


def test_the_last_micro_batch_synchronises_and_updates_with_the_mean_of_the_gradients() -> None:
    state, model = Accumulation(2), Model(2, 1)
    assert not trained(state, model) and state.within_step
    half = model.weight.grad.clone()
    assert trained(state, model) and not state.within_step
    assert half.tolist() == [[1.5, 1.5]] and model.weight.grad.tolist() == [[3.0, 3.0]]
    assert not trained(state, model) and state.within_step, "the next step begins"


def test_evaluation_is_no_micro_batch() -> None:
    state, model = Accumulation(2), Model(2, 1)
    trained(state, model)
    with torch.no_grad():
        state.before_forward(model, ())
    assert state.within_step and trained(state, model)


def test_gradients_that_the_script_has_cleared_by_itself_are_refused() -> None:
    state, model = Accumulation(2), Model(2, 1)
    trained(state, model)
    model.weight.grad = None
    model.bias.grad.zero_()
    with pytest.raises(Refused, match="clears its gradients by itself"):
        trained(state, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "optimizer", "options", "given"),
    [
        (
            "    ddp(torch.ones(2, 4)).sum().backward()\n    if number % 2: optimizer.step(); optimizer.zero_grad()",
            "SGD",
            {},
            "has 2 backward passes before an update",
        ),
        (
            "    def closure():\n        loss = ddp(torch.ones(2, 4)).sum(); loss.backward(); return loss\n"
            "    optimizer.step(closure)",
            "LBFGS",
            {},
            "gives the optimizer's step a closure",
        ),
        (
            "    scaler.scale(ddp(torch.ones(2, 4)).sum()).backward()\n    scaler.step(optimizer); scaler.update()",
            "SGD",
            {},
            "scales its loss by a GradScaler",
        ),
        ("    ddp(torch.ones(2, 4)).sum().backward(); optimizer.step()", "SGD", {"static_graph": True}, "static_graph"),
    ],
    ids=["accumulates", "closure", "GradScaler", "static_graph"],
)
def test_scripts_that_cannot_accumulate_as_they_are_are_refused_when_they_are_profiled(
    body: str, optimizer: str, options: dict[str, Any], given: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PREAMBLE.format(optimizer=optimizer, options=options) + body)
    with pytest.raises(ConfigError) as refused:
        profile_script(ScriptRequest(script=str(script), devices=2, accumulates=True))
    assert given in refused.value.given and "leave --accumulate out" in refused.value.remedy


@pytest.mark.parametrize(
    ("body", "deferred", "late_flag", "reduces"),
    [
        ("ddp.require_backward_grad_sync = last > 1; ddp(torch.ones(2, 4)).sum().backward()", True, False, (2,)),
        ("ddp(torch.ones(2, 4)).sum().backward()", False, False, (0, 1, 2)),
        ("ddp.require_backward_grad_sync = last != 1; ddp(torch.ones(2, 4)).sum().backward()", False, False, (0, 2)),
        (
            "loss = ddp(torch.ones(2, 4)).sum(); ddp.require_backward_grad_sync = last > 1; loss.backward()",
            False,
            True,
            (0, 1, 2),
        ),
    ],
    ids=["deferred", "each", "some", "late"],
)
def test_a_profile_says_which_micro_batches_reduce_and_whether_ddp_has_seen_its_flag(
    body: str, deferred: bool, late_flag: bool, reduces: tuple[int, ...], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    loop = f"    for last in range(3):\n        {body}\n        ddp.require_backward_grad_sync = True\n"
    script.write_text(
        PREAMBLE.format(optimizer="SGD", options={}) + loop + "    optimizer.step(); optimizer.zero_grad()"
    )
    ddp = profile_script(ScriptRequest(script=str(script), devices=2, steps=6)).ddp
    assert ddp is not None and (ddp.accumulate, ddp.deferred, ddp.late_flag) == (3, deferred, late_flag)
    assert ddp.reducing(3) == reduces


def test_a_script_whose_last_micro_batch_does_not_synchronise_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    loop = "    ddp.require_backward_grad_sync = number % 2 == 0\n    ddp(torch.ones(2, 4)).sum().backward()\n"
    update = "    if number % 2: optimizer.step(); optimizer.zero_grad()"
    script.write_text(PREAMBLE.format(optimizer="SGD", options={}) + loop + update)
    with pytest.raises(ConfigError, match=r"updates after a backward\(\) that does not synchronise"):
        profile_script(ScriptRequest(script=str(script), devices=2, steps=6))
