"""Checkpoint files: the state from which a run continues exactly as if it had never stopped.

``FOLDER/checkpoint-STEP.safetensors`` holds tensors and, as metadata, a header (JSON) and one SHA-256 over both.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.folder_lock import lock
from dpsim.plan import Plan
from dpsim.replica import Array
from dpsim.units import format_size

SCHEMA = "dpsim.checkpoint/1"
_KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{1,18})\.safetensors")


class Header(Noun, frozen=True):
    """The description of a checkpoint's tensors.

    ``step`` updates were done: ``epoch`` whole epochs and ``batch`` batches of the next. ``run`` has plain values of
    the caller, which the runtime does not read. ``kernel_table`` is the digest of what decided which code
    computes: the table of reproducible training or the choices by measurement; it is empty in files of earlier versions
    without leaves.
    """

    step: int
    epoch: int
    batch: int
    seed: int
    training_samples: int
    plan: Plan
    run: dict[str, Any]
    kernel_table: str = ""
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A header, and tensors by name: ``parameters/NAME``, ``optimizer/SLOT/NAME``, ``state/RANK/NAME``, ``losses``."""

    header: Header
    tensors: Mapping[str, Array]


class NotWritten(DpsimError):
    """A checkpoint could not be written; the older ones are unchanged."""


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint file."""
    # Other than C-contiguous arrays are silently saved wrong by safetensors 0.8.
    tensors = {name: np.asarray(value, order="C") for name, value in checkpoint.tensors.items()}
    header = codec.to_json(checkpoint.header, indent=None)
    data: bytes = save(tensors, metadata={"header": header, "sha256": _digest(header, tensors)})
    return data


def _digest(header: str, tensors: Mapping[str, Array]) -> str:
    """Return the SHA-256 of the header and of each tensor's name, dtype, shape and bytes, in name order."""
    sha = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        value = tensors[name]
        sha.update(f"\n{name} {value.dtype.str} {value.shape} ".encode())
        sha.update(value.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def read(path: Path) -> Checkpoint:
    """Read and verify a checkpoint. Raises ``FileFormatError``."""
    if path.exists() and not path.is_file():
        raise _damaged(path, "it is no ordinary file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise FileFormatError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    except (SafetensorError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, f"it is cut off or no safetensors file ({error})") from error
    header = metadata.get("header", "")
    if metadata.get("sha256") != _digest(header, tensors):
        raise _damaged(path, "its content does not have the SHA-256 that it names")
    try:
        raw = codec.parse_json(header)
    except ValueError as error:
        raise _damaged(path, f"its header is no JSON object ({error})") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        schema = raw.get("schema") if isinstance(raw, dict) else raw
        raise FileFormatError(
            f"the checkpoint {path} has the format {schema!r}",
            allowed=f"{SCHEMA!r}",
            remedy="resume with the version of dpsim that wrote it",
        )
    return Checkpoint(header=codec.decode(raw, Header, f"checkpoint {path}"), tensors=tensors)


def _damaged(path: Path, why: str) -> FileFormatError:
    return FileFormatError(
        f"the checkpoint {path} is damaged: {why}",
        allowed="a file as dpsim wrote it",
        remedy="resume from an older checkpoint: move this file away",
    )


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every checkpoint in ``folder``, oldest first; none if it is no folder."""
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def newest(folder: Path) -> tuple[Path, Checkpoint, tuple[FileFormatError, ...]]:
    """Return the newest valid checkpoint in ``folder``, and the errors of all newer ones.

    Raises ``FileFormatError`` if none is valid.
    """
    existing = checkpoints(folder)
    if not existing:
        raise FileFormatError(
            f"there is no checkpoint in {folder}" if folder.is_dir() else f"there is no folder {folder}",
            allowed="a folder with files checkpoint-STEP.safetensors",
            remedy="give the folder of --checkpoint",
        )
    wrong: list[FileFormatError] = []
    for step, path in reversed(existing):
        try:
            checkpoint = read(path)
            if checkpoint.header.step != step:
                raise _damaged(path, f"it is of step {checkpoint.header.step}: its name was changed")
            return path, checkpoint, tuple(wrong)
        except FileFormatError as error:
            wrong.append(error)
    raise FileFormatError(
        f"no checkpoint in {folder} can be used: {'; '.join(error.given for error in wrong)}",
        allowed=wrong[0].allowed,
        remedy="train afresh into another folder with --checkpoint",
    )


def check_unused(folder: Path) -> None:
    """Raise ``ConfigError`` if the folder has checkpoints of another run."""
    existing = checkpoints(folder)
    if existing:
        raise ConfigError(
            f"the folder {folder} has checkpoints already, the newest of step {existing[-1][0]}",
            allowed="a folder without checkpoints",
            remedy=f"continue that run with --resume {folder}, or choose another folder with --checkpoint",
        )


def wait_until_free(folder: Path, within_s: float) -> None:
    """Wait at most ``within_s`` until no run writes checkpoints to ``folder``: a killed process may end late."""
    if not folder.is_dir():
        return
    handle, until = os.open(folder, os.O_RDONLY), time.monotonic() + within_s
    try:
        while not lock(handle) and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        os.close(handle)


class CheckpointFolder:
    """The folder to which one run at a time writes its checkpoints; keeps the last two.

    Partial files and superfluous checkpoints of a killed run are removed. The run starts at ``step``; checkpoints of
    later steps are damaged (or it would have resumed from them) and are renamed. Raises ``ConfigError``.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"cannot write checkpoints to {folder}: {error.strerror or error}",
                allowed="a folder that you may write to",
                remedy="choose another folder with --checkpoint",
            ) from error
        if not lock(self._handle):  # this process holds the lock until it ends, however it ends
            os.close(self._handle)
            raise ConfigError(
                f"another run is writing its checkpoints to {folder}",
                allowed="a folder for each run",
                remedy="choose another folder with --checkpoint, or wait for that run's end",
            )
        for path in folder.glob(f".checkpoint-*{codec.PARTIAL}"):
            path.unlink(missing_ok=True)
        for later, path in checkpoints(folder):
            if later > step:
                path.replace(path.with_name(f"{path.name}.damaged"))
        self._keep_last()

    def write(self, checkpoint: Checkpoint) -> int:
        """Write a checkpoint durably, then remove the oldest beyond two; returns its bytes. Raises ``NotWritten``."""
        step = checkpoint.header.step
        data = encode(checkpoint)
        try:
            codec.write_bytes(self.folder / f"checkpoint-{step}.safetensors", data)
        except OSError as error:
            raise NotWritten(
                f"cannot write the checkpoint of step {step} ({format_size(len(data))}) to {self.folder}: "
                f"{error.strerror or error}; {self._free()}, the older checkpoints are unchanged",
                remedy="make room there, or resume with another folder: --resume OLD --checkpoint NEW",
            ) from error
        self._keep_last()
        return len(data)

    def _keep_last(self) -> None:
        for _, path in checkpoints(self.folder)[:-_KEPT]:
            with contextlib.suppress(OSError):  # a third checkpoint does no harm
                path.unlink()

    def _free(self) -> str:
        try:
            return f"{format_size(shutil.disk_usage(self.folder).free)} are free there"
        except OSError as error:
            return f"its free space is unknown ({error.strerror or error})"

    def close(self) -> None:
        """Let other runs write to the folder."""
        os.close(self._handle)
