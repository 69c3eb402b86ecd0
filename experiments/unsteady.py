"""An emulated disturbance: makes every core of this machine change its speed by itself, as some machines do.

``python -m dpsim.experiments.unsteady -- COMMAND ...`` runs a command while each core flips between full speed and a
slower one, each lasting a random 0.2 to 1 s. A process on each core takes a fixed share of it, in windows that open on
all slow cores at the same moments, so that two slow cores wait for each other no more than two evenly slow ones would.
What is measured under it is of an emulated machine and belongs in no report. It asks for real-time priority.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np

from dpsim.comm.clock import now, sharpen_sleep, sleep_until
from dpsim.experiments import command
from dpsim.launch.child_process import end_with_parent

_PERIOD_S = 500e-6
_SHORTEST_S, _LONGEST_S = 0.2, 1.0
_REAL_TIME = os.sched_param(1)


def disturb(core: int, slowdown: float, seed: int) -> None:
    """Flip one core between full speed and ``1 / slowdown`` of it, until killed, or the command's process has ended."""
    if follow := end_with_parent(signal.SIGKILL):
        follow()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, _REAL_TIME)
    sharpen_sleep()
    random = np.random.default_rng([seed, core])
    busy_s = _PERIOD_S * (1 - 1 / slowdown)
    slow = bool(random.integers(2))
    while True:
        end_s = now() + random.uniform(_SHORTEST_S, _LONGEST_S)
        period = int(now() / _PERIOD_S) + 1
        while slow and period * _PERIOD_S < end_s:  # compute in the first ``busy_s`` of every period
            sleep_until(period * _PERIOD_S)
            while now() < period * _PERIOD_S + busy_s:
                pass
            period = max(period, int(now() / _PERIOD_S)) + 1
        if not slow:
            sleep_until(end_s)
        slow = not slow


def main() -> int:
    """Run a command beside the disturbance; its exit code."""
    options = command.parser("unsteady", __doc__)
    options.add_argument("--slowdown", type=float, default=1.45, help="how much slower a core is while it is slow")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("command", nargs="+")
    given = options.parse_args()
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, _REAL_TIME)
    except PermissionError:
        command.tell(
            "unsteady: this user may not ask for real-time priority; allowed: root, or a limit on rtprio above 0; "
            "raise it with ulimit -r 1"
        )
        return 2
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    disturbers = [
        multiprocessing.Process(target=disturb, args=(core, given.slowdown, given.seed), daemon=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    for process in disturbers:
        process.start()
    try:
        return subprocess.run(given.command, check=False).returncode
    finally:
        for process in disturbers:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
