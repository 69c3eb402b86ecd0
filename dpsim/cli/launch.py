"""``dpsim launch``: a command or a script on ranks, here or by a scheduler."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from dpsim.cli import flags
from dpsim.errors import ConfigError, unknown

Command = Annotated[str, Parameter(name="COMMAND", help="What to run, after --.")]
Layout = Annotated[str, Parameter(help="Ranks: 8 on one node, or 2x4 for 2 nodes with 4 each.")]
Cpus = Annotated[int, Parameter(help="Cores of a rank, and threads it computes with.")]
Time = Annotated[str, Parameter(help="Time limit.")]
Name = Annotated[str, Parameter(help="Name of the job.")]
JobOutput = Annotated[str, Parameter(name="--output", help="File for what the job prints.")]
Account = Annotated[str, Parameter(help="Account to charge.")]
Queue = Annotated[str, Parameter(name=("--queue", "--partition"), help="Queue or partition.")]
DryRun = Annotated[bool, Parameter(negative="", show_default=False, help="Print the job script; hand nothing in.")]

LOCAL_EXAMPLES = """\
Examples:
  dpsim launch local --devices 2 -- train.py --lr 0.1
  dpsim launch local --devices 8 --hostfile hosts -- train.py"""
SLURM_EXAMPLES = """\
Examples:
  dpsim launch slurm --devices 2x4 -- train --model cnn --global-batch 512
  dpsim launch slurm --devices 2x4 --dry-run -- train.py --lr 0.1"""
PBS_EXAMPLES = """\
Examples:
  dpsim launch pbs --devices 2x4 --queue short -- train --model cnn
  dpsim launch pbs --devices 8 --dry-run -- train.py"""


def local(*command: Command, devices: int = 1, hostfile: flags.Hostfile = None) -> None:
    """Run a Python script of your own on ranks. When one fails, all end.

    The script finds its rank with dpsim.launch.rank_info or mpi4py. Its traceback or exit code is the command's.
    """
    from dpsim.launch import hosts
    from dpsim.launch.user_script import run_script

    if not command:
        raise ConfigError(
            "there is no script to run",
            allowed="a Python script after --",
            remedy=f"dpsim launch local --devices {devices} -- train.py",
        )
    if command[0] in _commands():
        raise ConfigError(
            f"{command[0]!r} is a dpsim command",
            allowed="a Python script",
            remedy=f"dpsim commands start their ranks themselves: dpsim {command[0]} --devices {devices}",
        )
    with hosts.hostfile(hostfile):
        run_script(command[0], command[1:], devices=devices)


def slurm(
    *command: Command,
    devices: Layout = "1",
    cpus: Cpus = 1,
    time: Time = "01:00:00",
    name: Name = "dpsim",
    output: JobOutput = "",
    account: Account = "",
    queue: Queue = "",
    dry_run: DryRun = False,
) -> None:
    """Hand in a job for Slurm that runs a dpsim command or a Python script on its ranks."""
    _hand_in(
        "slurm",
        command,
        dry_run,
        devices=devices,
        cpus=cpus,
        time=time,
        name=name,
        output=output,
        account=account,
        queue=queue,
    )


def pbs(
    *command: Command,
    devices: Layout = "1",
    cpus: Cpus = 1,
    time: Time = "01:00:00",
    name: Name = "dpsim",
    output: JobOutput = "",
    account: Account = "",
    queue: Queue = "",
    dry_run: DryRun = False,
) -> None:
    """Hand in a job for PBS that runs a dpsim command or a Python script on its ranks."""
    _hand_in(
        "pbs",
        command,
        dry_run,
        devices=devices,
        cpus=cpus,
        time=time,
        name=name,
        output=output,
        account=account,
        queue=queue,
    )


def _hand_in(scheduler: str, command: tuple[str, ...], dry_run: bool, **asked: str | int) -> None:
    from dpsim.launch.job_script import BatchJob, job_script, submit

    job = BatchJob(scheduler=scheduler, command=command, **asked)  # type: ignore[arg-type]
    if not job.runs_script and command[0] not in _commands():
        raise unknown("command", command[0], [*_commands(), "a Python script"])
    if dry_run:
        print(job_script(job), end="")
    else:
        print(submit(job))


def _commands() -> list[str]:
    from dpsim.cli.app import build

    return [name for name in build() if not name.startswith("-") and name != "launch"]
