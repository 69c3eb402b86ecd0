"""zero1:gather=broadcast: the bits of data parallelism, with optimizer state for whole tensors of a rank's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpsim import codec
from dpsim.optimizer import AdamW, Lars, Sgd

OnRanks = Callable[..., Any]
PACED = "paced:50us,1gbit"
OPTIMIZERS = {"sgd": Sgd(weight_decay=0.01), "adamw": AdamW(learning_rate=0.01), "lars": Lars(learning_rate=10.0)}
STRATEGY = "zero1:gather=broadcast"


def case(optimizer: str, network: str, overlap: str, threshold: float, **plan: Any) -> dict[str, Any]:
    """A training of a few tensors in buckets of many or of few of them."""
    fixed = {"global_batch": 16, "leaves": 8, "batch_norm": "leaf", "fusion_threshold_bytes": threshold}
    algorithm = "auto" if network == "node" else "ring"
    return {
        "name": f"{optimizer} {network} {overlap} {threshold:g}",
        "model": "mlp:16,9",
        "dataset": "synthetic:6x5x1,classes=3,train=40,test=8",
        "network": network,
        "plan": fixed
        | {"optimizer": codec.to_builtins(OPTIMIZERS[optimizer]), "algorithm": algorithm, "overlap": overlap}
        | plan,
    }


CASES = [
    case("sgd", "node", "off", 600.0),
    case("sgd", PACED, "poll", 0.0),
    case("adamw", PACED, "thread", 600.0),
    case("adamw", "node", "poll", float("inf")),
    case("lars", "node", "inline", 600.0),
    case("lars", PACED, "off", 600.0),
    case("sgd", "node", "off", 600.0, leaves=0, batch_norm="local"),
    case("sgd", PACED, "poll", 600.0, leaves=0, batch_norm="local"),
]


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_the_bits_are_those_of_data_parallelism(devices: int, on_ranks: OnRanks) -> None:
    argument = {"cases": CASES, "steps": 3, "strategies": ("data-parallel", STRATEGY)}
    for one, outcome in zip(CASES, on_ranks("ranks_zero1:digests", argument, devices=devices), strict=True):
        plain, owned = outcome["digests"]
        assert plain == owned != "the ranks disagree", one["name"]
        whole, own = outcome["bytes"]
        assert devices == 1 or max(own) < whole[0], one["name"]


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_depends_on_neither_strategy_nor_devices(devices: int, on_ranks: OnRanks) -> None:
    argument = {
        "cases": CASES[2:3],
        "steps": 5,
        "stop": 2,
        "writers": [1, devices],
        "strategies": ("data-parallel", STRATEGY),
    }
    (outcome,) = on_ranks("ranks_zero1:checkpoints", argument, devices=devices)
    assert all(outcome["same"])
    assert {*outcome["ends"]} == {outcome["straight"]}
