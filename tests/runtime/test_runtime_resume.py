"""A run that is stopped and goes on is the run that was never stopped: the same bits, on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.learning_rate import Cosine, RateSchedule, learning_rate
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.runtime.checkpoint import Checkpoint, encode, read

OnRanks = Callable[..., Any]
STEPS = 10
DATASET = "synthetic:6x5x2,classes=3,train=25,test=6"
SGD = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.01)
NESTEROV = Sgd(learning_rate=0.05, momentum=0.9, nesterov=True)
ADAMW = AdamW(learning_rate=0.01)
WARMING_UP = RateSchedule(warmup_epochs=2.0, reference_batch=2, decay=Cosine(final_fraction=0.1))


def case(name: str, stop: int, optimizer: Optimizer = SGD, schedule: RateSchedule | None = None, **plan: Any) -> Any:
    """7 samples a step of 25: 4 steps an epoch, the last of 4 samples; the model has running statistics."""
    rate = schedule or RateSchedule()
    rates = [
        learning_rate(rate, optimizer.learning_rate, step, global_batch=7, steps_per_epoch=4, total_steps=STEPS)
        for step in range(STEPS + 3)
    ]
    plan = {"global_batch": 7, "fusion_threshold_bytes": 100, "optimizer": codec.to_builtins(optimizer)} | plan
    return {"name": name, "model": "cnn:3,4", "dataset": DATASET, "seed": 5, "plan": plan, "rates": rates, "stop": stop}


def cases(devices: int) -> list[dict[str, Any]]:
    """Stops at random steps: within an epoch, at its end, within the warm-up."""
    random = np.random.default_rng(devices)
    chosen = []
    for optimizer, overlap in ((SGD, "off"), (SGD, "thread"), (ADAMW, "off"), (ADAMW, "thread"), (NESTEROV, "poll")):
        stop = int(random.integers(1, STEPS))
        name = f"{type(optimizer).__name__} {overlap} {len(chosen)}"
        chosen.append(case(name, stop, optimizer, overlap=overlap))
    chosen.append(case("midway in the warm-up", int(random.integers(1, 8)), SGD, WARMING_UP))
    chosen.append(case("after the warm-up", 9, ADAMW, WARMING_UP, overlap="thread"))
    chosen.append(case("at an epoch's end", 4, ADAMW))
    chosen.append(case("at the beginning", 0, SGD))
    if devices <= 3:
        chosen.append(case("two micro-batches", int(random.integers(1, STEPS)), SGD, accumulate=2))
    return chosen


@pytest.mark.parametrize("devices", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_a_run_that_went_on_has_the_bits_of_one_that_never_stopped(
    devices: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    every = cases(devices)
    argument = {"cases": every, "steps": STEPS, "folder": str(tmp_path)}
    actual = on_ranks("ranks_resume:interrupted", argument, devices=devices)
    for one, run in zip(every, actual, strict=True):
        assert run["same_on_each_rank"] == [True] * devices, one["name"]
        assert run["same_losses"] == [True] * devices, one["name"]
        assert run["padding_is_zero"], one["name"]
        if one["stop"]:  # each rank has running statistics of its own, and has got those back
            assert run["different_states"] == devices, one["name"]


PLAN = case("two", 5, ADAMW)["plan"]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"model": "cnn:3,5"}, "bn2.beta is ((4,), 'float32') there, ((5,), 'float32') here"),
    ({"model": "cnn:3"}, "is ((4,), 'float32') there, None here"),
    ({"seed": 6}, "seed is 5 there, 6 here"),
    ({"dataset": DATASET.replace("train=25", "train=26")}, "number of training samples is 25 there, 26 here"),
    ({"plan": PLAN | {"optimizer": codec.to_builtins(AdamW(learning_rate=0.02))}}, "optimizer is AdamW"),
    ({"plan": PLAN | {"optimizer": codec.to_builtins(SGD)}}, "optimizer is AdamW"),
    ({"plan": PLAN | {"global_batch": 8}}, "global batch is 7 there, 8 here"),
    ({"plan": PLAN | {"leaves": 4, "batch_norm": "leaf"}}, "leaves is 0 there, 4 here"),
    ({"plan": PLAN | {"batch_norm": "global"}}, "batch norm is local there, global here"),
    ({"plan": PLAN | {"wire_dtype": "bfloat16"}}, "wire dtype is None there, bfloat16 here"),
    ({"plan": PLAN | {"compute_dtype": "bfloat16"}}, "compute dtype is float32 there, bfloat16 here"),
]
"""Changes to the case whose checkpoint is read, and what is said of each."""


class Read(NamedTuple):
    """A case, a checkpoint of it that two ranks wrote at step 5, and what became of it on 1 and on 3 ranks."""

    case: dict[str, Any]
    path: Path
    restored: dict[int, dict[str, Any]]
    refused: list[str]
    evaluated: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, together: Callable[..., list[Any]]) -> Read:
    folder = tmp_path_factory.mktemp("written")
    one, path = case("two", 5, ADAMW), folder / "two" / "checkpoint-5.safetensors"
    file = {"case": one, "path": str(path)}
    _, refused, *others = together(
        ("ranks_resume:interrupted", {"cases": [one], "steps": STEPS, "folder": str(folder)}, 2),
        ("ranks_resume:refused", {"cases": [one | change for change, _ in OTHERS], "path": str(path)}, 1),
        *(("ranks_resume:restored", file, devices) for devices in (1, 3)),
        *(("ranks_resume:evaluated_midway", {"case": case("looked", 0)}, devices) for devices in (1, 3)),
    )
    return Read(one, path, {1: others[0], 3: others[1]}, refused, {1: others[2], 3: others[3]})


@pytest.mark.parametrize("devices", [1, 3])
def test_on_another_number_of_devices_statistics_are_the_mean(devices: int, written: Read) -> None:
    kept, actual = read(written.path).tensors, written.restored[devices]
    assert actual["step"] == 5 and actual["alike"]
    assert actual["state"]
    for name, value in actual["state"].items():
        assert not np.array_equal(kept[f"state/0/{name}"], kept[f"state/1/{name}"])
        mean = (kept[f"state/0/{name}"] + kept[f"state/1/{name}"]) / 2
        np.testing.assert_allclose(value, mean, rtol=1e-6)
    for name, value in actual["parameters"].items():
        np.testing.assert_array_equal(np.float32(value), kept[f"parameters/{name}"])
    assert np.isfinite(actual["losses"]).all()


def test_a_checkpoint_of_another_training_is_refused(written: Read) -> None:
    for answer, (_, message) in zip(written.refused, OTHERS, strict=True):
        assert "the checkpoint is of another training" in answer
        assert message in answer


def test_a_position_that_contradicts_its_step_is_refused(on_ranks: OnRanks, written: Read, tmp_path: Path) -> None:
    kept = read(written.path)
    header = msgspec.structs.replace(kept.header, batch=kept.header.batch + 1)
    (tmp_path / "wrong").write_bytes(encode(Checkpoint(header=header, tensors=kept.tensors)))
    with pytest.raises(ConfigError, match="position is 6 there, 5 here"):
        on_ranks("ranks_resume:restored", {"case": written.case, "path": str(tmp_path / "wrong")}, devices=1)


@pytest.mark.parametrize("devices", [1, 3])
def test_an_evaluation_uses_the_mean_of_statistics_and_changes_nothing(devices: int, written: Read) -> None:
    expected = {"same": True, "sums_agree": True, "digests": 1, "is_mean": True, "states": devices}
    assert written.evaluated[devices] == expected
