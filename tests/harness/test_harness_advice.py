"""What train warns of before it begins, and how a terminal shows it."""

from __future__ import annotations

import re
import sys

import pytest

from dpsim.cli import show
from dpsim.harness.train.on_ranks import batch_norm_warning
from dpsim.harness.train.train import train
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.records.train import TrainConfig
from dpsim.replica import LayerSpec


def layers(model: str) -> tuple[LayerSpec, ...]:
    return build_model(model, (4, 4, 1), 2).layers


@pytest.mark.parametrize(
    ("devices", "accumulate", "global_batch", "samples"),
    [(1, 1, 16, None), (1, 1, 15, 15), (4, 1, 64, None), (4, 1, 63, 15), (2, 4, 64, 8), (4, 4, 16, 1)],
)
def test_batch_norm_of_fewer_than_16_samples_is_warned_of(
    devices: int, accumulate: int, global_batch: int, samples: int | None
) -> None:
    plan = Plan(devices=devices, accumulate=accumulate, global_batch=global_batch)
    text = batch_norm_warning(layers("cnn:4,4"), plan)
    assert (text is None) == (samples is None)
    if text is not None:
        counted = f"{samples} sample{'s' * (samples != 1)} ({global_batch} samples a step"
        assert f"2 batch-norm layers take their statistics from {counted}" in text
        enough = re.search(r"--global-batch (\d+) or more", text)
        assert enough is not None
        plan = Plan(devices=devices, accumulate=accumulate, global_batch=int(enough[1]))
        assert batch_norm_warning(layers("cnn:4,4"), plan) is None


@pytest.mark.parametrize("model", ["mlp:4", "cnn:4,norm=group", "resnet20:norm=layer"])
def test_models_without_batch_norm_are_not_warned_of(model: str) -> None:
    assert batch_norm_warning(layers(model), Plan(devices=4, global_batch=4)) is None


def test_train_says_it_once_before_it_trains() -> None:
    messages: list[str] = []
    data = "synthetic:4x4x1,classes=2,train=16,test=4"
    train(TrainConfig.of(model="cnn:4", dataset=data, devices=2, global_batch=8, steps=4), messages.append)
    assert [line.split(":")[0] for line in messages] == ["warning", "epoch 1", "epoch 2"]
    assert "1 batch-norm layer takes its statistics from 4 samples (8 samples a step over 2 devices)" in messages[0]


def test_a_warning_stays_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show.progress() as tell:
        tell("warning: " + 50 * "long ")
        tell("epoch 1")
    written = capsys.readouterr().err
    assert "warning: " + 50 * "long " + "\n" in written and "epoch 1\n" not in written


def test_what_counts_is_what_is_normalised_together() -> None:
    leaf = Plan(devices=1, global_batch=64, leaves=8, batch_norm="leaf")
    assert "from 8 samples (64 samples a step in 8 leaves)" in str(batch_norm_warning(layers("cnn:4"), leaf))
    assert batch_norm_warning(layers("cnn:4"), Plan(devices=8, global_batch=64, batch_norm="global")) is None
