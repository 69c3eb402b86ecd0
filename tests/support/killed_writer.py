"""A process that writes checkpoints until it is killed, and what is in each of them."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from dpsim.plan import Plan
from dpsim.runtime.checkpoint import Checkpoint, CheckpointFolder, Header, checkpoints, read

_ELEMENTS = 200_000


def content(step: int) -> Checkpoint:
    """Return a checkpoint whose numbers all follow from its step."""
    header = Header(
        step=step,
        epoch=step // 7,
        batch=step % 7,
        seed=0,
        training_samples=7,
        run={"step": step},
        plan=Plan(devices=1, global_batch=1),
    )
    tensors = {f"parameters/{name}": np.full(_ELEMENTS, step, np.float32) for name in ("a", "b")}
    return Checkpoint(header=header, tensors=tensors | {"losses": np.arange(step, dtype=np.float64)})


def consistent(path: Path, step: int) -> bool:
    """Return whether a file is the checkpoint of its step. Raises ``FileFormatError`` where it is damaged."""
    stored, expected = read(path), content(step)
    return (
        stored.tensors.keys() == expected.tensors.keys()
        and stored.header == expected.header
        and all(np.array_equal(stored.tensors[name], value) for name, value in expected.tensors.items())
    )


def write_for_ever(folder: str, connection: Connection) -> None:
    """Write a checkpoint of each step after the newest one; send each step once its checkpoint is written."""
    step = max((step for step, _ in checkpoints(Path(folder))), default=0)
    writing = CheckpointFolder(Path(folder), step)
    connection.send(step)
    connection.recv()
    while True:
        step += 1
        writing.write(content(step))
        connection.send(step)
