"""Runs a task on MPI ranks: starts them with ``mpiexec``, or uses the ranks of the job it already runs in.

Loads no MPI library outside such a job, so that a command that starts ranks stays an ordinary process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import dpsim
from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import control_channel, failure_report, hosts, mpiexec, scratch
from dpsim.launch.failure_report import JobFailed as JobFailed

Progress = Callable[[str], None]

THREAD_PINS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Each rank computes with one thread, unless the user has set these."""

_INSTALL = "install an MPI library into this Python: pip install 'dpsim[mpich]'"
_LAST_ORDINARY_STEP = 0xFFFF_FFF0  # step numbers from here on are Slurm's own (batch script, interactive shell)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The MPI job this process was started in; ``size`` is None where the launcher does not tell."""

    launcher: str
    rank: int
    size: int | None


def job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The MPI job that this process is a rank of, from its launcher's variables; None outside one."""

    def number(key: str) -> int | None:
        text = environment.get(key, "")
        return int(text) if text.isdecimal() else None

    for launcher, rank_key, size_key in (
        ("mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ):
        if (rank := number(rank_key)) is not None:
            return Job(launcher=launcher, rank=rank, size=number(size_key))
    rank, step, tasks = number("SLURM_PROCID"), number("SLURM_STEP_ID"), number("SLURM_STEP_NUM_TASKS")
    if rank is not None and step is not None and step < _LAST_ORDINARY_STEP and (tasks or 0) > 1:
        return Job(launcher="srun", rank=rank, size=tasks)
    if (rank := number("PMIX_RANK")) is not None:
        return Job(launcher="a PMIx launcher", rank=rank, size=None)
    return None


def on_ranks(
    task: str,
    argument: dict[str, Any],
    *,
    devices: int,
    progress: Progress | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    pin: bool = False,
    stdout: bool = False,
    watch: bool = False,
) -> Any:
    """Rank 0's result of ``task`` ("module:function") on ``devices`` MPI ranks.

    The function is called on every rank as ``function(comm, argument, progress)``; argument and result are
    plain JSON values (infinity allowed). Progress of rank 0 reaches ``progress``, everything the ranks print
    goes to stderr. ``env`` adds variables to the ranks' environment, ``timeout_s`` bounds the whole job
    and ``pin`` binds each rank to a core; ``env`` and ``timeout_s`` mean nothing to ranks that already run. With
    ``stdout`` what the ranks print to stdout goes there. The hosts are those of ``dpsim.launch.hosts.chosen``. With
    ``watch`` all ranks that are killed at once are known (``JobFailed.lost``), not just the first; on Linux, in a job
    that is started here.

    Inside an MPI job the given ranks are used; there only rank 0 returns, and the other ranks serve until it
    ends and then raise ``SystemExit(0)``.

    Raises the ``DpsimError`` that a rank raised; ``JobFailed`` when a rank raised anything else or was killed
    (the first failure counts); ``CommunicationError`` without a working MPI; ``ConfigError`` when the job
    has fewer ranks than ``devices``.
    """
    if devices < 1:
        raise ConfigError(f"devices is {devices}", allowed="1 or more")
    if importlib.util.find_spec("mpi4py") is None:
        raise CommunicationError("the Python package mpi4py is not installed", remedy=_INSTALL)
    if job() is not None:
        from dpsim.launch import attached_job

        return attached_job.run(task, argument, devices=devices, progress=progress, pin=pin)
    machines = hosts.chosen(devices)
    command = [*_mpiexec(machines), "-n", str(devices), sys.executable, "-P", "-m", "dpsim.launch.worker", task]
    seen = failure_report.JobState()
    request = {"argument": argument, "devices": devices, "pin": pin, "watch": watch}
    elsewhere = hosts.elsewhere(machines)
    listener = control_channel.Listener(devices, request, seen, progress or _ignore, everywhere=elsewhere)
    with contextlib.closing(listener), scratch.scratch("job") as folder:
        environment = _environment(env) | listener.environment | scratch.environment(folder)
        if not elsewhere:  # other hosts do not have the folder
            environment["TMPDIR"] = str(folder)
        code = mpiexec.run(command, folder, listener, seen, environment, timeout_s, stdout=stdout)
    if code == 0 and seen.result:
        return seen.result[0]
    if elsewhere and not seen.pids and code > 0:
        names = ", ".join(host.name for host in machines)
        raise CommunicationError(
            f"no rank could be started on the hosts {names}: mpiexec ended with exit code {code}",
            allowed="hosts that this one reaches by ssh without a password",
            remedy="try ssh HOST true for each, and mend the hostfile",
        )
    raise failure_report.failure(code, seen, devices)


def _ignore(_: str) -> None:
    pass


def mpiexec_path() -> str | None:
    """The ``mpiexec`` of this Python's own environment, else the one on PATH."""
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    if (user := sysconfig.get_preferred_scheme("user")) in sysconfig.get_scheme_names():
        folders.append(sysconfig.get_path("scripts", user))
    return shutil.which("mpiexec", path=os.pathsep.join(folders)) or shutil.which("mpiexec")


def mpiexec_flavour(path: str) -> str:
    """``mpich`` (also for Intel MPI, which has the same launcher), ``openmpi`` or ``unknown``."""
    try:
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommunicationError(f"{path} does not run: {error}", remedy=_INSTALL) from error
    text = shown.stdout + shown.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    return "mpich" if "HYDRA" in text or "Intel" in text else "unknown"


def _mpiexec(machines: tuple[hosts.Host, ...]) -> list[str]:
    path = mpiexec_path()
    if path is None:
        raise CommunicationError("there is no mpiexec beside this Python or on PATH", remedy=_INSTALL)
    flavour = mpiexec_flavour(path)
    flags = hosts.mpiexec_arguments(machines, flavour)
    if flavour != "openmpi":
        return [path, *flags]
    for variable in (control_channel.VARIABLE, "PYTHONPATH", *THREAD_PINS) if machines else ():
        flags += ["-x", variable]  # mpich hands on the whole environment, Open MPI only to its own machine
    return [path, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", *flags]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    environment = {name: "1" for name in THREAD_PINS} | dict(os.environ) | dict(extra or {})
    root = Path(dpsim.__file__).resolve().parents[1]
    if root != Path(sysconfig.get_path("purelib")).resolve():  # a checkout: the ranks must find the same one
        paths = [str(root), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    return environment


def serve() -> NoReturn:
    """For ranks other than 0 of a job: do rank 0's tasks until it ends, then raise ``SystemExit(0)``."""
    if importlib.util.find_spec("mpi4py") is not None:
        from dpsim.launch import attached_job

        attached_job.serve()
    raise SystemExit(0)


def release() -> None:
    """For rank 0 of a job, once nothing more is to do: let the ranks that serve end."""
    if importlib.util.find_spec("mpi4py") is not None:
        from dpsim.launch import attached_job

        attached_job.release()
