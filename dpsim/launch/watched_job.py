"""Starts a user's own job with an environment in which each of its Python processes watches its DDP model for a while.

The job is no part of dpsim: it has the terminal, its signals and its exit code, and goes on if dpsim is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.launch.job_python import job_environment

VARIABLE = "DPSIM_WATCH"
"""Has the number of steps and the folder of the records, separated by a colon."""
ANSWER = "answer.json"
"""The file of that folder in which the job finds what its records say."""
_STARTUP = Path(__file__).parents[1] / "torch" / "script" / "probe" / "startup"
_POLL_S = 0.1
_LAST_RANK_S = 15.0
"""Seconds after the first rank's record to wait for those of the others."""


def check_command(command: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a command that cannot be started."""
    if not command:
        raise ConfigError("no job to watch", allowed="a command after --", remedy="dpsim explain -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no command {command[0]!r}",
            allowed="a program, such as torchrun, python or accelerate",
            remedy="start a script by its interpreter: dpsim explain -- python train.py",
        )


def is_watched() -> bool:
    """Return whether this process is itself part of a watched job."""
    return VARIABLE in os.environ


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job. Ctrl-C on the terminal reaches it by itself; another SIGINT of this process is passed on to it."""
    job = subprocess.Popen(command, env=environment)

    def passed_on(number: int, _: FrameType | None) -> None:
        if not _has_the_terminal():
            job.send_signal(number)

    before = signal.signal(signal.SIGINT, passed_on)
    try:
        yield job
    finally:
        signal.signal(signal.SIGINT, before)
        if job.poll() is None:
            print(f"dpsim: no longer watching; the job goes on (process {job.pid})", file=sys.stderr)


def environment(folder: Path | None, steps: int, program: str = "python") -> dict[str, str]:
    """Return the environment of a job that begins with this program; without a folder nothing in it watches."""
    own = job_environment(program)
    if folder is None:
        return own
    paths = [str(_STARTUP), *filter(None, [own.get("PYTHONPATH")])]
    return own | {VARIABLE: f"{steps}:{folder}", "PYTHONPATH": os.pathsep.join(paths)}


def records(
    job: subprocess.Popen[bytes], folder: Path, complete: Callable[[Sequence[Path]], bool], look: Callable[[], None]
) -> tuple[Path, ...]:
    """Return the files that the job's ranks have left once they are ``complete``, or no more will come.

    ``look`` is called again and again meanwhile.
    """
    first_s, before = math.inf, tuple[Path, ...]()
    while True:
        ended = ends_within(job, _POLL_S)
        look()
        files = tuple(sorted(folder.glob("rank-*.json")))
        if files:
            first_s = min(first_s, now())
        if ended or now() - first_s > _LAST_RANK_S or (files != before and complete(files)):
            return files
        before = files


def ends_within(job: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Wait so long for the job's end; whether it has come."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(seconds)
        return True
    return False


def exit_code(job: subprocess.Popen[bytes]) -> int:
    """Return the job's exit code as a shell gives it."""
    code = job.wait()
    return code if code >= 0 else 128 - code


def _has_the_terminal() -> bool:
    """Return whether this process's group is that to which a terminal sends Ctrl-C."""
    with contextlib.suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
