"""Reproducible runs that lose devices, or go on with more or fewer: the bits of the run that nothing happened to."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim import codec
from dpsim.errors import CommunicationError, ConfigError
from dpsim.harness.train.resume import check_same_training, run_of, survivors
from dpsim.harness.train.train import train
from dpsim.launch import rank_info
from dpsim.launch.jobs import JobFailed
from dpsim.learning_rate import Cosine, RateSchedule, learning_rate
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.plan import Plan
from dpsim.records.train import TrainConfig
from dpsim.runtime.checkpoint import Checkpoint, CheckpointFolder, Header

OnRanks = Callable[..., Any]
Dpsim = Callable[..., tuple[int, str, str]]
Python = Callable[..., subprocess.CompletedProcess[str]]
ROUNDS, STEPS = 18, 12
NESTEROV, ADAMW = Sgd(learning_rate=0.05, momentum=0.9, nesterov=True), AdamW(learning_rate=0.01)


def case(model: str, mode: str, optimizer: Optimizer, batch: int) -> dict[str, Any]:
    """25 samples in batches that neither divide them nor are divided by the leaves; the rate warms up and falls."""
    schedule = RateSchedule(warmup_epochs=1.5, decay=Cosine(final_fraction=0.1))
    per_epoch = -(-25 // batch)
    rates = [
        learning_rate(
            schedule, optimizer.learning_rate, step, global_batch=batch, steps_per_epoch=per_epoch, total_steps=STEPS
        )
        for step in range(STEPS)
    ]
    plan = {"global_batch": batch, "leaves": 8, "batch_norm": mode, "optimizer": codec.to_builtins(optimizer)}
    dataset = "synthetic:6x5x2,classes=3,train=25,test=6"
    return {"name": f"{model} {mode}", "model": model, "dataset": dataset, "seed": 5, "plan": plan, "rates": rates}


CASES = (
    case("cnn:3,4", "leaf", ADAMW, 10),
    case("cnn:3,4", "global", NESTEROV, 11),
    case("mlp:6,5,dropout=0.3", "leaf", ADAMW, 7),
)


def one_round(number: int) -> dict[str, Any]:
    """Two or three parts on random devices, each in a way of its own; some steps are done again after a stop."""
    moments = random.Random(number)
    stops = sorted(moments.sample(range(1, STEPS), moments.randint(1, 2)))
    parts = [
        (
            moments.randint(1, 4),
            {
                "overlap": moments.choice(["off", "inline", "poll", "thread"]),
                "fusion_threshold_bytes": moments.choice([0, 100, "inf"]),
                "algorithm": moments.choice(["auto", "direct", "ring"]),
            },
            stop,
            moments.randint(0, STEPS - stop),
        )
        for stop in (*stops, STEPS)
    ]
    return {"case": CASES[number % len(CASES)], "parts": parts}


@pytest.mark.slow
def test_a_run_that_is_handed_on_to_other_devices_ends_in_the_same_bits(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Rounds of real kills are in test_killed_training."""
    rounds = [one_round(number) for number in range(ROUNDS)]
    argument = {"rounds": rounds, "steps": STEPS, "folder": str(tmp_path)}
    actual = on_ranks("ranks_resume:moved", argument, devices=4)
    for one, (expected, result) in zip(rounds, actual, strict=True):
        assert len(expected[1]) == STEPS
        assert result == expected, one
    assert len({digest for (digest, _), _ in actual}) == len(CASES)
    assert len({part[0] for one in rounds for part in one["parts"]}) == 4


CONFIG = TrainConfig.of(model="mlp:4", global_batch=32, devices=3, leaves=8, checkpoint="run", elastic=True)


def with_changes(**changes: Any) -> TrainConfig:
    return CONFIG.changed(**changes)


def test_who_was_killed_and_how_it_goes_on_is_told_in_one_line_until_one_device_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []

    def killed(task: str, argument: dict[str, Any], *, devices: int, watch: bool, **_: Any) -> Any:
        assert watch
        asked.append(devices)
        if devices == 4:
            raise JobFailed("rank 1 of 4 was killed by SIGKILL", rank=1, lost=1)
        write(tmp_path / "run", 6)
        raise JobFailed("ranks were killed by SIGKILL", lost=3)

    monkeypatch.setattr("dpsim.harness.train.train.on_ranks", killed)
    messages: list[str] = []
    with pytest.raises(JobFailed):
        train(with_changes(devices=4, checkpoint=str(tmp_path / "run")), messages.append)
    assert asked == [4, 3, 1]
    assert messages == [
        "warning: rank 1 of 4 was killed by SIGKILL; going on from the beginning on 3 devices",
        "warning: ranks were killed by SIGKILL; going on from step 6 on 1 device",
    ]


def write(folder: Path, step: int) -> Path:
    """A checkpoint of which only its step is of interest."""
    header = Header(
        step=step, epoch=0, batch=step, seed=0, training_samples=9, plan=Plan(devices=1, global_batch=8), run={}
    )
    opened = CheckpointFolder(folder, step)
    opened.write(Checkpoint(header=header, tensors={}))
    opened.close()
    return folder / f"checkpoint-{step}.safetensors"


def test_survivors_are_of_no_known_nodes_and_go_on_from_the_newest_checkpoint_or_where_they_began(
    tmp_path: Path,
) -> None:
    folder, before = tmp_path / "run", write(tmp_path / "before", 4)
    config = with_changes(devices=4, layout="2x2", algorithm="hierarchical", checkpoint=str(folder), resume=str(before))
    left, step = survivors(config, 1)
    plan = left.plan
    assert (plan.devices, plan.layout, plan.algorithm, left.resume, step) == (3, "", "auto", str(before), 4)
    path = write(folder, 7)
    left, step = survivors(left, 9)
    assert (left.plan.devices, left.resume, step) == (1, str(path), 7)
    assert survivors(with_changes(checkpoint=str(tmp_path / "none")), 1)[0].resume is None


@pytest.mark.parametrize(
    "failure",
    [
        CommunicationError("no mpiexec"),
        JobFailed("rank 0 of 3 failed: ZeroDivisionError", rank=0),
        JobFailed("rank 2 of 3 was killed by SIGSEGV", rank=2),
    ],
)
def test_a_run_that_fails_for_another_reason_does_not_go_on(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr("dpsim.harness.train.train.on_ranks", failing)
    messages: list[str] = []
    with pytest.raises(type(failure)):
        train(with_changes(checkpoint=str(tmp_path / "run")), messages.append)
    assert messages == []


def test_an_elastic_run_that_diverges_does_not_begin_again(dpsim: Dpsim, tmp_path: Path) -> None:
    data = ["--dataset", "synthetic:3x3x1,classes=2,train=40,test=9", "--global-batch", "20", "--devices", "2"]
    flags = ["--reproducible", "--elastic", "--checkpoint", tmp_path, "--learning-rate", "1e38"]
    code, out, err = dpsim("train", "--model", "mlp:4", *data, *flags)
    assert (code, out) == (2, "")
    assert "the loss is nan" in err and "going on" not in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--elastic", "elastic training without leaves"),
        ("--elastic --checkpoint x", "elastic training without leaves"),
        ("--elastic --reproducible", "elastic training without a folder for checkpoints"),
    ],
)
def test_what_elastic_needs_is_said(flags: str, message: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim("train", *flags.split())
    assert (code, out) == (2, "")
    assert message in err and "to do:   add --reproducible and --checkpoint" in err


def test_in_a_job_of_somebody_elses_elastic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    assert rank_info.job() is not None
    with pytest.raises(ConfigError, match="a killed rank ends the job"):
        train(CONFIG, lambda _: None)


def test_elastic_is_not_kept_and_leaves_and_batch_norm_are_part_of_the_training() -> None:
    assert run_of(CONFIG)["elastic"] is False
    check_same_training(CONFIG, with_changes(elastic=False, devices=5, algorithm="ring", overlap="poll"))
    for change in ({"leaves": 16}, {"batch_norm": "global"}):
        with pytest.raises(ConfigError, match="this is not the run that the checkpoint is of"):
            check_same_training(CONFIG, with_changes(**change))


def test_survivors_fill_the_stages_of_a_pipeline_or_train_by_data_parallelism(tmp_path: Path) -> None:
    plan = {"devices": 6, "accumulate": 2, "leaves": 12, "batch_norm": "leaf", "strategy": "pipeline:stages=2"}
    config = with_changes(checkpoint=str(tmp_path / "none"), **plan)
    for lost, devices, strategy in ((1, 4, "pipeline"), (3, 2, "pipeline"), (5, 1, "data-parallel")):
        left = survivors(config, lost)[0].plan
        assert (left.devices, left.strategy) == (devices, strategy)
