"""Going on with a run from its checkpoints: what it was started with, and which of that may be another now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.train.train import TrainConfig
from dpsim.learning_rate import Cosine
from dpsim.machine import Network
from dpsim.optimizer import changed
from dpsim.progress import Progress
from dpsim.runtime.checkpoint import Checkpoint, checkpoints, newest, read

_HOW_IT_IS_RUN = {
    "devices",
    "network",
    "algorithm",
    "fusion_rule",
    "fusion_threshold_bytes",
    "overlap",
    "accumulate",
    "epochs",
    "steps",
    "workload",
    "link_alpha_s",
    "link_beta_s_per_byte",
    "checkpoint",
    "checkpoint_every",
    "resume",
    "layout",
    "stall_after_s",
    "backend",
    "selection",
    "elastic",
}
"""Fields of a ``TrainConfig`` that may be another when a run goes on; all others decide what is trained."""


def configured(
    folder: Path | None,
    chosen: Mapping[str, Any],
    optimizer: str | None,
    settings: dict[str, Any],
    rate: Mapping[str, Any],
    progress: Progress,
) -> TrainConfig:
    """The configuration of a new run, or of one that goes on from its checkpoints in ``folder``, with what was chosen.

    ``chosen`` are fields of a ``TrainConfig``, ``settings`` of the ``optimizer`` (None: as before), ``rate`` of
    its rate schedule. Raises ``ConfigError``, also where a run that goes on would become another training, and
    ``FileFormatError`` where there is no checkpoint.
    """
    base = TrainConfig() if folder is None else resumed(folder, progress)
    fields = dict(chosen)
    if folder is not None:  # what was given replaces what belongs together with it
        for given, old in (
            ("fusion_rule", "fusion_threshold_bytes"),
            ("epochs", "steps"),
            ("steps", "epochs"),
            ("devices", "selection"),
        ):
            if given in chosen:
                fields.setdefault(old, None)
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
    """The configuration of the run whose newest valid checkpoint in ``folder`` is gone on from, into that folder.

    Tells of newer ones that are damaged. Raises ``FileFormatError`` where there is none.
    """
    path, checkpoint, damaged = newest(folder)
    for error in damaged:
        progress(f"warning: {error.given}; going on from the one before it, {path.name}")
    config = stored(checkpoint)
    return msgspec.structs.replace(config, checkpoint=str(folder), resume=str(path))


def stored(checkpoint: Checkpoint) -> TrainConfig:
    """The configuration that a checkpoint was written under. Raises ``FileFormatError``."""
    return codec.decode(checkpoint.header.run, TrainConfig, "run in the checkpoint")


def run_of(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint keeps of a configuration: without what was measured for it, and what a kill leads to."""
    bare = msgspec.structs.replace(config, workload=None, link_alpha_s=0.0, link_beta_s_per_byte=0.0, elastic=False)
    return dict(codec.to_builtins(bare))


def check_same_training(before: TrainConfig, config: TrainConfig) -> None:
    """Refuse to go on with another training than the one that was begun. Raises ``ConfigError``."""
    names = [name for name in TrainConfig.__struct_fields__ if name not in _HOW_IT_IS_RUN]
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
    """How to go on when ``lost`` ranks of a run were killed, and from which step.

    On the others, or on one if none is left, from the newest checkpoint; from where the run began while there is none.
    The others may be of any nodes, so their layout is flat. Raises ``FileFormatError`` where no checkpoint is valid.
    """
    folder, resume, step, algorithm = Path(str(config.checkpoint)), config.resume, 0, config.algorithm
    if checkpoints(folder):
        path, checkpoint, _ = newest(folder)
        resume, step = str(path), checkpoint.header.step
    elif resume is not None:
        step = read(Path(resume)).header.step
    if algorithm == "hierarchical":
        algorithm = Network.parse(config.network).default_algorithm(config.wire_dtype)
    left = msgspec.structs.replace(
        config,
        devices=max(config.devices - lost, 1),
        layout="",
        algorithm=algorithm,
        selection=None,
        resume=resume,
    )
    return left, step
