"""Processes that take cores in bursts, as other users of a shared machine do; they end when their parent ends.

``python tests/support/neighbour.py`` works 200 ms and sleeps 300 ms on one core, until it is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; where it cannot, ``disturb`` looks for itself."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def disturb(parent: int, work_s: float, sleep_s: float, seconds: float) -> None:
    """Work and sleep in turns for some seconds, or until the parent has ended."""
    end_with(parent)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and os.getppid() == parent:
        pause_s = time.monotonic() + work_s
        while time.monotonic() < pause_s:
            pass
        time.sleep(sleep_s)


@contextmanager
def busy(core: int, work_s: float = 0.2, sleep_s: float = 0.0) -> Iterator[None]:
    """A process that computes on a core meanwhile."""
    times = f"--work-ms {work_s * 1e3} --sleep-ms {sleep_s * 1e3} --seconds 60 --core {core}"
    with subprocess.Popen([sys.executable, __file__, *times.split()], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    """Start the processes, and end with them or with the process that started this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-ms", type=float, default=200.0)
    parser.add_argument("--sleep-ms", type=float, default=300.0, help="0: always busy")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--core", type=int, help="the core to stay on")
    given = parser.parse_args()
    end_with(os.getppid())
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    print("computing", flush=True)
    arguments = os.getpid(), given.work_ms / 1e3, given.sleep_ms / 1e3, given.seconds
    others = [multiprocessing.Process(target=disturb, args=arguments) for _ in range(given.processes - 1)]
    for process in others:
        process.start()
    disturb(os.getppid(), *arguments[1:])
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
