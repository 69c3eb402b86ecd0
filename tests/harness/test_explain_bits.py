"""``dpsim reproduce --explain-bits``: what it says before any rank starts, against what ranks then compute."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from dpsim.comm import sum_orders
from dpsim.harness.reproduce.difference import first_difference
from dpsim.harness.reproduce.explain_bits import ExplainedBits
from dpsim.harness.reproduce.measure import measure
from dpsim.launch import jobs
from dpsim.optimizer import AdamW, Lars
from dpsim.progress import no_progress
from dpsim.records.reproduce import Reproduction

Dpsim = Callable[..., tuple[int, str, str]]
ROWS = "synthetic:4x4x1,classes=3,train=37,test=3"
TINY = ("--model", "mlp:9,8", "--dataset", ROWS, "--set", "global_batch=24", "--set", "leaves=0", "--steps", "3")


@pytest.fixture(autouse=True)
def without_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank may start, but in the tests that compare with ranks."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(jobs, "on_ranks", lambda *args, **options: pytest.fail("a rank would start"))


def test_every_run_has_a_letter_and_its_first_difference(dpsim: Dpsim) -> None:
    settings = ("--devices", "1,2,4", "--algorithm", "ring,direct", "--fusion-threshold", "0,inf")
    code, out, _ = dpsim("reproduce", "--explain-bits", *TINY, *settings, "--json")
    shown = json.loads(out)
    assert code == 0 and [point["devices"] for point in shown["points"]] == [1, *[2] * 4, *[4] * 4]
    assert [point["bits"] for point in shown["points"]] == [*"ABBBBCDED"]
    alone, two, *_ = shown["points"]
    assert (alone["reference"], alone["same_bits"], alone["first_step"], alone["first_tensor"]) == (
        "A",
        True,
        None,
        None,
    )
    assert (two["reference"], two["same_bits"], two["first_step"]) == ("A", False, 1)
    assert "a rank computes 12 samples at once here, and 24 there" in two["why"]
    pairs = {pair["bits"] + pair["other"]: pair for pair in shown["summary"]["pairs"]}
    assert len(pairs) == 10
    assert pairs["DC"]["first_tensor"].startswith("optimizer/velocity/dense")
    assert "(0+1)+(2+3) here, and ((0+1)+2)+3 there" in pairs["DC"]["why"]


def test_the_table_says_why(dpsim: Dpsim) -> None:
    code, out, _ = dpsim("reproduce", "--explain-bits", *TINY, "--devices", "1,3", "--algorithm", "ring,direct,mpi")
    shown = " ".join(out.split())
    assert code == 0 and "3 devices, inf, mpi, off" in shown
    assert "the same bits, because every rank computes the same samples, and every sum over ranks is (0+1)+2" in shown
    assert "B and A: differ from step 1 on, first in" in shown


def test_what_is_promised_needs_no_training(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(*args: Any) -> None:
        pytest.fail("nothing is to be trained")

    monkeypatch.setattr("dpsim.harness.reproduce.explain_bits.trajectories", replay)
    code, out, _ = dpsim("reproduce", "--explain-bits", "--devices", "1,2,3", "--algorithm", "ring,auto", "--json")
    points = json.loads(out)["points"]
    assert code == 0 and {point["bits"] for point in points} == {"A"}
    assert points[-1]["why"].startswith("8 leaves are computed one by one")


def test_orders_that_round_alike_are_the_same_bits_by_values() -> None:
    """Of a batch in two micro-batches, and on two ranks."""
    asked = Reproduction(
        model="mlp:9,8",
        dataset=ROWS,
        devices=(1, 2),
        accumulates=(1, 2),
        leaves=0,
        batch_norms=("local",),
        global_batch=24,
        steps=2,
        fusion_thresholds_bytes=(0.0,),
    )
    explained = ExplainedBits(asked, no_progress)
    assert [(plan.devices, plan.accumulate) for plan in explained.plans] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    comparison = explained.compare(2, 1)
    assert [run.letter for run in explained.runs] == ["A", "B", "B", "C"] and comparison.same
    assert comparison.why.startswith(
        "by values: in 2 steps all sums round alike, though a rank adds 1 micro-batch of 12"
    )


def test_a_library_whose_order_nobody_saw_is_not_known(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_orders, "native_order", lambda ranks: None)
    devices = ("--devices", "2,3", "--algorithm", "mpi,direct", "--fusion-threshold", "0")
    code, out, _ = dpsim("reproduce", "--explain-bits", *TINY, *devices, "--json")
    rows = {(point["devices"], point["algorithm"]): point for point in json.loads(out)["points"]}
    assert code == 0 and rows[3, "mpi"]["same_bits"] is None and rows[3, "direct"]["same_bits"] is False
    assert rows[2, "mpi"]["bits"] == rows[2, "direct"]["bits"]


def test_no_record_is_made_or_compared(dpsim: Dpsim) -> None:
    code, _, err = dpsim("reproduce", "--explain-bits", "--output", "folder")
    assert code == 2 and "--explain-bits with --against or --output" in err


LOCAL: dict[str, Any] = {"leaves": 0, "batch_norms": ("local",), "steps": 2}
TABLE: tuple[dict[str, Any], ...] = (
    LOCAL
    | {
        "model": "mlp:9,8",
        "dataset": ROWS,
        "global_batch": 29,
        "devices": (1, 2, 3, 4),
        "algorithms": ("ring", "mpi", "halving-doubling"),
        "fusion_thresholds_bytes": (0.0, 300.0, math.inf),
        "optimizer": AdamW(),
        "steps": 3,
    },
    LOCAL
    | {
        "model": "cnn:4,6",
        "batch_norms": ("local", "global"),
        "devices": (1, 3, 4),
        "algorithms": ("ring", "auto"),
        "strategies": ("data-parallel", "zero1"),
        "fusion_thresholds_bytes": (0.0,),
        "optimizer": Lars(),
    },
    LOCAL
    | {
        "model": "cnn:4,6",
        "devices": (1, 4, "2x2", "1x4"),
        "wire_dtype": "float16",
        "algorithms": ("direct", "two-shot", "hierarchical"),
        "fusion_thresholds_bytes": (0.0, math.inf),
    },
    LOCAL
    | {
        "model": "cnn:4,norm=group,dropout=0.3",
        "devices": (1, 2, 4),
        "accumulates": (1, 2),
        "overlaps": ("poll", "thread"),
        "algorithms": ("ring", "recursive-doubling"),
        "fusion_thresholds_bytes": (math.inf,),
    },
    LOCAL
    | {
        "model": "mlp:16",
        "devices": (2, 4),
        "strategies": ("data-parallel", "zero2", "zero3", "pipeline:stages=2"),
        "algorithms": ("ring", "direct"),
        "fusion_thresholds_bytes": (0.0,),
    },
    {
        "model": "resnet20",
        "devices": (1, 2, 3),
        "algorithms": ("ring",),
        "fusion_thresholds_bytes": (32768.0,),
        "global_batch": 16,
        "steps": 1,
        "wire_dtype": "bfloat16",
    },
)
"""Reproductions of which every pair of plans is trained on ranks, and held against what was said beforehand."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("asked", TABLE, ids=lambda asked: asked["model"])
def test_what_is_said_of_every_pair_is_what_ranks_compute(asked: dict[str, Any]) -> None:
    reproduction = Reproduction(**asked)
    explained = ExplainedBits(reproduction, no_progress)
    record = measure(reproduction, None, no_progress, plans=explained.plans)
    trained = {run.plan: record.trajectories[run.trajectory] for run in record.runs}
    for other, number in itertools.combinations(range(len(explained.plans)), 2):
        plans = explained.plans[other], explained.plans[number]
        difference = first_difference(*(trained[plan] for plan in plans))
        said = explained.compare(number, other)
        assert said.same == (difference is None), plans
        assert (explained.runs[number].letter == explained.runs[other].letter) == (difference is None), plans
        if difference is not None:
            assert (said.step, said.tensor) == (difference.step, difference.tensor), plans
