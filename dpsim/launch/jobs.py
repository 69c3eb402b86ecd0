"""Runs a task on MPI ranks: starts them with ``mpiexec``, or uses the ranks of the job that this process is part of.

Outside such a job no MPI library is loaded, so that a command that starts ranks stays an ordinary process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim import installation, processor
from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import control_channel, hosts, mpiexec, program, rank_process, scratch
from dpsim.launch.failure_report import JobFailed as JobFailed
from dpsim.launch.failure_report import JobState, failure
from dpsim.launch.protection import Protection, protected
from dpsim.launch.rank_info import job
from dpsim.launch.rank_process import THREAD_VARIABLES, WITHOUT_TERMINAL_SIGNALS
from dpsim.launch.shaped import VARIABLE
from dpsim.progress import Progress, no_progress

if TYPE_CHECKING:
    from dpsim.launch.shaped.hosts import ShapedHosts
    from dpsim.network import Network

_INSTALL = f"install an MPI library into this Python: {installation.install('mpich')}"
_ON_THE_LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
"""Keep the ranks' ports from the network where all ranks are on this machine. Only mpiexec's own port is open to it."""
_ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
"""Otherwise mpich's mpiexec starts ranks with the scheduler's program in a batch job, by what the job was given."""
_WITHOUT_DEBUG_SIGNAL = {"UCX_DEBUG_SIGNO": "0"}
"""Otherwise a rank that gets SIGHUP prints all that UCX does from then on."""


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
    outlives: bool = False,
    protection: Protection | None = None,
    show: Callable[[str], None] = mpiexec.to_stderr,
    networks: Iterable[str] = (),
    on_hosts: Sequence[int] = (),
) -> Any:
    """Return rank 0's result of ``task`` ("module:function") on ``devices`` MPI ranks.

    The function is called on every rank as ``function(comm, argument, progress)``; argument and result are plain JSON
    values (infinity is allowed). Rank 0's progress reaches ``progress``. What the ranks print is shown by ``show``
    where dpsim starts them; with ``stdout``, what they print to stdout goes to stdout.

    ``env`` adds variables to the ranks' environment, ``timeout_s`` limits the duration of the job, and ``pin`` binds
    each rank to a core. The ranks run on the hosts of ``dpsim.launch.hosts.selected``. With ``watch`` (on Linux),
    ``JobFailed.lost`` counts all ranks that were killed, not just the first. With ``outlives`` (on Linux) the job goes
    on when ranks are killed that are ``rank_process.independent``, and any rank may return the result. Under
    ``protection`` the ranks change no file of the user's; all see what one of them writes. Where ``networks`` are
    shaped ones, each rank is on a host of theirs, or so many ranks on each of the first as ``on_hosts`` says; a rank
    asks for the links of one by ``dpsim.comm.shaped``.

    Inside an MPI job the job's own ranks are used, and all of these but ``pin`` have no effect. There the
    call returns on rank 0 only; the other ranks serve until rank 0 ends, and then raise ``SystemExit(0)``.

    Raises the ``DpsimError`` that a rank raised; ``JobFailed`` if a rank raised any other exception or was killed
    (the first failure counts); ``CommunicationError`` without a working MPI; ``ConfigError`` if the job has fewer
    ranks than ``devices``.
    """
    from dpsim.launch.shaped import links  # loads what no help needs
    from dpsim.launch.shaped.hosts import shaped_hosts
    from dpsim.network import hosts_of

    if devices < 1:
        raise ConfigError(f"devices is {devices}", allowed="1 or more")
    if importlib.util.find_spec("mpi4py") is None:
        raise CommunicationError("the Python package mpi4py is not installed", remedy=_INSTALL)
    attached = job() is not None
    shaped = hosts_of(networks) if devices > 1 else ()
    machines = () if attached else hosts.selected(devices)
    remote = hosts.any_remote(machines)
    if attached or remote:
        _check_unprotected(protection)
    _check_shaped(shaped, devices, elsewhere=attached or bool(machines))
    progress = progress or no_progress
    if attached:
        return rank_process.run_attached(task, argument, devices=devices, progress=progress, pin=pin)
    worker = [*WITHOUT_TERMINAL_SIGNALS, sys.executable, "-P", "-m", "dpsim.launch.worker", task]
    command = [*_mpiexec(machines, shaped), "-n", str(devices), *worker]
    watch = watch or bool(shaped)  # mpiexec does not say which signal killed a rank of another host
    request = {"argument": argument, "devices": devices, "pin": pin, "watch": watch, "outlives": outlives}
    state = JobState(outlives=outlives)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch.scratch("job"))
        environment = _environment(env) | scratch.environment(folder)
        between = stack.enter_context(shaped_hosts(shaped, folder)) if shaped else None
        near = between.launcher.parent if between is not None else None
        listener = control_channel.Listener(devices, request, state, progress, all_interfaces=remote, between=near)
        stack.enter_context(contextlib.closing(listener))
        if between is not None:
            links.check(shaped, between.environment[VARIABLE])
            command = between.mpiexec(command, on_hosts or [1] * devices)
            environment |= between.environment
            listener.add(_HostsEnd(between, state))
        environment |= listener.environment
        if not remote:
            environment = _local_environment(environment, folder)
        if protection is not None:
            command = protected(command, protection, folder)
        if between is not None:
            command = [*between.enter, *command]
        code = mpiexec.run(command, folder, listener, state, environment, timeout_s, stdout=stdout, show=show)
    if code == 0 and state.result:
        return state.result[0]
    if remote and not state.pids and code > 0:
        raise _unreachable(machines, code)
    raise failure(code, state, devices)


def _check_unprotected(protection: Protection | None) -> None:
    """Refuse ``protection`` on ranks that this process does not start, or that are on other hosts."""
    if protection is not None:
        raise ConfigError(
            "a script whose files are protected, on ranks of another launcher or on other hosts",
            allowed="ranks that dpsim starts on this machine",
            remedy="start dpsim without mpiexec, srun and hostfile, or let the script change files: --script-may-write",
        )


class _HostsEnd(control_channel.Lines):
    """The output of the process that holds shaped hosts: where it ends, the hosts have ended before the ranks."""

    def __init__(self, hosts: ShapedHosts, state: JobState) -> None:
        assert hosts.switch.stdout is not None
        super().__init__(hosts.switch.stdout, lambda line: None)
        self._hosts, self._state = hosts, state

    def read(self) -> bool:
        """Read what has arrived. False where the hosts have ended."""
        if goes_on := super().read():
            return goes_on
        from dpsim.launch.shaped.hosts import ending

        self._state.hosts_ended = ending(self._hosts.switch)
        return False


def _check_shaped(shaped: tuple[Network, ...], devices: int, *, elsewhere: bool) -> None:
    """Refuse more ranks than hosts, and ranks that this process does not start or that a hostfile places."""
    if shaped and elsewhere:
        raise ConfigError(
            f"the network {shaped[0].token} on ranks of another launcher or of a hostfile",
            allowed="ranks that dpsim starts on this machine",
            remedy="start dpsim without mpiexec, srun and hostfile",
        )
    if shaped and devices > shaped[0].hosts:
        raise ConfigError(
            f"{devices} devices on {shaped[0].token}",
            allowed=f"1 to {shaped[0].hosts} devices: each is a host",
            remedy="give the network more hosts, or use fewer devices",
        )


def _unreachable(machines: tuple[hosts.Host, ...], code: int) -> CommunicationError:
    """Return the error of hosts on which no rank could be started."""
    names = ", ".join(host.name for host in machines)
    return CommunicationError(
        f"no rank could be started on the hosts {names}: mpiexec ended with exit code {code}",
        allowed="hosts that this one reaches by ssh without a password",
        remedy="try ssh HOST true for each, and correct the hostfile",
    )


def mpiexec_path() -> str | None:
    """Return the ``mpiexec`` of this Python's own environment, otherwise the one on PATH."""
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    if (user := sysconfig.get_preferred_scheme("user")) in sysconfig.get_scheme_names():
        folders.append(sysconfig.get_path("scripts", user))
    return shutil.which("mpiexec", path=os.pathsep.join(folders)) or shutil.which("mpiexec")


def check_launcher() -> None:
    """Raise ``CommunicationError`` where no ranks can be started: for what takes long before it starts some."""
    if job() is None:
        _path_of_mpiexec()


def _path_of_mpiexec() -> str:
    path = mpiexec_path()
    if path is None:
        raise CommunicationError("there is no mpiexec next to this Python or on PATH", remedy=_INSTALL)
    return path


def mpiexec_flavour(path: str) -> str:
    """Return ``mpich`` (also for Intel MPI, which has the same launcher), ``openmpi`` or ``unknown``."""
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


def _mpiexec(machines: tuple[hosts.Host, ...], shaped: tuple[Network, ...] = ()) -> list[str]:
    path = _path_of_mpiexec()
    flavour = mpiexec_flavour(path)
    if shaped and flavour != "mpich":
        raise ConfigError(
            f"the network {shaped[0].token} with the mpiexec {path}, which is not mpich's",
            allowed="mpich or Intel MPI, whose mpiexec starts ranks on any host by a command of its own",
            remedy=_INSTALL,
        )
    flags = hosts.mpiexec_arguments(machines, flavour)
    if flavour != "openmpi":
        return [path, *flags]
    limit = (processor.VARIABLE,) if processor.limited() else ()
    for variable in (
        (control_channel.VARIABLE, program.VARIABLE, "PYTHONPATH", *THREAD_VARIABLES, *limit) if machines else ()
    ):
        flags += ["-x", variable]  # mpich passes on the whole environment; Open MPI does so only on its own machine
    return [path, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", *flags]


def _local_environment(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the environment for ranks on this machine alone; other hosts do not have the folder."""
    local = _ON_THE_LOOPBACK | _ON_THIS_MACHINE | environment | {"TMPDIR": str(scratch.short_path(folder, folder))}
    if (shared := scratch.shared_folder(folder)) is not None:
        local["UCX_POSIX_DIR"] = str(shared)
    return local


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    own = processor.numba_variables()  # refuses a bad limit here, before the ranks start
    defaults = {name: "1" for name in THREAD_VARIABLES} | _WITHOUT_DEBUG_SIGNAL
    environment = defaults | dict(os.environ) | own | dict(extra or {})
    if (checkout := installation.checkout()) is not None:
        paths = [str(checkout), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment
