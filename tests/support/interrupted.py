"""Commands that are killed while they measure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from python_path import extended_path

ROOT = Path(__file__).parents[2]


def killed_once_it_exists(saved: Path, arguments: Sequence[str | Path]) -> None:
    """Run Python with these arguments, kill it once a file exists, and wait until its ranks no longer change that."""
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": extended_path(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        until_s = time.monotonic() + 180
        while not saved.exists():
            assert process.poll() is None and time.monotonic() < until_s, "it never came to measure"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 10
    while _changes(saved):
        assert time.monotonic() < until_s, "the ranks of a killed command go on"
        time.sleep(0.02)


def _changes(saved: Path) -> bool:
    """Whether a file that is saved after every round still changes; a round takes less than a second."""
    before = saved.stat().st_mtime_ns
    time.sleep(1.0)
    return saved.stat().st_mtime_ns != before
