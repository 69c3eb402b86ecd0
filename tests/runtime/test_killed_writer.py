"""A writer of checkpoints is killed, not the machine: what a power cut leaves depends on the disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from pathlib import Path

import pytest
from damage import attacked
from hypothesis import event, given
from hypothesis import strategies as st
from killed_writer import consistent, write_for_ever

from dpsim.runtime.checkpoint import checkpoints

MOST_KEPT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one writer after another goes on in."""
    return tmp_path_factory.mktemp("killed") / "runs"


@attacked(few=20)
@given(delay_s=st.floats(0, 0.06))
def test_a_killed_writer_leaves_whole_checkpoints_and_the_last_one_that_it_reported(
    delay_s: float, folder: Path
) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["dpsim.runtime.checkpoint"])
    ours, theirs = processes.Pipe()
    process = processes.Process(target=write_for_ever, args=(str(folder), theirs))
    process.start()
    theirs.close()
    try:
        written = ours.recv()  # it has begun, and removed what the last kill left
        unfinished = list(folder.glob(".*"))
        ours.send("go")
        time.sleep(delay_s)
    finally:
        process.kill()
        process.join()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            written = ours.recv()
    event("killed while it wrote a file" if any(folder.glob(".*.partial")) else "killed between two files")
    assert unfinished == []
    left = checkpoints(folder)
    assert not written or left[-1][0] in (written, written + 1)
    assert len(left) <= MOST_KEPT
    assert all(consistent(path, step) for step, path in left)
