"""Job scripts for Slurm and PBS, written and submitted, and what Kubernetes takes, written alone."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from dpsim import installation
from dpsim.codec import Noun
from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import jobs, kubernetes
from dpsim.launch.rank_process import THREAD_VARIABLES
from dpsim.launch.user_program import check_script

_WORD = re.compile(r"[\w.,:/@%+=~^-]+")
_TIME = re.compile(r"(\d{1,6}-)?\d{1,9}(:\d{1,2}){0,2}")
_LAYOUT = re.compile(r"(?:(\d+)x)?(\d+)")
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBMIT = {"slurm": ["sbatch", "--parsable"], "pbs": ["qsub"]}
_PMI = {"mpich": ["--mpi=pmi2"], "openmpi": ["--mpi=pmix"]}


class BatchJob(Noun, frozen=True):
    """The resources that a scheduler is asked for, and a dpsim command or a Python script with its arguments.

    ``devices`` is ``8`` on one node, or ``2x4`` on 2 nodes with 4 ranks each. ``cpus`` is the number of cores of a
    rank, and of its compute threads. ``queue`` is Slurm's partition, or a queue of Kueue. ``image`` is the container
    that Kubernetes runs. Empty values are left out of the script.
    """

    scheduler: Literal["slurm", "pbs", "kubernetes"]
    command: tuple[str, ...]
    devices: str = "1"
    cpus: int = 1
    time: str = "01:00:00"
    name: str = "dpsim"
    output: str = ""
    account: str = ""
    queue: str = ""
    image: str = ""

    def __post_init__(self) -> None:
        if not _LAYOUT.fullmatch(self.devices) or 0 in (self.nodes, self.ranks_per_node):
            raise ConfigError(f"devices is {self.devices!r}", allowed="like 8, or 2x4 for 2 nodes with 4 ranks each")
        if self.cpus < 1:
            raise ConfigError(f"cpus is {self.cpus}", allowed="1 or more")
        if not _TIME.fullmatch(self.time):
            raise ConfigError(f"time is {self.time!r}", allowed="hours:minutes:seconds like 01:00:00")
        for flag in ("name", "output", "account", "queue", "image"):
            if (word := getattr(self, flag)) and not _WORD.fullmatch(word):
                raise ConfigError(f"{flag} is {word!r}", allowed="letters, digits and . , : / @ % + = ~ ^ - _")
        if not self.command:
            raise ConfigError(
                "there is no command to run",
                allowed="a dpsim command or a Python script after --",
                remedy=f"dpsim launch {self.scheduler} --devices {self.devices} -- train --model cnn",
            )
        self._check_kubernetes()
        if self.runs_script and not self.image:
            check_script(self.command[0])
        scripts = {word.partition("=")[0] for word in self.command} & {"--torch-script"}
        if self.command[0] == "sweep" and scripts and self.nodes > 1:
            raise ConfigError(
                f"a sweep of a script on {self.nodes} nodes",
                allowed="one node: DDP trains on ranks of one machine",
                remedy="give a number of devices such as --devices 8; for several nodes predict from a log of their "
                "allreduces (dpsim calibrate --from)",
            )

    def _check_kubernetes(self) -> None:
        """Refuse what Kubernetes has no place for, and an image anywhere else."""
        if self.scheduler != "kubernetes":
            if self.image:
                raise ConfigError(f"image is {self.image!r} for {self.scheduler}", allowed="an image for kubernetes")
            return
        if not self.image:
            raise ConfigError(
                "kubernetes without an image",
                allowed="an image that has dpsim, mpi4py and Open MPI: Kubeflow Trainer starts ranks with no other MPI",
                remedy="build one on mpioperator/openmpi, and name it with --image",
            )
        if not _LABEL.fullmatch(self.name):
            raise ConfigError(f"name is {self.name!r}", allowed="a-z, digits and -, at most 63, a letter first")
        if not _seconds(self.time):
            raise ConfigError(f"time is {self.time!r} for kubernetes", allowed="1 second or more")
        for flag in ("output", "account"):
            if getattr(self, flag):
                raise ConfigError(f"{flag} for kubernetes", allowed="devices, cpus, time, name, queue and image")

    @property
    def nodes(self) -> int:
        return int(self.devices.partition("x")[0]) if "x" in self.devices else 1

    @property
    def ranks_per_node(self) -> int:
        return int(self.devices.rpartition("x")[2])

    @property
    def runs_script(self) -> bool:
        """Whether the command is a user's own Python script."""
        return self.command[:1] != () and self.command[0].endswith(".py")


def job_script(job: BatchJob) -> str:
    """Return the script for ``sbatch`` or ``qsub``; it needs only this Python at the same path on every node.

    For Kubernetes it is what ``kubectl apply -f -`` takes.
    """
    if job.scheduler == "kubernetes":
        return kubernetes.yaml(_manifests(job))
    threads = [f"export {name}={job.cpus}" for name in THREAD_VARIABLES]
    command = f"{_starter(job)} {shlex.join(_command(job))}"
    return "\n".join(["#!/bin/bash", *header(job), "", *preamble(job), *threads, command, ""])


def preamble(job: BatchJob) -> list[str]:
    """Return the lines of a script before its commands: where it runs, and where its Python finds this dpsim."""
    lines = ['cd "$PBS_O_WORKDIR" || exit 1'] if job.scheduler == "pbs" else []
    if (checkout := installation.checkout()) is not None:
        lines.append(f"export PYTHONPATH={shlex.quote(str(checkout))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return lines


def submit(job: BatchJob) -> str:
    """Submit the job; return its id. Raises ``CommunicationError`` if there is no scheduler or it refuses the job."""
    if job.scheduler == "kubernetes":
        raise ConfigError(
            "dpsim submits nothing to kubernetes",
            allowed="--dry-run, which prints the TrainJob and its TrainingRuntime",
            remedy="read what it prints, and pipe it into kubectl apply -f -",
        )
    path = program_of(job.scheduler)
    command = [path, *_SUBMIT[job.scheduler][1:]]
    done = subprocess.run(command, input=job_script(job), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise refused(path, done)
    return done.stdout.strip()


def program_of(scheduler: str) -> str:
    """Return the path of the program that submits jobs. Raises ``CommunicationError`` if there is none."""
    program = _SUBMIT[scheduler][0]
    path = shutil.which(program)
    if path is None:
        raise CommunicationError(
            f"there is no {program} on PATH",
            allowed=f"a machine from which jobs can be submitted to {scheduler}",
            remedy="print the script with --dry-run, and submit it from such a machine",
        )
    return path


def refused(program: str, done: subprocess.CompletedProcess[str]) -> CommunicationError:
    """Return the error of a scheduler that has refused a job, with what it said."""
    said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    return CommunicationError(
        f"{Path(program).name} refused the job: {said}",
        remedy="print the script with --dry-run; an account and a queue may be needed",
    )


def header(job: BatchJob) -> list[str]:
    """Return what a script asks the scheduler for, as comments."""
    if job.scheduler == "slurm":
        flags = {
            "job-name": job.name,
            "nodes": job.nodes,
            "ntasks-per-node": job.ranks_per_node,
            "cpus-per-task": job.cpus,
            "time": job.time,
            "output": job.output or f"{job.name}-%j.out",
            "account": job.account,
            "partition": job.queue,
        }
        return [f"#SBATCH --{flag}={value}" for flag, value in flags.items() if value]
    cores = job.ranks_per_node * job.cpus
    return [
        f"#PBS -N {job.name}",
        f"#PBS -l select={job.nodes}:ncpus={cores}:mpiprocs={job.ranks_per_node}",
        f"#PBS -l walltime={job.time}",
        "#PBS -j oe",
        *(f"#PBS -{flag} {word}" for flag, word in (("o", job.output), ("A", job.account), ("q", job.queue)) if word),
    ]


def _starter(job: BatchJob) -> str:
    """Return the command that starts the ranks: ``srun`` as this Python's MPI needs it, or its own ``mpiexec``."""
    path = jobs.mpiexec_path()
    flavour = jobs.mpiexec_flavour(path) if path is not None else "unknown"
    if job.scheduler == "slurm":
        return shlex.join(["srun", *_PMI.get(flavour, []), "--kill-on-bad-exit=1", f"--cpus-per-task={job.cpus}"])
    hosts, ranks = "--hostfile" if flavour == "openmpi" else "-f", job.nodes * job.ranks_per_node
    return f'{shlex.join([path or "mpiexec", "-n", str(ranks)])} {hosts} "$PBS_NODEFILE"'


def _manifests(job: BatchJob) -> list[dict[str, Any]]:
    """Return the runtime and the job of Kubeflow Trainer. Raises ``ConfigError`` for more words than it takes."""
    threads = [word for name in THREAD_VARIABLES for word in ("-x", f"{name}={job.cpus}")]
    command = ["mpirun", "-n", str(job.nodes * job.ranks_per_node), *threads, *_command(job, "python3")]
    if len(command) > kubernetes.MOST_WORDS:
        raise ConfigError(
            f"a command of {len(command)} words", allowed=f"{kubernetes.MOST_WORDS} in a TrainJob", remedy="use a file"
        )
    return kubernetes.manifests(
        job.name,
        image=job.image,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        cores=job.ranks_per_node * job.cpus,
        seconds=_seconds(job.time),
        queue=job.queue,
        command=command,
    )


def _seconds(time: str) -> int:
    """Return the seconds of a time as Slurm reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours."""
    days, _, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _command(job: BatchJob, python: str = sys.executable) -> list[str]:
    if job.runs_script:
        return [python, "-m", "mpi4py", *job.command]  # mpi4py's runner ends all ranks when one fails
    command = [python, "-m", "dpsim", *job.command]
    flags = [word.partition("=")[0] for word in job.command]
    if job.command[0] == "train" and "--devices" not in flags:
        layout = f"{job.nodes}x{job.ranks_per_node}" if job.nodes > 1 else str(job.ranks_per_node)
        command += ["--devices", layout]
    return command
