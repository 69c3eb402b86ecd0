"""``train --checkpoint`` and ``train --resume``, on real ranks: the same run to the bit, and mistakes explained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim import codec
from dpsim.harness.train.resume import check_same_training, resumed, run_of
from dpsim.harness.train.train import TrainResult, train
from dpsim.learning_rate import Cosine, RateSchedule, Step
from dpsim.optimizer import AdamW
from dpsim.records.train import TrainConfig
from dpsim.runtime.checkpoint import checkpoints

Dpsim = Callable[..., tuple[int, str, str]]
RUN = TrainConfig.of(
    model="cnn:3,4",
    dataset="synthetic:6x5x2,classes=3,train=25,test=6",
    devices=2,
    global_batch=7,
    steps=11,
    optimizer=AdamW(learning_rate=0.02),
    rate_schedule=RateSchedule(decay=Step(milestones=(2.0,)), warmup_epochs=1.5),
)


@pytest.fixture(scope="module")
def straight() -> TrainResult:
    """The run that was never stopped."""
    return train(RUN, lambda _: None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, straight: TrainResult) -> Path:
    """The folder of a run that wrote checkpoints every 3 steps: of steps 9 and 11."""
    folder = tmp_path_factory.mktemp("run")
    messages: list[str] = []
    result = train(_with(checkpoint=str(folder), checkpoint_every=3), messages.append)
    assert result.digest == straight.digest  # writing changes nothing
    assert result.losses == straight.losses
    assert [line.split(":")[0] for line in messages if "KiB" in line] == [
        f"checkpoint of step {n}" for n in (3, 6, 9, 11)
    ]
    assert [step for step, _ in checkpoints(folder)] == [9, 11]
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def _with(**changes: Any) -> TrainConfig:
    return RUN.changed(**changes)


def test_resume_alone_is_enough_to_end_a_run_as_if_it_had_not_been_stopped(
    folder: Path, straight: TrainResult, dpsim: Dpsim
) -> None:
    (folder / "checkpoint-11.safetensors").unlink()
    code, out, err = dpsim("train", "--resume", folder, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert "going on after step 9, towards 11 steps" in err
    assert shown["summary"]["digest"] == straight.digest
    assert (shown["summary"]["steps"], shown["summary"]["first_step"]) == (11, 9)
    assert tuple(shown["points"][0]["losses"]) == straight.losses
    assert shown["points"][0]["checkpoint_every"] == 3
    assert [step for step, _ in checkpoints(folder)] == [9, 11]


def test_a_damaged_newest_checkpoint_is_named_set_aside_and_gone_round(
    folder: Path, straight: TrainResult, dpsim: Dpsim
) -> None:
    newest = folder / "checkpoint-11.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    code, out, err = dpsim("train", "--resume", folder)
    assert code == 0, err
    assert f"warning: the checkpoint {newest} is damaged" in err
    assert "going on from the one before it, checkpoint-9.safetensors" in err
    assert straight.digest in out
    assert (folder / "checkpoint-11.safetensors.damaged").exists()
    assert [step for step, _ in checkpoints(folder)] == [9, 11]


def test_a_run_that_is_at_its_end_shows_its_result_again(folder: Path, straight: TrainResult, dpsim: Dpsim) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, out, err = dpsim("train", "--resume", folder)
    assert (code, straight.digest in out, "all of them trained before" in out) == (0, True, True), err
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_run_goes_on_longer_elsewhere_and_on_other_devices(folder: Path, tmp_path: Path, dpsim: Dpsim) -> None:
    other = tmp_path / "other"
    code, out, err = dpsim(
        "train", "--resume", folder, "--checkpoint", other, "--steps", "13", "--devices", "3", "--fusion-rule", "one"
    )
    assert code == 0, err
    assert "13 steps, 3 devices" in out
    assert [step for step, _ in checkpoints(folder)] == [9, 11]
    assert [step for step, _ in checkpoints(other)] == [12, 13]
    messages: list[str] = []
    config = resumed(other, messages.append)
    assert (config.plan.devices, config.plan.fusion_rule, config.steps, config.checkpoint) == (3, "one", 13, str(other))
    assert messages == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model mlp:4", "model is cnn:3,4 in the checkpoint, mlp:4 here"),
        ("--seed 1", "seed is 0 in the checkpoint, 1 here"),
        ("--dataset digits", "dataset is synthetic"),
        ("--global-batch 8", "global_batch is 7 in the checkpoint, 8 here"),
        ("--learning-rate 0.5", "optimizer is AdamW(learning_rate=0.02"),
        ("--optimizer sgd", "optimizer is AdamW(learning_rate=0.02"),
        ("--schedule constant", "rate_schedule is"),
        ("--steps 5", "the checkpoint is of step 11, and the run would end at step 5"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_refused(
    flags: str, message: str, written: Path, dpsim: Dpsim
) -> None:
    code, out, err = dpsim("train", "--resume", written, *flags.split())
    assert (code, out) == (2, "")
    assert message in err and "to do:" in err and "Traceback" not in err


def test_a_cosine_cannot_end_elsewhere_than_it_was_begun_for() -> None:
    cosine = _with(rate_schedule=RateSchedule(decay=Cosine()))
    longer = _with(rate_schedule=RateSchedule(decay=Cosine()), steps=12)
    with pytest.raises(ValueError, match="steps is 11 in the checkpoint, 12 here"):
        check_same_training(cosine, longer)
    check_same_training(RUN, _with(steps=12))
    assert not {"workload", "link_alpha_s", "link_beta_s_per_byte"} & set(run_of(cosine))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--resume nowhere", "there is no folder nowhere"),
        ("--resume .", "there is no checkpoint in ."),
        ("--checkpoint-every 5", "name a folder with --checkpoint"),
        ("--checkpoint x --checkpoint-every 0", "checkpoint_every is 0"),
        ("--checkpoint /dev/null", "cannot write --checkpoint /dev/null: it is not a folder"),
    ],
)
def test_a_mistake_with_folders_is_explained(
    flags: str, message: str, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dpsim("train", *flags.split())
    assert (code, out) == (2, "")
    assert message in err and "to do:" in err and "Traceback" not in err


def test_a_fresh_run_does_not_write_over_anothers_checkpoints(written: Path, dpsim: Dpsim) -> None:
    before = sorted(written.iterdir())
    code, out, err = dpsim("train", "--checkpoint", written)
    assert (code, out) == (2, "")
    assert "has checkpoints already" in err and f"--resume {written}" in err
    assert sorted(written.iterdir()) == before


def test_checkpoints_that_cannot_be_written_lose_no_training(
    straight: TrainResult, tmp_path: Path, on_ranks: Callable[..., Any]
) -> None:
    config = _with(checkpoint=str(tmp_path / "run"), checkpoint_every=6)
    actual = on_ranks("ranks_resume:limited", codec.to_builtins(config), devices=2)
    assert actual["digest"] == straight.digest
    warnings = [line for line in actual["said"] if line.startswith("warning: cannot write")]
    assert [f"the checkpoint of step {step} (" in line for step, line in zip((6, 11), warnings, strict=True)] == [
        True
    ] * 2
    assert "File too large" in actual["failure"] and "step 11" in actual["failure"] and "to do:" in actual["failure"]
    assert list((tmp_path / "run").iterdir()) == []


def test_a_result_without_its_last_checkpoint_is_shown_and_then_is_an_error(
    straight: TrainResult, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = msgspec.structs.replace(straight, checkpoint_failure="cannot write it\n  to do:   make room")
    monkeypatch.setattr("dpsim.harness.train.train.train", lambda config, tell: failed)
    code, out, err = dpsim("train")
    assert code == 2
    assert straight.digest in out
    assert err == "dpsim: cannot write it\n  to do:   make room\n"
