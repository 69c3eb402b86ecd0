"""``python -m dpsim.experiments.one_node_slurm COMMAND...`` runs a command beside a Slurm of this one machine.

For CI, and to try job arrays without a cluster: as root, with the packages slurm-wlm and munge of Debian.
There is no accounting, and no cgroup is needed. Slurm ends with the command, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dpsim.errors import CommunicationError
from dpsim.experiments.command import ended, tell

_PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
_FOLDERS = os.pathsep.join(["/usr/sbin", "/sbin"])
_READY_S, _END_S = 60.0, 20.0
_CONFIGURATION = """\
ClusterName=dpsim
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def unusable() -> str:
    """Return why no Slurm can be started here; empty if it can."""
    if os.geteuid() != 0:
        return "a Slurm of one machine is started by root"
    missing = [name for name in _PROGRAMS if _path_of(name) is None]
    return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge" if missing else ""


@contextlib.contextmanager
def one_node_slurm(cpus: int = 2) -> Iterator[dict[str, str]]:
    """Start Slurm on this machine, as a node of so many CPUs; yields the environment in which jobs are submitted.

    When the context ends, so do all jobs and daemons. Raises ``CommunicationError`` where it cannot be started.
    """
    if reason := unusable():
        raise CommunicationError(f"no Slurm can be started: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        folder.chmod(0o711)  # munged runs as its own user
        configuration = folder / "slurm.conf"
        ports = _free_ports(2)
        configuration.write_text(
            _CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports, cpus=cpus)
        )
        for name in ("state", "spool", "munge"):
            (folder / name).mkdir()
        (folder / "munge").chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (key, folder / "munge"):
            shutil.chown(path, "munge", "munge")
        environment = {**os.environ, "SLURM_CONF": str(configuration)}
        files = {name: f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")}
        munged = ["munged", "--foreground", f"--socket={folder}/munge/socket", *files.values()]
        stack.enter_context(_daemon(munged, folder, environment, user="munge"))
        _until((folder / "munge" / "socket").exists, "munged", folder)
        stack.enter_context(_daemon(["slurmctld", "-D", "-i"], folder, environment))
        stack.enter_context(_daemon(["slurmd", "-D"], folder, environment))
        _until(lambda: _answer(["sinfo", "-h", "-o", "%T"], environment) == "idle", "slurmd", folder)
        try:
            yield environment
        finally:
            _answer(["scancel", "--user=root"], environment)
            with contextlib.suppress(CommunicationError):
                _until(lambda: not _answer(["squeue", "-h"], environment), "scancel", folder, _END_S)


@contextlib.contextmanager
def _daemon(command: Sequence[str], folder: Path, environment: Mapping[str, str], user: str = "root") -> Iterator[None]:
    path = _path_of(command[0])
    assert path is not None
    with (
        (folder / f"{Path(path).name}.log").open("w") as log,
        subprocess.Popen(
            [path, *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            user=user,
            group=user,
            extra_groups=[],
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), _FOLDERS]))


def _answer(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_READY_S, check=False)
    return done.stdout.strip()


def _until(holds: Callable[[], bool], what: str, folder: Path, seconds: float = _READY_S) -> None:
    end_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end_s:
            logs = "\n".join(path.read_text(errors="replace")[-500:] for path in folder.glob("*.log"))
            raise CommunicationError(f"{what} is not ready after {seconds:.0f} s: {logs}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        tell(__doc__ or "")
        return 2
    with one_node_slurm() as environment:
        return subprocess.run(sys.argv[1:], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(ended("one_node_slurm", _main))
