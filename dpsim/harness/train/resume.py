"""Resuming a run from its checkpoints: its configuration, and which fields of it may change; what its ranks get."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.fields import Decides
from dpsim.harness.train.updates import replayed
from dpsim.learning_rate import Cosine
from dpsim.optimizer import changed
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.train import TrainConfig, deciding_fields
from dpsim.runtime.checkpoint import Checkpoint, checkpoints, newest, read
from dpsim.strategy import DataParallel
from dpsim.study.models import Model
from dpsim.workload import Workload

_FORMER = {"workload", "link_alpha_s", "link_beta_s_per_byte"}
"""Fields of earlier versions, which checkpoints still have."""
_MODEL_DIGEST = "model_digest"
_DEPENDENT = (
    ("fusion_rule", "fusion_threshold_bytes"),
    ("epochs", "steps"),
    ("steps", "epochs"),
    ("devices", "selection"),
    ("network", "algorithm"),
)
"""Fields of which a new value of the first makes the old one of the second invalid."""


class TrainTask(Noun, frozen=True):
    """What the ranks of a training are given: its configuration, and the costs for a fusion rule that needs them.

    These are the profiled workload, and alpha-beta of an allreduce.
    """

    config: TrainConfig
    workload: Workload | None = None
    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0


def configured(
    folder: Path | None,
    chosen: Mapping[str, Any],
    optimizer: str | None,
    settings: dict[str, Any],
    rate: Mapping[str, Any],
    progress: Progress,
) -> TrainConfig:
    """The configuration of a new run, or of the run that is resumed from its checkpoints in ``folder``.

    ``chosen`` are fields of a ``TrainConfig``, ``settings`` those of the ``optimizer`` (None: unchanged), ``rate``
    those of the rate schedule. A replay has the configuration of its file. Raises ``ConfigError``, also if the resumed
    run would become another training, and ``FileFormatError`` if there is no checkpoint.
    """
    if "replay" in chosen:
        others = {name: True for name in ("optimizer",) if optimizer is not None} | settings | dict(rate)
        return replayed(dict(chosen) | others | ({} if folder is None else {"resume": folder}))
    base = TrainConfig.of() if folder is None else resumed(folder, progress)
    fields = dict(chosen) | {
        "optimizer": changed(base.plan.optimizer, optimizer, settings),
        "rate_schedule": msgspec.structs.replace(base.rate_schedule, **rate),
    }
    for changed_field, dependent in _DEPENDENT:
        if changed_field in chosen and (folder is not None or dependent == "algorithm"):
            fields.setdefault(dependent, None)
    if fields.get("leaves", base.plan.leaves) != base.plan.leaves:
        fields.setdefault("batch_norm", None)
    config = base.changed(**fields)
    if folder is not None:
        check_same_training(base, config)
    return config


def resumed(folder: Path, progress: Progress) -> TrainConfig:
    """The configuration to resume with: that of the newest valid checkpoint in ``folder``, with new ones going there.

    Reports newer checkpoints that are damaged. Raises ``FileFormatError`` if none is valid.
    """
    path, checkpoint, damaged = newest(folder)
    for error in damaged:
        progress(f"warning: {error.given}; going on from the one before it, {path.name}")
    config = stored(checkpoint)
    return msgspec.structs.replace(config, checkpoint=str(folder), resume=str(path))


def stored(checkpoint: Checkpoint) -> TrainConfig:
    """The configuration that a checkpoint was written under. Raises ``FileFormatError``."""
    run = {name: value for name, value in checkpoint.header.run.items() if name not in {*_FORMER, _MODEL_DIGEST}}
    plan = {name: run.pop(name) for name in Plan.__struct_fields__ if name in run}
    if plan.get("batch_norm") is None:
        plan["batch_norm"] = Plan.default_batch_norm(bool(plan.get("leaves")))
    return codec.decode({"plan": plan} | run, TrainConfig, "run in the checkpoint")


def run_of(config: TrainConfig, model_digest: str = "") -> dict[str, Any]:
    """What a checkpoint keeps of a run: its configuration, not elastic, and the digest of a user's own model."""
    fields = dict(codec.to_builtins(config.fields | {"elastic": False, "overlap": config.plan.overlap}))
    return fields | ({_MODEL_DIGEST: model_digest} if model_digest else {})


def changed_model(checkpoint: Checkpoint, model: Model) -> str | None:
    """A warning if the source of a user's own model is not the one that the checkpoint was trained with."""
    before = checkpoint.header.run.get(_MODEL_DIGEST, model.source_digest)
    if before == model.source_digest:
        return None
    return f"the source of {model.name} changed since the checkpoint (SHA-256 {before}, now {model.source_digest})"


def check_same_training(before: TrainConfig, config: TrainConfig) -> None:
    """Raises ``ConfigError`` if a field that decides what is trained differs from the checkpoint's."""
    names = [*deciding_fields(Decides.BITS)]
    if isinstance(config.rate_schedule.decay, Cosine):
        names += ["epochs", "steps"]  # a cosine's rate depends on the end of the run in every step
    there, here = before.fields, config.fields
    differing = [
        f"{name} is {there[name]} in the checkpoint, {here[name]} here" for name in names if there[name] != here[name]
    ]
    if differing:
        raise ConfigError(
            f"this is not the run that the checkpoint is of: {'; '.join(differing)}",
            allowed="other devices, network, fusion, overlap, and a later end if the schedule is not a cosine",
            remedy="leave out the flags that differ, or train afresh into another folder with --checkpoint",
        )


def survivors(config: TrainConfig, lost: int) -> tuple[TrainConfig, int]:
    """The configuration to continue with after ``lost`` ranks of a run were killed, and the step it starts from.

    It runs on the other ranks, at least on one: on as many as fill the stages of its strategy, and by plain data
    parallelism where they cannot run that. It starts from the newest checkpoint, or from the beginning without one. The
    other ranks may be on any nodes, so their layout is flat. Raises ``FileFormatError`` if no checkpoint is
    valid.
    """
    folder, resume, step = Path(str(config.checkpoint)), config.resume, 0
    if checkpoints(folder):
        path, checkpoint, _ = newest(folder)
        resume, step = str(path), checkpoint.header.step
    elif resume is not None:
        step = read(Path(resume)).header.step
    plan = config.plan
    left = max(plan.devices - lost, 1)
    other: dict[str, Any] = {
        "layout": "",
        "algorithm": None if plan.algorithm == "hierarchical" else plan.algorithm,
        "selection": None,
        "resume": resume,
    }
    devices = left - left % plan.parallelism.classes
    if devices:
        with contextlib.suppress(ConfigError):
            return config.changed(devices=devices, **other), step
    return config.changed(devices=left, strategy=DataParallel.name, **other), step
