"""Reproducible training on real ranks: the same digests and losses on 1 to 4, whatever the buckets and the overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpsim import codec
from dpsim.optimizer import AdamW

OnRanks = Callable[..., Any]
DATASET = "synthetic:6x5x2,classes=3,train=45,test=31"
RUNS: list[dict[str, Any]] = [
    {"fusion_threshold_bytes": 0},
    {"fusion_threshold_bytes": "inf", "algorithm": "direct"},
    {"fusion_rule": "capped", "fusion_threshold_bytes": 300, "overlap": "inline"},
    {"fusion_rule": "capped-forward", "fusion_threshold_bytes": 300, "overlap": "poll", "algorithm": "ring"},
    {"fusion_threshold_bytes": 0, "overlap": "thread", "algorithm": "direct"},
    {"fusion_rule": "horovod", "cycle_s": 1e-6, "overlap": "poll"},
]
BY_MESSAGES: tuple[str, ...] = ("mpi", "ring", "recursive-doubling", "halving-doubling", "direct")
SIXTEEN: list[dict[str, Any]] = [
    {"fusion_threshold_bytes": 300, "overlap": "poll"},
    *({"fusion_threshold_bytes": "inf", "algorithm": name} for name in ("one-shot", "two-shot", *BY_MESSAGES)),
]
RUNS_OF = {
    ("cnn:4,6", "leaf", None): RUNS,
    ("cnn:4,6", "global", None): RUNS[-2:],
    ("mlp:9,8,dropout=0.2", "leaf", None): RUNS[:1],
    ("cnn:4,6", "leaf", "float16"): SIXTEEN,
    ("cnn:4,6", "global", "bfloat16"): [*SIXTEEN[:1], RUNS[3], RUNS[5]],
}


def cases() -> list[dict[str, Any]]:
    actual = []
    for (model, mode, wire_dtype), runs in RUNS_OF.items():
        for run in runs:
            plan = {"global_batch": 20, "leaves": 8, "batch_norm": mode, "optimizer": codec.to_builtins(AdamW())} | run
            name, plan = f"{model} {mode} {wire_dtype}", plan | {"wire_dtype": wire_dtype}
            actual.append({"name": name, "model": model, "dataset": DATASET, "seed": 3, "plan": plan})
    return actual


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("devices", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_a_run_comes_to_the_same_bits_on_any_number_of_ranks(
    devices: int, on_ranks: OnRanks, alone: dict[str, Any]
) -> None:
    """45 samples in batches of 20: the third one has 5, which leave some ranks without any."""
    actual = on_ranks("ranks_leaves:results", {"cases": cases(), "steps": 4}, devices=devices)
    for case, result in zip(cases(), actual, strict=True):
        assert alone.setdefault(case["name"], result) == result, case
        assert result["test"]["samples"] == 31
    assert len({result["digest"] for result in alone.values()}) == len(alone) == 5
