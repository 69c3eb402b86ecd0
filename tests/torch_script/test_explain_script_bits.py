"""``dpsim reproduce --explain-bits --torch-script``: which bucket caps of DDP give the same bits over gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim.ddp_settings import DdpSettings
from dpsim.harness.reproduce import explain_script_bits
from dpsim.harness.reproduce.explain_script_bits import ExplainedScriptBits
from dpsim.harness.reproduce.script import ScriptComparison
from dpsim.launch.job_python import OWN
from dpsim.progress import no_progress
from dpsim.workload import Layer, Tensor, Workload

Dpsim = Callable[..., tuple[int, str, str]]
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
MIB = 2.0**20
DDP = DdpSettings(torch="2.13.0", devices=4)


def recorded(ddp: DdpSettings | None) -> Workload:
    """A script's workload: three matrices of 1 MiB."""
    layers = tuple(
        Layer(
            name=name, kind="dense", forward_s=(0.0,), backward_s=(0.0,), tensors=(Tensor(name=name, shape=(512, 512)),)
        )
        for name in ("first", "second", "third")
    )
    return Workload(name="script", local_batches=(8,), layers=layers, ddp=ddp)


def explained(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], *caps: float, ddp: DdpSettings | None = DDP
) -> ExplainedScriptBits:
    monkeypatch.setattr(explain_script_bits, "profile_script", lambda request, by: recorded(ddp))
    monkeypatch.setattr(ScriptComparison, "by", OWN)  # PyTorch need not be there
    return ExplainedScriptBits(ScriptComparison(script="train.py", devices=devices, caps_bytes=caps), no_progress)


def test_caps_that_make_the_same_buckets_have_one_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = explained(monkeypatch, (4,), MIB, MIB / 2, 3 * MIB, 64 * MIB)
    assert [run.letter for run in shown.runs] == [*"AABB"]
    comparison = shown.compare(2, 0)
    assert (comparison.same, comparison.step) == (False, 2) and comparison.tensor.startswith("gradients/")
    assert "sum over ranks" in comparison.why and "here, and" in comparison.why


def test_two_ranks_have_one_order_and_one_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = explained(monkeypatch, (2, 1), MIB, 64 * MIB)
    assert [run.letter for run in shown.runs] == [*"AABB"]
    assert shown.compare(1, 0).why.endswith("0+1 is the one order of a sum of two")
    assert shown.compare(2, 0).same is None and "another number of devices" in shown.compare(2, 0).why


@pytest.mark.parametrize(
    "changes",
    [
        {"find_unused_parameters": True},
        {"communication_hook": "powerSGD_hook"},
        {"deferred": False, "accumulate": 2},
        {"sparse_gradient_bytes": 4},
        {"whole_buckets": True},
        {"bucket_caps_bytes": (1, 2)},
    ],
)
def test_what_is_not_followed_is_not_known(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    shown = explained(monkeypatch, (4,), MIB, 64 * MIB, ddp=msgspec.structs.replace(DDP, **changes))
    comparison = shown.compare(1, 0)
    assert comparison.same is None and comparison.verdict == "not known"
    assert comparison.why.endswith("whose sums dpsim does not follow")


def test_a_script_without_ddp_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained(monkeypatch, (4,), MIB, 64 * MIB, ddp=None).compare(1, 0).same is None


@pytest.mark.torch
def test_a_script_runs_as_one_rank_alone(dpsim: Dpsim) -> None:
    flags = ("--devices", "4", "--bucket-cap", "1MiB,25MiB", "--json")
    arguments = ("--", "--layers", "2", "--width", "128", "--batch-size", "8")
    code, out, _ = dpsim("reproduce", "--explain-bits", "--torch-script", EXAMPLE, *flags, *arguments)
    points = json.loads(out)["points"]
    assert code == 0 and [(point["devices"], point["bits"]) for point in points] == [(4, "A"), (4, "A")]
