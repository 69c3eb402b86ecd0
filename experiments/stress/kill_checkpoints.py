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
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from dpsim.errors import FileFormatError
from dpsim.experiments.stress.tally import Outcome, Part, main
from dpsim.plan import Plan
from dpsim.runtime.checkpoint import Checkpoint, CheckpointFolder, Header, checkpoints, read

_ELEMENTS = 200_000
_LONGEST_S = 0.06
_MOST_KEPT = 3


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


def run(first: int, last: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """Kill the writer at a random moment, again and again, and look at what it leaves."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["dpsim.runtime.checkpoint"])
    moments, runs = random.Random(f"{seed} {first}"), folder / "runs"
    for number in range(first, last):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=write_for_ever, args=(str(runs), theirs))
        process.start()
        theirs.close()
        try:
            written = ours.recv()  # it has begun, and removed what the last kill left
            wrong = "the next start left unfinished files" if list(runs.glob(".*")) else ""
            ours.send("go")
            time.sleep(moments.uniform(0, _LONGEST_S))
        finally:
            process.kill()
            process.join()
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                written = ours.recv()
        became = "killed while it wrote a file" if any(runs.glob(".*.partial")) else "killed between two files"
        yield Outcome(case=str(number), became=became, wrong=wrong or _wrong(runs, written))


def _wrong(folder: Path, written: int) -> str:
    left = checkpoints(folder)
    if written and not (left and left[-1][0] in (written, written + 1)):
        return f"step {written} was written, and the folder has {left}"
    if len(left) > _MOST_KEPT:
        return f"{len(left)} checkpoints are kept"
    try:
        torn = [path.name for step, path in left if not consistent(path, step)]
    except FileFormatError as error:
        return str(error)
    return f"{', '.join(torn)}: not of its step" if torn else ""


if __name__ == "__main__":
    sys.exit(main("kill_checkpoints", __doc__, {"checkpoints": Part(run, 1000)}))
