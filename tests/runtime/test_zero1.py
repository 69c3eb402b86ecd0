"""Strategy zero1: the bits of data parallelism, with optimizer state for a shard, on 1, 2, 3, 4 and 8 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from dpsim import codec
from dpsim.kernels.allreduce.shards import LINE
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd

OnRanks = Callable[..., Any]
STEPS = 3
DATASET = "synthetic:6x5x1,classes=3,train=40,test=8"
PACED = "paced:50us,1gbit"
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(weight_decay=0.01),
    "nesterov": Sgd(nesterov=True),
    "adamw": AdamW(learning_rate=0.01),
    "lars": Lars(learning_rate=10.0),
}


def case(name: str, **plan: Any) -> dict[str, Any]:
    """A training in a fixed order of addition, with buckets of many and of few elements."""
    optimizer = codec.to_builtins(plan.pop("optimizer", OPTIMIZERS["sgd"]))
    network = plan.pop("network", "node")
    fixed = {"global_batch": 16, "leaves": 8, "batch_norm": "leaf", "fusion_threshold_bytes": 600.0}
    return {
        "name": name,
        "model": "mlp:16,9",
        "dataset": DATASET,
        "network": network,
        "plan": fixed | {"optimizer": optimizer} | plan,
    }


def cases(devices: int) -> list[dict[str, Any]]:
    """Every two of optimizer, overlap and way to communicate on 2 ranks; some of each on others."""
    ways = [("node", "auto"), (PACED, "ring"), (PACED, "direct")]
    chosen = []
    for (first, (name, o)), (second, overlap) in itertools.product(
        enumerate(OPTIMIZERS.items()), enumerate(("off", "poll", "thread", "inline"))
    ):
        network, algorithm = ways[(first + second) % 3]
        plan = {"network": network, "algorithm": algorithm, "overlap": overlap}
        chosen.append(case(f"{name} {network} {algorithm} {overlap}", optimizer=o, **plan))
    several = [
        case("a bucket a tensor", fusion_threshold_bytes=0.0, overlap="poll"),
        case("one bucket", fusion_threshold_bytes=float("inf"), overlap="thread"),
        case("no leaves, in shared memory", leaves=0, batch_norm="local"),
        case("no leaves, directly", leaves=0, batch_norm="local", network=PACED, algorithm="direct"),
    ]
    for threshold in (0.0, 600.0, float("inf")):
        several.append(case(f"lars {threshold:g}", optimizer=OPTIMIZERS["lars"], fusion_threshold_bytes=threshold))
    if devices <= 2:
        several.append(case("no leaves, a ring of two", leaves=0, batch_norm="local", network=PACED, algorithm="ring"))
    if devices <= 4:
        several.append(case("two micro-batches", accumulate=2))
    return (chosen if devices == 2 else chosen[:: 3 if devices <= 4 else 5]) + several


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 8))])
def test_the_bits_are_those_of_data_parallelism(devices: int, on_ranks: OnRanks) -> None:
    every = cases(devices)
    actual = on_ranks("ranks_zero1:digests", {"cases": every, "steps": STEPS}, devices=devices)
    for one, outcome in zip(every, actual, strict=True):
        plain, sharded = outcome["digests"]
        assert plain == sharded != "the ranks disagree", one["name"]
    fixed = {one["name"]: outcome["digests"][1] for one, outcome in zip(every, actual, strict=True)}
    for optimizer in ("sgd", "lars"):
        same = {digest for name, digest in fixed.items() if name.startswith(optimizer)}
        assert len(same) == 1, "reproducible training depends on how it communicates"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lars_ends_in_the_same_bits_on_any_number_of_devices(on_ranks: OnRanks) -> None:
    lars = [case("lars", optimizer=OPTIMIZERS["lars"]), case("a network", optimizer=OPTIMIZERS["lars"], overlap="poll")]
    lars[1] |= {"model": "cnn:5,3"}
    digests = [
        [outcome["digests"] for outcome in on_ranks("ranks_zero1:digests", {"cases": lars, "steps": STEPS}, devices=n)]
        for n in (1, 2, 3, 4, 8)
    ]
    assert all(each == digests[0] for each in digests)


def test_emulated_computation_goes_on_when_the_parameters_are_gathered(together: OnRanks) -> None:
    plan: dict[str, Any] = {"network": PACED, "algorithm": "ring", "leaves": 0, "batch_norm": "local"}
    overlaps = ("off", "poll", "thread")
    several = together(*(("ranks_zero1:emulated", case("emulated", overlap=o, **plan), 2) for o in overlaps))
    for overlap, times in zip(overlaps, several, strict=True):
        for end_s, resumed_s in times:
            assert resumed_s == end_s, overlap


@pytest.mark.parametrize("devices", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_the_message_before_the_update_has_the_size_that_the_schedule_states(devices: int, on_ranks: OnRanks) -> None:
    every = [case(name, optimizer=optimizer, strategy="zero1") for name, optimizer in OPTIMIZERS.items()]
    for stated, actual in on_ranks("ranks_zero1:agreements", every, devices=devices):
        assert stated == actual


def test_a_rank_allocates_optimizer_state_for_its_shard_alone(together: OnRanks) -> None:
    slots, numbers = {"sgd": 1, "adamw": 2}, (2, 3, 4)
    large = {"model": "mlp:64,64"}
    every = [case(name, optimizer=OPTIMIZERS[name], fusion_threshold_bytes=float("inf")) | large for name in slots]
    of_devices = together(*(("ranks_zero1:digests", {"cases": every, "steps": 1}, n) for n in numbers))
    for devices, outcomes in zip(numbers, of_devices, strict=True):
        for (name, count), outcome in zip(slots.items(), outcomes, strict=True):
            whole, shards = outcome["bytes"]
            assert len({*whole}) == 1
            line = 4 * LINE * count
            assert all(abs(own - whole[0] / devices) <= line for own in shards), (name, whole, shards)
            assert sum(shards) <= whole[0] + devices * line


def test_a_nan_on_one_rank_changes_parameters_on_none(on_ranks: OnRanks) -> None:
    ways = [("off", "node"), ("inline", PACED), ("poll", PACED), ("thread", "node")]
    every = [
        case(
            overlap,
            overlap=overlap,
            strategy="zero1",
            network=network,
            algorithm="auto" if network == "node" else "ring",
        )
        for overlap, network in ways
    ]
    for one, outcome in zip(every, on_ranks("ranks_zero1:not_finite", every, devices=3), strict=True):
        assert outcome["unchanged"] == [True] * 3, one["name"]
        assert "the loss is nan in step 3" in outcome["messages"][-1], one["name"]
        assert all("in step 3" in message for message in outcome["messages"]), one["name"]


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_a_checkpoint_depends_on_neither_strategy_nor_devices(devices: int, on_ranks: OnRanks) -> None:
    every = [
        case("node", optimizer=OPTIMIZERS["adamw"]),
        case("paced", network=PACED, algorithm="ring", overlap="poll"),
        case("lars", optimizer=OPTIMIZERS["lars"]),
    ]
    writers = sorted({1, 2, 3, devices} & set(range(1, devices + 1)))
    argument = {"cases": every, "steps": 5, "stop": 2, "writers": writers}
    for one, outcome in zip(every, on_ranks("ranks_zero1:checkpoints", argument, devices=devices), strict=True):
        assert all(outcome["same"]), one["name"]
        assert {*outcome["ends"]} == {outcome["straight"]}, one["name"]
