"""Every strategy ends in the bits of data parallelism, on 1 to 8 ranks, wherever layers and leaves suffice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpsim import codec
from dpsim.constraints import possible
from dpsim.lowering.stages import possible_cuts
from dpsim.nn import build_model
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd
from dpsim.runtime.describe import describe
from dpsim.strategy import parse_strategy

OnRanks = Callable[..., Any]
STEPS = 2
PACED = "paced:50us,1gbit"
FLAT, PICTURES = "synthetic:6x5x1,classes=3,train=48,test=10", "synthetic:8x8x3,classes=3,train=48,test=10"
MODELS = {
    "mlp": ("mlp:16,9,12,11,10,9,8", FLAT),
    "dropout": ("mlp:16,9,12,dropout=0.3", FLAT),
    "cnn": ("cnn:4,6,dropout=0.2", PICTURES),
    "resnet20": ("resnet20", PICTURES),
    "blocks": ("mlp:64,48,64,64,64,dropout=0.3,column_blocks=3", FLAT),
    "blocks of channels": ("cnn:32,48,32,32,dropout=0.2,column_blocks=2", PICTURES),
    "blocks of resnet20": ("resnet20:column_blocks=2", PICTURES),
}
BLOCKS = {"blocks": 3, "blocks of channels": 2, "blocks of resnet20": 2}
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(weight_decay=0.01),
    "adamw": AdamW(learning_rate=0.01),
    "lars": Lars(learning_rate=10.0),
}
SHARDED = [
    {"strategy": strategy, "overlap": overlap, **more}
    for strategy, more in (
        ("zero2", {}),
        ("zero2:buckets=1", {}),
        ("zero2", {"accumulate": 2}),
        ("zero3", {}),
        ("zero3:prefetch=0", {}),
        ("zero3:prefetch=2,reshard=no", {}),
        ("zero3", {"accumulate": 2}),
        ("zero3:replicas=2", {}),
        ("zero3:prefetch=2,reshard=no,replicas=2", {}),
        ("zero3:replicas=2", {"accumulate": 2}),
        ("zero3:replicas=4", {}),
    )
    for overlap in ("off", "thread")
]
STAGED = [
    {"accumulate": 4},
    {"accumulate": 4, "strategy": "order=gpipe"},
    {"accumulate": 2, "strategy": "recompute=yes", "overlap": "poll"},
    {"accumulate": 2, "strategy": "shard=yes", "overlap": "thread"},
    {"accumulate": 1, "strategy": "balance=memory"},
]


PARTED = [
    {"strategy": "tensor:parts={parts}"},
    {"strategy": "tensor:parts={parts},shard=yes", "accumulate": 2, "overlap": "thread"},
    {"strategy": "pipeline:parts={parts}", "accumulate": 4},
    {"strategy": "pipeline:parts={parts},shard=yes,recompute=yes,order=gpipe", "accumulate": 2, "overlap": "poll"},
]


def case(model: str, optimizer: str, **plan: Any) -> dict[str, Any]:
    """A training in a fixed order of addition, with buckets of many and of few elements."""
    name, dataset = MODELS[model]
    fixed = {"global_batch": 16, "leaves": 8, "batch_norm": "leaf", "fusion_threshold_bytes": 600.0}
    network = plan.pop("network", "node")
    algorithm = {"algorithm": "direct"} if network != "node" else {}
    return {
        "name": f"{model} {optimizer} {network} {plan}",
        "model": name,
        "dataset": dataset,
        "network": network,
        "plan": fixed | algorithm | {"optimizer": codec.to_builtins(OPTIMIZERS[optimizer])} | plan,
    }


def parted(devices: int, blocks: int) -> list[dict[str, Any]]:
    """Plans in which devices own column blocks, with as few and as many parts as there can be."""
    every = []
    for parts in range(2, min(devices, blocks) + 1):
        for plan in PARTED:
            strategy = str(plan["strategy"]).format(parts=parts)
            classes = parse_strategy(strategy).classes
            if devices % classes == 0 and 8 % (devices // classes * int(plan.get("accumulate", 1))) == 0:
                every.append(plan | {"strategy": strategy})
    return every


def plans(devices: int) -> list[dict[str, Any]]:
    """Plans of every strategy that so many devices can run with 8 leaves."""
    every = [
        dict(plan)
        for plan in SHARDED
        if (8 % (devices * plan.get("accumulate", 1)) == 0 or "accumulate" not in plan)
        and possible("devices", strategy=plan["strategy"], devices=devices)
    ]
    for stages in range(2, devices + 1):
        for plan in STAGED if devices % stages == 0 else ():
            settings = ",".join(filter(None, (f"stages={stages}", plan.get("strategy"))))
            if 8 % (devices // stages * plan["accumulate"]) == 0:
                every.append(plan | {"strategy": f"pipeline:{settings}"})
    return every


def trainings(devices: int) -> Iterator[list[dict[str, Any]]]:
    """Yield trainings that end in the same bits, data parallelism first: of each model by one optimizer or by all."""
    some = {2: [*MODELS][:-1], 4: ["dropout", "blocks", "blocks of channels"]}
    models = some.get(devices, ["mlp", "blocks"])
    for number, model in enumerate(models):
        optimizers = [*OPTIMIZERS][number % 3 :][:1] if devices > 2 else [*OPTIMIZERS][: 3 if model == "mlp" else 1]
        for turn, optimizer in enumerate(optimizers):
            chosen = plans(devices)
            if model in BLOCKS:
                chosen = parted(devices, BLOCKS[model]) + [p for p in chosen if "pipeline" not in p["strategy"]][::4]
            elif devices == 2:
                sent = [plan | {"network": PACED} for plan in chosen[turn::3]]
                chosen = chosen + sent if model == "mlp" else chosen[number % 2 :: 2]
            yield [case(model, optimizer), *(case(model, optimizer, **plan) for plan in chosen)]


@pytest.mark.parametrize("devices", [2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))])
@pytest.mark.timeout(300)
def test_the_bits_are_those_of_data_parallelism(devices: int, on_ranks: OnRanks) -> None:
    groups = [*trainings(devices)]
    every = [one for group in groups for one in group]
    outcomes = iter(on_ranks("ranks_strategies:digests", {"cases": every, "steps": STEPS}, devices=devices))
    for group in groups:
        plain, *others = (next(outcomes) for _ in group)
        assert len(plain["digest"]) == 64 and plain["evaluated"][2] == 10
        for one, outcome in zip(group[1:], others, strict=True):
            for what in ("digest", "losses", "evaluated"):
                assert outcome[what] == plain[what], (one["name"], what)


def test_replicas_in_nodes_send_shards_between_them_and_end_in_the_same_bits(on_ranks: OnRanks) -> None:
    more = ({"layout": "2x2", "network": PACED, "algorithm": name} for name in ("direct", "ring"))
    every = [case("mlp", "sgd"), *(case("mlp", "sgd", strategy="zero3:replicas=2", **fields) for fields in more)]
    every += [case("mlp", "sgd", strategy=text, leaves=0, batch_norm="local") for text in ("zero1", "zero3:replicas=2")]
    fixed, direct, ring, whole, replicated = on_ranks(
        "ranks_strategies:digests", {"cases": every, "steps": 4}, devices=4
    )
    assert fixed["digest"] == direct["digest"] == ring["digest"]
    assert len(replicated["digest"]) == 64 and replicated["losses"] == pytest.approx(whole["losses"], rel=1e-5)


@pytest.mark.parametrize("token", ["mlp:16,9,12", "cnn:4,6,dropout=0.2", "resnet20"])
def test_a_network_computes_every_stage_that_a_pipeline_may_cut(token: str) -> None:
    shape = (1, 8, 1) if token.startswith("mlp") else (8, 8, 3)
    layers = len(build_model(token, shape, 3).layers)
    cuts = possible_cuts(describe(build_model(token, shape, 3), "model"))
    assert cuts
    for cut in cuts:
        for first, stop in ((0, cut), (cut, layers)):
            build_model(token, shape, 3).take_layers(range(first, stop), 2)


def test_a_device_has_memory_for_its_part_alone(on_ranks: OnRanks) -> None:
    large = {"model": "mlp:64x8,column_blocks=4", "fusion_threshold_bytes": 0.0}
    texts = ("data-parallel", "zero1", "zero2", "zero3", "zero3:replicas=2", "pipeline:stages=4", "tensor:parts=4")
    every = [case("mlp", "adamw", strategy=text) for text in texts]
    for each in every:
        each |= {"model": large["model"]}
    outcomes = on_ranks("ranks_strategies:digests", {"cases": every, "steps": 2}, devices=4)
    whole, zero1, zero2, zero3, replicated, pipeline, tensor = (outcome["bytes"] for outcome in outcomes)
    parameters, gradients, state = whole[0]
    assert parameters == gradients and state == 2 * parameters
    assert all(own[0] == parameters and own[1] == gradients and own[2] < 0.3 * state for own in zero1)
    assert all(own[0] == parameters and own[1] < 0.75 * gradients and own[2] < 0.3 * state for own in zero2)
    assert all(own[0] < 0.75 * parameters and own[1] < 0.75 * gradients and own[2] < 0.3 * state for own in zero3)
    assert all(0.45 * state < own[2] < 0.55 * state and own[0] < 0.9 * parameters for own in replicated)
    assert all(own[0] < 0.4 * parameters and own[1] == own[0] for own in tensor)
    assert sum(own[0] for own in pipeline) < 1.01 * parameters and max(own[0] for own in pipeline) < 0.5 * parameters


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_under_any_strategy(devices: int, on_ranks: OnRanks) -> None:
    texts = ("data-parallel", "zero1", "zero3:reshard=no", "pipeline:stages=2", "tensor:parts=2,shard=yes")
    texts += ("zero3:replicas=2",) if devices == 4 else ()
    every = [case("blocks of resnet20", "adamw", strategy=text) for text in texts]
    argument = {"cases": every, "stop": 2, "steps": 3}
    digests = on_ranks("ranks_strategies:checkpoints", argument, devices=devices)
    assert len({*digests}) == 1, digests
