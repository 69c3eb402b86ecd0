"""``dpsim launch``: run a command or a script on ranks, on this machine or through a scheduler."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import App, Parameter

from dpsim.cli import commands, flags, old_names
from dpsim.errors import ConfigError, unknown

EXAMPLES = """\
Examples:
  dpsim launch local --devices 2 -- train.py --lr 0.1
  dpsim launch slurm --devices 2x4 -- train --model cnn --global-batch 512
  dpsim launch pbs --devices 2x4 --queue short --dry-run -- train.py
  dpsim launch kubernetes --devices 2x4 --image IMAGE --dry-run -- train.py"""
_LOCAL_EXAMPLES = """\
Examples:
  dpsim launch local --devices 2 -- train.py --lr 0.1
  dpsim launch local --devices 8 --hostfile hosts -- train.py"""
_SCHEDULER = "Who starts the ranks. For kubernetes dpsim prints a TrainJob of Kubeflow Trainer, and submits nothing."
Command = Annotated[str, Parameter(name="COMMAND", help="The command to run, after --.")]


class JobFlags(flags.Flags):
    """The flags of what a scheduler is asked for; the fields of ``BatchJob`` with the same names."""

    devices: Annotated[str, Parameter(help="Number of ranks: 8 on one node, or 2x4 on 2 nodes with 4 ranks each.")] = (
        "1"
    )
    cpus: Annotated[int, Parameter(help="Cores per rank, and its number of compute threads.")] = 1
    time: Annotated[str, Parameter(help="Time limit.")] = "01:00:00"
    name: Annotated[str, Parameter(help="Name of the job.")] = "dpsim"
    output: Annotated[str, Parameter(help="File for what the job prints.")] = ""
    account: Annotated[str, Parameter(help="Account to charge.")] = ""
    queue: Annotated[str, Parameter(name=("--queue", "--partition"), help="Queue or partition.")] = ""
    image: Annotated[str, Parameter(help="With kubernetes: the container to run, which has dpsim and Open MPI.")] = ""
    dry_run: bool = flags.flag("Print the job script instead of submitting it.", default=False)


def group() -> App:
    """Return ``dpsim launch`` with its commands."""
    app = flags.group("launch", "Run a script or a command on ranks, here or through a scheduler.", EXAMPLES)
    flags.command(app, local, _LOCAL_EXAMPLES)
    flags.command(app, launch)
    return app


def local(
    *command: Command, devices: int = 1, hostfile: flags.Hostfile = None, stall_after: flags.StallAfter = None
) -> None:
    """Run your own Python script on ranks. If one rank fails, all end.

    The script can ask dpsim.rank() and dpsim.size(), or mpi4py, which rank it
    is. If it fails, its traceback and exit code become the command's.
    --stall-after is for dpsim.fit, unless the script itself names a time.
    """
    from dpsim.launch import hosts
    from dpsim.launch.user_script import run_script
    from dpsim.records.checks import check_stall_after

    if not command:
        raise ConfigError(
            "there is no script to run",
            allowed="a Python script after --",
            remedy=f"dpsim launch local --devices {devices} -- train.py",
        )
    if command[0] in commands.modules():
        raise ConfigError(
            f"{command[0]!r} is a dpsim command",
            allowed="a Python script",
            remedy=f"dpsim commands start their ranks themselves: dpsim {command[0]} --devices {devices}",
        )
    if stall_after is not None:
        check_stall_after(stall_after)
    with hosts.hostfile(hostfile):
        run_script(command[0], command[1:], devices=devices, stall_after_s=stall_after)


def launch(
    scheduler: Annotated[Literal["slurm", "pbs", "kubernetes"], Parameter(name="SCHEDULER", help=_SCHEDULER)],
    /,
    *command: Command,
    job: JobFlags,
) -> None:
    """Submit a job that runs a dpsim command or a Python script on ranks.

    dpsim submits to Slurm and PBS. For Kubernetes it prints a TrainJob of
    Kubeflow Trainer, with --dry-run.
    """
    from dpsim.cli.app import build
    from dpsim.launch.job_script import BatchJob, job_script, submit

    command = tuple(old_names.current(command, build()))
    options = asdict(job)
    dry_run = options.pop("dry_run")
    batch = BatchJob(scheduler=scheduler, command=command, **options)
    if not batch.runs_script and command[0] not in commands.modules():
        raise unknown("command", command[0], [*commands.modules(), "a Python script"])
    if dry_run:
        print(job_script(batch), end="")
    else:
        print(submit(batch))
