"""A process beside a measurement that computes for a while, sleeps for a while, and begins again.

``python tests/support/neighbour.py SECONDS [WORK_S SLEEP_S [CORE]]``: by default 200 ms of work and 300 ms of sleep.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def run(seconds: float, work_s: float = 0.2, sleep_s: float = 0.3, core: int | None = None) -> None:
    """Compute and sleep in turns on one core for so many seconds, or until whoever started it is gone."""
    parent, end_s = os.getppid(), time.monotonic() + seconds
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0)) if core is None else core})
    while time.monotonic() < end_s and os.getppid() == parent:
        until_s = time.monotonic() + work_s
        while time.monotonic() < until_s:
            pass
        time.sleep(sleep_s)


@contextmanager
def busy(core: int, work_s: float = 0.2, sleep_s: float = 0.0) -> Iterator[None]:
    """A process that computes on a core meanwhile."""
    times = map(str, (60.0, work_s, sleep_s, core))
    with subprocess.Popen([sys.executable, __file__, *times], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    seconds, *times = map(float, sys.argv[1:])
    print("computing", flush=True)
    run(seconds, *times[:2], core=int(times[2]) if len(times) > 2 else None)
