"""Real training on 1 to 4 ranks against one plain loop: whatever the plan, the same losses and parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plain_training import plain_training

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.nn import build_model
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd

MODEL, DATASET, SEED, STEPS = "mlp:7", "synthetic:3x2x1,classes=3,train=25,test=11", 5, 5
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(learning_rate=0.2, momentum=0.9, weight_decay=0.01),
    "nesterov": Sgd(learning_rate=0.1, momentum=0.8, weight_decay=0.01, nesterov=True),
    "adamw": AdamW(learning_rate=0.01, epsilon=1e-3, weight_decay=0.1),
    "lars": Lars(learning_rate=2.0, weight_decay=0.01, trust_coefficient=0.02),
}
HOROVOD: dict[str, Any] = {"fusion_rule": "horovod", "cycle_s": 1e-6}
RULES: list[dict[str, Any]] = [
    {"fusion_rule": "tarantella", "fusion_threshold_bytes": 0},
    {"fusion_rule": "tarantella", "fusion_threshold_bytes": 65536},
    {"fusion_rule": "tarantella", "fusion_threshold_bytes": "inf"},
    {"fusion_rule": "ddp", "fusion_threshold_bytes": 100},
    {"fusion_rule": "ddp-1.5", "fusion_threshold_bytes": 100},
    {"fusion_rule": "ddp-2.3", "fusion_threshold_bytes": 100},
    {"fusion_rule": "capped", "fusion_threshold_bytes": 100},
    {"fusion_rule": "capped-forward", "fusion_threshold_bytes": 100},
    {"fusion_rule": "per-tensor"},
    {"fusion_rule": "one"},
    {"fusion_rule": "mg-wfbp"},
    HOROVOD,
    {"fusion_rule": "horovod", "cycle_s": 10.0},
    {"fusion_rule": "horovod", "cycle_s": 1e-5, "fusion_threshold_bytes": 90},
    {"fusion_rule": "horovod", "cycle_s": 1e-5, "fusion_threshold_bytes": 0},
]
OVERLAPS = ["off", "inline", "poll", "thread"]
ALGORITHMS = ["mpi", "ring", "recursive-doubling", "halving-doubling", "direct"]
OnRanks = Callable[..., Any]


def case(
    name: str, network: str = "node", optimizer: str = "sgd", changing: bool = False, **plan: Any
) -> dict[str, Any]:
    """Training in which every step has the optimizer's own rate, or (``changing``) each step another one."""
    plan = {"global_batch": 12, "optimizer": codec.to_builtins(OPTIMIZERS[optimizer])} | plan
    rates = [OPTIMIZERS[optimizer].learning_rate / (1 + changing * step) for step in range(STEPS)]
    run = {"optimizer": optimizer, "rates": rates}
    return {"name": name, "model": MODEL, "dataset": DATASET, "seed": SEED, "network": network, "plan": plan} | run


def cases() -> list[dict[str, Any]]:
    """Every rule and algorithm under two overlaps, Horovod's cycles under each; accumulation; awkward batches."""
    chosen = []
    for number, rule in enumerate(RULES):
        for o in OVERLAPS if rule["fusion_rule"] == "horovod" else OVERLAPS[number % 2 :: 2]:
            chosen.append(case(f"{rule} {o}", overlap=o, **rule))
    small = {"fusion_rule": "tarantella", "fusion_threshold_bytes": 0}
    for number, algorithm in enumerate(ALGORITHMS[1:]):
        for overlap in OVERLAPS[number % 2 :: 2]:
            chosen.append(case(f"{algorithm} {overlap}", algorithm=algorithm, overlap=overlap, **small))
    for accumulate, (number, overlap) in itertools.product((2, 3), enumerate(OVERLAPS)):
        batch = 12 + (accumulate + number) % 2
        name = f"{accumulate} micro-batches of {batch} {overlap}"
        chosen.append(case(name, accumulate=accumulate, overlap=overlap, global_batch=batch, **small))
    chosen.append(
        case("horovod with 3 micro-batches", accumulate=3, overlap="poll", fusion_rule="horovod", cycle_s=1e-6)
    )
    for batch in (5, 7, 8, 25, 40):
        chosen.append(case(f"batch {batch}", overlap="poll", global_batch=batch))
    for overlap, rule in itertools.product(OVERLAPS, (RULES[0], HOROVOD)):
        name = f"paced {rule['fusion_rule']} {overlap}"
        chosen.append(case(name, network="paced:50us,1gbit", algorithm="ring", overlap=overlap, **rule))
    for optimizer, overlap in itertools.product(OPTIMIZERS, ("off", "thread")):
        chosen.append(case(f"{optimizer} {overlap}", optimizer=optimizer, changing=True, overlap=overlap, **small))
    return chosen


@pytest.fixture(scope="module")
def plain() -> Callable[[dict[str, Any]], tuple[dict[str, Any], list[float]]]:
    """The plain loop's parameters and losses of a case, each computed once."""
    actual: dict[Any, tuple[dict[str, Any], list[float]]] = {}
    dataset = load_dataset(DATASET)
    initial = build_model(MODEL, dataset.input_shape, dataset.classes).initial_parameters(SEED)

    def at(one: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
        global_batch, optimizer, rates = one["plan"]["global_batch"], one["optimizer"], one["rates"]
        key = (global_batch, optimizer, *rates)
        if key not in actual:
            actual[key] = plain_training(initial, dataset, global_batch, OPTIMIZERS[optimizer], rates, SEED)
        return actual[key]

    return at


@pytest.mark.parametrize("devices", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_any_plan_on_any_number_of_ranks_trains_like_one_plain_loop(
    devices: int, on_ranks: OnRanks, plain: Callable[[dict[str, Any]], Any]
) -> None:
    every = cases() if devices < 3 else cases()[devices - 3 :: 2]  # 3 and 4 ranks take one half each
    if devices > 1:
        nodes = {2: "2x1", 3: "1x3", 4: "2x2"}[devices]
        every += [case(f"{nodes} {o}", algorithm="hierarchical", overlap=o, layout=nodes) for o in OVERLAPS]
        every.append(case("paced", "paced:50us,1gbit", algorithm="hierarchical", overlap="thread", layout=nodes))
    actual = on_ranks("ranks_runtime:train", {"cases": every, "steps": STEPS}, devices=devices)
    for one, run in zip(every, actual, strict=True):
        parameters, losses = plain(one)
        np.testing.assert_allclose(run["losses"], losses, rtol=1e-5, err_msg=one["name"])
        assert run["parameters"].keys() == parameters.keys()
        for name, value in run["parameters"].items():
            np.testing.assert_allclose(
                value, parameters[name].ravel(), rtol=1e-4, atol=1e-5, err_msg=f"{one['name']}: {name}"
            )
        assert run["same_bits"], f"{one['name']}: ranks differ"
        assert run["padding_is_zero"], f"{one['name']}: padding was written to"
        assert run["shared"], f"{one['name']}: gradients are copied"
        assert run["dtypes"] == ["float32"]
    assert any(run["rank_without_samples"] for run in actual) == (devices > 1)  # 25 samples = 12 + 12 + 1


def sample_cases() -> list[dict[str, Any]]:
    """Models in which nothing depends on the other samples of a rank: norms of a sample, dropout by its name."""
    small = ("mlp:7,norm=layer,dropout=0.4", "cnn:4,8,norm=instance,dropout=0.2")
    chosen = []
    for model, accumulate in (*itertools.product(small, (1, 2)), ("resnet20:norm=group,dropout=0.1", 1)):
        one = case(f"{model} in {accumulate}", accumulate=accumulate, overlap="poll")
        gentle = {"model": model, "dataset": "synthetic:4x5x1,classes=3,train=25,test=3", "rates": [0.01] * STEPS}
        chosen.append(one | gentle)
    return chosen


@pytest.mark.slow
def test_norms_of_a_sample_and_dropout_do_not_depend_on_the_number_of_ranks(on_ranks: OnRanks) -> None:
    every = sample_cases()
    alone: list[dict[str, Any]] = []
    for devices in (1, 2, 3, 4):
        actual = on_ranks("ranks_runtime:train", {"cases": every, "steps": 3}, devices=devices)
        alone = alone or actual
        for number, (one, run) in enumerate(zip(every, actual, strict=True)):
            expected = alone[number - number % 2]  # of the same model, in one micro-batch
            what = f"{one['name']} on {devices}"
            np.testing.assert_allclose(run["losses"], expected["losses"], rtol=2e-5, err_msg=what)
            for name, value in run["parameters"].items():
                np.testing.assert_allclose(
                    value, expected["parameters"][name], rtol=1e-3, atol=1e-4, err_msg=f"{what}: {name}"
                )
            assert run["same_bits"] and run["dtypes"] == ["float32"]


def test_a_digest_is_of_parameters_optimizer_state_and_running_statistics(on_ranks: OnRanks) -> None:
    plan = {"global_batch": 8, "optimizer": codec.to_builtins(OPTIMIZERS["adamw"])}
    dataset = "synthetic:6x5x2,classes=3,train=24,test=6"
    digests = on_ranks(
        "ranks_runtime:digests_of_changed_state", {"model": "cnn:3", "dataset": dataset, "plan": plan}, devices=1
    )
    assert {"parameters", "first_moment", "second_moment"} < digests.keys() and len(digests) > 4
    assert len(set(digests.values())) == len(digests)


def test_rank_0s_parameters_and_running_statistics_are_everyones(together: Callable[..., Any]) -> None:
    argument = {"model": "cnn:3,4", "dataset": "synthetic:6x5x2,classes=3,train=24,test=6"}
    for actual in together(*(("ranks_runtime:perturbed_start", argument, devices) for devices in (2, 3))):
        assert actual == {"parameters": True, "state": True, "has_state": True, "digest": True}


def test_evaluation_counts_every_test_sample_once_at_any_device_count(together: Callable[..., Any]) -> None:
    sizes = (1, 3, 11)
    every = [case("evaluate") | {"dataset": DATASET.replace("test=11", f"test={size}")} for size in sizes]
    alone, *others = together(*(("ranks_runtime:evaluated", {"cases": every}, n) for n in (1, 2, 3, 4)))
    for devices, actual in enumerate(others, start=2):
        for size, (expected,), sums in zip(sizes, alone, actual, strict=True):
            assert len(sums) == devices
            for each in sums:
                assert (each["samples"], each["correct"]) == (size, expected["correct"])
                assert each["loss"] == pytest.approx(expected["loss"], rel=1e-6)
