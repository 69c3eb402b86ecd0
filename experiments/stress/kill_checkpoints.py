"""Kills a process that writes checkpoints, at random moments, and checks the files that it leaves.

``python -m dpsim.experiments.stress.kill_checkpoints [--rounds 1000] [--seed 0]``. A kill must leave every file
that has a checkpoint's name whole, and the newest must be the last one that was reported as written, or the one after
it. The process is killed, not the machine: what a power cut leaves depends on the disk, which this does not test.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from dpsim.experiments.stress.rounds import run_rounds
from dpsim.plan import Plan
from dpsim.runtime.checkpoint import Checkpoint, CheckpointFolder, Header, checkpoints, read

_ELEMENTS = 200_000
_LONGEST_S = 0.06


def content(step: int) -> Checkpoint:
    """A checkpoint whose numbers all follow from its step."""
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
    """Whether a file is the checkpoint of its step. Raises ``FileFormatError`` where it is damaged."""
    stored, expected = read(path), content(step)
    return (
        stored.tensors.keys() == expected.tensors.keys()
        and stored.header == expected.header
        and all(np.array_equal(stored.tensors[name], value) for name, value in expected.tensors.items())
    )


def write_for_ever(folder: str, connection: Connection) -> None:
    """Write a checkpoint of each step after the newest one; send each step once its checkpoint is written."""
    begin = max((step for step, _ in checkpoints(Path(folder))), default=0)
    writing = CheckpointFolder(Path(folder), begin)
    connection.send(begin)
    connection.recv()
    step = begin
    while True:
        step += 1
        writing.write(content(step))
        connection.send(step)


def kill_rounds(rounds: int, seed: int, folder: Path) -> tuple[int, int]:
    """(checkpoints written, kills in the middle of writing one) of ``rounds`` kills at random moments.

    Raises ``AssertionError`` or ``FileFormatError`` at the first kill that leaves anything but whole checkpoints.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["dpsim.runtime.checkpoint"])
    moments = random.Random(seed)
    midway, last = 0, 0
    for number in range(rounds):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=write_for_ever, args=(str(folder), theirs))
        process.start()
        theirs.close()
        try:
            last = ours.recv()  # it has begun, and removed what the last kill left
            if list(folder.glob(".*")):
                raise AssertionError(f"kill {number}: the next start left {sorted(folder.glob('.*'))}")
            ours.send("go")
            time.sleep(moments.uniform(0, _LONGEST_S))
        finally:
            process.kill()
            process.join()
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                last = ours.recv()
        midway += any(folder.glob(".*.partial"))
        left = checkpoints(folder)
        if last and not (left and left[-1][0] in (last, last + 1)):
            raise AssertionError(f"kill {number}: step {last} was written, and the folder has {left}")
        for step, path in left:
            if not consistent(path, step):
                raise AssertionError(f"kill {number}: {path} is not of its step")
        if len(left) > 3:
            raise AssertionError(f"kill {number}: {len(left)} checkpoints are kept")
    return max(last, left[-1][0] if left else 0), midway


def main() -> int:
    rounds, (written, midway) = run_rounds(__doc__, 1000, kill_rounds)
    print(f"{rounds}, each with a kill, {midway} of them in the middle of writing a file;", end=" ")
    print(f"{written} checkpoints written, none torn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
