"""``train`` from configuration to result, on real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.train.train import train
from dpsim.records.train import TrainConfig, TrainResult
from dpsim.study.inputs import Needed, declared

SMALL = {"model": "mlp:16", "dataset": "digits", "global_batch": 64, "steps": 30}


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def results() -> dict[int, TrainResult]:
    return {devices: train(TrainConfig.of(**SMALL, devices=devices), quiet) for devices in (1, 2)}  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_result_tells_losses_accuracy_and_times(devices: int, results: dict[int, TrainResult]) -> None:
    result = results[devices]
    assert (result.devices, result.steps, len(result.losses)) == (devices, 30, 30)
    assert result.final_loss == result.losses[-1]
    assert result.losses[0] == pytest.approx(math.log(10), rel=0.4)  # ten classes, nothing learnt
    assert result.final_loss < 0.7 * result.losses[0]
    assert 0.5 < result.test_accuracy <= 1
    assert result.step_s > 0 and result.images_per_s == pytest.approx(64 / result.step_s)
    assert (result.exposed_communication_s == 0) == (devices == 1)
    assert len(result.digest) == 64


def test_images_a_second_count_the_images_that_were_there() -> None:
    """Of 20 samples a batch of 20 has all, and batches of 16 are 16 and 4 in turn."""
    small = {"model": "mlp:4", "dataset": "synthetic:2x2x1,classes=2,train=20,test=4"}
    for global_batch, full in ((20, 20), (16, 16)):
        result = train(TrainConfig.of(**small, global_batch=global_batch, steps=6), quiet)  # type: ignore[arg-type]
        assert result.images_per_s == pytest.approx(full / result.step_s)
    assert train(TrainConfig.of(**small, global_batch=16, steps=1), quiet).images_per_s == 0  # type: ignore[arg-type]


def test_two_devices_learn_what_one_does(results: dict[int, TrainResult]) -> None:
    assert results[2].losses == pytest.approx(results[1].losses, rel=1e-3)
    assert results[2].test_accuracy == pytest.approx(results[1].test_accuracy, abs=0.02)


def test_progress_names_the_epoch_its_loss_and_the_steps() -> None:
    messages: list[str] = []
    train(
        TrainConfig.of(model="mlp:4", dataset="synthetic:2x2x1,classes=2,train=20,test=4", global_batch=8, epochs=2),
        messages.append,
    )
    assert [line.split(":")[0] for line in messages] == ["epoch 1", "epoch 2"]
    assert "3 of 6 steps" in messages[0] and "6 of 6 steps" in messages[1]


def test_label_smoothing_reaches_the_ranks() -> None:
    small = {"model": "mlp:4", "dataset": "synthetic:2x2x1,classes=2,train=20,test=4", "steps": 1, "global_batch": 20}
    plain, smoothed = (train(TrainConfig.of(**small, label_smoothing=e), quiet) for e in (0.0, 0.5))  # type: ignore[arg-type]
    assert plain.losses != smoothed.losses and plain.digest != smoothed.digest


@pytest.mark.slow
def test_mg_wfbp_and_auto_overlap_measure_first_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsim.study.inputs._MOST_S", 2.0)
    messages: list[str] = []
    config = TrainConfig.of(
        model="mlp:4",
        dataset="synthetic:2x2x1,classes=2,train=20,test=4",
        devices=2,
        global_batch=8,
        steps=3,
        fusion_rule="mg-wfbp",
        overlap="auto",
    )
    result = train(config, messages.append)
    assert result.steps == 3 and all(map(math.isfinite, result.losses))
    assert any(line.startswith("overlap ") for line in messages)


def test_accumulation_is_profiled_at_what_a_device_computes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def on_ranks(task: str, argument: dict[str, Any], **_: object) -> None:
        asked.append(argument)
        raise ConfigError("enough")

    monkeypatch.setattr("dpsim.study.cases.on_ranks", on_ranks)
    with pytest.raises(ConfigError, match="enough"):
        train(TrainConfig.of(model="mlp:4", devices=2, global_batch=64, accumulate=4, overlap="auto"), quiet)
    profiles = declared(codec.decode(asked[0], Needed, "task")).profiles
    assert [profile.local_batches for profile in profiles.values()] == [(8,)]


def test_more_devices_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot feed 4 devices"):
        TrainConfig.of(model="mlp:4", devices=4, global_batch=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"label_smoothing": 1.0}, "label smoothing is 1.0"),
        ({"overlap": "threads"}, "did you mean 'thread'"),
        ({"algorithm": "rings"}, "did you mean 'ring'"),
        ({"fusion_rule": "tarantela"}, "did you mean 'tarantella'"),
        ({"network": "paced:1us"}, "paced:LATENCY,BANDWIDTH"),
        ({"fusion_rule": "one", "fusion_threshold_bytes": 4.0}, "takes no threshold"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.of(**given)  # type: ignore[arg-type]
    assert message in str(caught.value)
