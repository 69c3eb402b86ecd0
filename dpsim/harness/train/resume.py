"""Resuming a run from its checkpoints: its configuration, and which fields of it may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.fields import Decides, deciding
from dpsim.harness.models import Model
from dpsim.harness.train.config import TrainConfig
from dpsim.learning_rate import Cosine
from dpsim.machine import Network
from dpsim.optimizer import changed
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.checkpoint import Checkpoint, checkpoints, newest, read
from dpsim.setting import Setting

_FORMER = {"workload", "link_alpha_s", "link_beta_s_per_byte"}
"""Fields of earlier versions, which checkpoints still have."""
_MODEL_DIGEST = "model_digest"


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
    those of the rate schedule. Raises ``ConfigError``, also if the resumed run would become another training, and
    ``FileFormatError`` if there is no checkpoint.
    """
    base = TrainConfig() if folder is None else resumed(folder, progress)
    fields = dict(chosen)
    if folder is not None:  # a new value of the first field makes the old one of the second invalid
        for changed_field, dependent in (
            ("fusion_rule", "fusion_threshold_bytes"),
            ("epochs", "steps"),
            ("steps", "epochs"),
            ("devices", "selection"),
        ):
            if changed_field in chosen:
                fields.setdefault(dependent, None)
    config = msgspec.structs.replace(
        base,
        optimizer=changed(base.optimizer, optimizer, settings),
        rate_schedule=msgspec.structs.replace(base.rate_schedule, **rate),
        **fields,
    )
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
    fields = {name: value for name, value in checkpoint.header.run.items() if name not in {*_FORMER, _MODEL_DIGEST}}
    return codec.decode(fields, TrainConfig, "run in the checkpoint")


def run_of(config: TrainConfig, model_digest: str = "") -> dict[str, Any]:
    """What a checkpoint keeps of a run: its configuration, not elastic, and the digest of a user's own model."""
    fields = dict(codec.to_builtins(msgspec.structs.replace(config, elastic=False)))
    return fields | ({_MODEL_DIGEST: model_digest} if model_digest else {})


def changed_model(checkpoint: Checkpoint, model: Model) -> str | None:
    """A warning if the source of a user's own model is not the one that the checkpoint was trained with."""
    before = checkpoint.header.run.get(_MODEL_DIGEST, model.source_digest)
    if before == model.source_digest:
        return None
    return f"the source of {model.name} changed since the checkpoint (SHA-256 {before}, now {model.source_digest})"


def check_same_training(before: TrainConfig, config: TrainConfig) -> None:
    """Raises ``ConfigError`` if a field that decides what is trained differs from the checkpoint's."""
    names = [*deciding(Decides.BITS, TrainConfig, Plan, Setting)]
    if isinstance(config.rate_schedule.decay, Cosine):
        names += ["epochs", "steps"]  # a cosine's rate depends on the end of the run in every step
    differing = [
        f"{name} is {getattr(before, name)} in the checkpoint, {getattr(config, name)} here"
        for name in names
        if getattr(before, name) != getattr(config, name)
    ]
    if differing:
        raise ConfigError(
            f"this is not the run that the checkpoint is of: {'; '.join(differing)}",
            allowed="other devices, network, fusion, overlap, and a later end if the schedule is not a cosine",
            remedy="leave out the flags that differ, or train afresh into another folder with --checkpoint",
        )


def survivors(config: TrainConfig, lost: int) -> tuple[TrainConfig, int]:
    """The configuration to continue with after ``lost`` ranks of a run were killed, and the step it starts from.

    It runs on the other ranks, at least on one, from the newest checkpoint, or from the run's beginning if it wrote
    none. The other ranks may be on any nodes, so their layout is flat. Raises ``FileFormatError`` if no checkpoint is
    valid.
    """
    folder, resume, step, algorithm = Path(str(config.checkpoint)), config.resume, 0, config.algorithm
    if checkpoints(folder):
        path, checkpoint, _ = newest(folder)
        resume, step = str(path), checkpoint.header.step
    elif resume is not None:
        step = read(Path(resume)).header.step
    if algorithm == "hierarchical":
        algorithm = Network.parse(config.network).default_algorithm(config.wire_dtype)
    smaller = msgspec.structs.replace(
        config,
        devices=max(config.devices - lost, 1),
        layout="",
        algorithm=algorithm,
        selection=None,
        resume=resume,
    )
    return smaller, step
