"""Kills a process that writes checkpoints, at random moments, and looks at what it leaves.

``python -m dpsim.experiments.stress.kill_checkpoints [--rounds 1000] [--seed 0]``. A kill must leave every file
that has a checkpoint's name whole, the newest at or after the last one that was reported as written. (A kill of
the process, not of the machine: what a power cut leaves depends on the disk, and cannot be shown so.)
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from dpsim.launch.scratch import scratch
from dpsim.plan import Plan
from dpsim.runtime.checkpoint import Checkpoint, CheckpointFolder, Header, checkpoints, read

_ELEMENTS = 200_000
_LONGEST_S = 0.06


def content(step: int) -> Checkpoint:
    """A checkpoint whose every number tells its step."""
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
    found, wanted = read(path), content(step)
    same = found.tensors.keys() == wanted.tensors.keys()
    return (
        same
        and found.header == wanted.header
        and all(np.array_equal(found.tensors[name], value) for name, value in wanted.tensors.items())
    )


def write_for_ever(folder: str, told: Connection) -> None:
    """Checkpoints one after another, on from the newest; tells each step once its checkpoint is written."""
    begin = max((step for step, _ in checkpoints(Path(folder))), default=0)
    writing = CheckpointFolder(Path(folder), begin)
    told.send(begin)
    told.recv()
    step = begin
    while True:
        step += 1
        writing.write(content(step))
        told.send(step)


def kill_rounds(rounds: int, seed: int, folder: Path) -> tuple[int, int]:
    """So many kills, each at a random moment; (checkpoints written, kills in the middle of writing one).

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
            last = ours.recv()  # it has begun, and removed what the kill before has left
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
        found = checkpoints(folder)
        if last and not (found and found[-1][0] in (last, last + 1)):
            raise AssertionError(f"kill {number}: step {last} was written, and the folder has {found}")
        for step, path in found:
            if not consistent(path, step):
                raise AssertionError(f"kill {number}: {path} is not of its step")
        if len(found) > 3:
            raise AssertionError(f"kill {number}: {len(found)} checkpoints are kept")
    return max(last, found[-1][0] if found else 0), midway


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with scratch("kill") as folder:
        begin_s = time.monotonic()
        written, midway = kill_rounds(asked.rounds, asked.seed, folder / "run")
        took_s = time.monotonic() - begin_s
    print(f"{asked.rounds} kills in {took_s:.0f} s, {midway} of them in the middle of writing a file;", end=" ")
    print(f"{written} checkpoints written, none torn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
