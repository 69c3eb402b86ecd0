"""Job arrays for Slurm and PBS: the script that submits the tasks of a sweep, and a last job after them."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpsim.errors import ConfigError, unknown
from dpsim.launch.job_script import BatchJob, header, preamble

SCRIPT = "array.sh"
"""The name of the script in the folder of the sweep."""
_NO_WORD = re.compile(r"[^\w.-]+")
_OPTIONS = ("time", "queue", "account", "name", "cpus", "at-once")
_FORM = "slurm or pbs, with options after a colon: slurm:time=01:00:00,queue=short,account=x,cpus=4,at-once=4"
_BEFORE_LIMIT_S = 60
"""How long before its time limit Slurm tells a task to end; it may do so up to a minute earlier."""
_REQUEUE = """\
requeue() {{ # {seconds} s before the time limit: keep the samples, and go on in another job if there are new ones
  kill "$task"
  wait "$task"
  if [ -n "$(find {folder}/tasks/"$SLURM_ARRAY_TASK_ID" -name samples.json -newermt "@$begin")" ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
  else
    echo "The time limit ended this task before it had measured a round: allow more, like --array slurm:time=02:00:00"
  fi
}}
begin=$(date +%s)
trap requeue USR1
{command} &
task=$!
wait "$task"
"""


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """What a scheduler is asked for: ``job`` for each task, of which ``at_once`` run at a time (0: any number)."""

    job: BatchJob
    at_once: int = 0

    @classmethod
    def parse(cls, token: str, name: str, cpus: int) -> JobArray:
        """Return the jobs of ``slurm:time=01:00:00,at-once=4``. Raises ``ConfigError``.

        ``name`` is theirs, and ``cpus`` the number of cores of each, unless the token says otherwise.
        """
        scheduler, _, text = token.partition(":")
        if scheduler not in ("slurm", "pbs"):
            raise unknown("scheduler", scheduler, ("slurm", "pbs"), remedy=f"write {_FORM}")
        options = dict[str, str]()
        for word in filter(None, text.split(",")):
            option, _, value = word.partition("=")
            if option not in _OPTIONS:
                raise unknown(f"option of {token!r}:", option, _OPTIONS, remedy=f"write {_FORM}")
            options[option] = value
        numbers = {each: _whole(each, options.pop(each)) for each in ("cpus", "at-once") if each in options}
        job = BatchJob(
            scheduler="slurm" if scheduler == "slurm" else "pbs",
            command=("sweep",),
            cpus=numbers.get("cpus", cpus),
            **{"name": _NO_WORD.sub("-", name)} | options,
        )
        return cls(job=job, at_once=numbers.get("at-once", 0))

    def script(self, folder: Path, array_id: str, numbers: Sequence[int], words: Sequence[str] = ()) -> str:
        """Return the script that submits the tasks with these ``numbers``, and the last job after them.

        ``words`` are more words of the command line of each job.
        """
        slurm, at = self.job.scheduler == "slurm", shlex.quote(str(folder))
        limit = f"%{self.at_once}" if self.at_once else ""
        if slurm:
            index, output, ranges = "$SLURM_ARRAY_TASK_ID", "%a.out", _ranges(numbers)
            of_tasks = [
                f"#SBATCH --array={ranges}{limit}",
                "#SBATCH --requeue",
                "#SBATCH --open-mode=append",
                f"#SBATCH --signal=B:USR1@{_BEFORE_LIMIT_S}",
            ]
            submit, depending = "sbatch --parsable", "sbatch --parsable --dependency=afterany:${tasks%%;*}"
        else:
            last = max(numbers[-1], numbers[0] + 1)
            index, output = "$PBS_ARRAY_INDEX", "^array_index^.out"
            of_tasks = [f"#PBS -J {numbers[0]}-{last}{limit}", "#PBS -r y"]
            submit, depending = "qsub", 'qsub -W "depend=afterany:$tasks"'
        command = self._command(f"task:{index},of={array_id}", at, words)
        run = command
        if slurm:
            run = _REQUEUE.format(seconds=_BEFORE_LIMIT_S, folder=at, command=command).rstrip()
        name, tasks = self.job.name, msgspec.structs.replace(self.job, output=f"{folder}/tasks/{output}")
        last_job = msgspec.structs.replace(self.job, name=f"{name}-report", output=f"{folder}/tasks/last.out")
        return "\n".join(
            [
                "#!/bin/bash",
                f"# Submits tasks of the sweep {name}, and the job that reports on them: bash {at}/{SCRIPT}",
                f"tasks=$({submit} <<'TASK'",
                "#!/bin/bash",
                *header(tasks),
                *of_tasks,
                "",
                *preamble(tasks),
                run,
                "TASK",
                ") || exit",
                f"last=$({depending} <<'LAST'",
                "#!/bin/bash",
                *header(last_job),
                "",
                *preamble(last_job),
                self._command(f"last,of={array_id}", at, words),
                "LAST",
                ") || exit",
                'echo "$tasks $last"',
                "",
            ]
        )

    @staticmethod
    def _command(token: str, folder: str, words: Sequence[str]) -> str:
        words = ["--output", folder, *map(shlex.quote, words)]
        return " ".join([shlex.quote(sys.executable), "-m dpsim sweep --array", token, *words])


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 10**6:
        raise ConfigError(f"{name} is {text!r} in --array", allowed="a whole number of 1 or more")
    return int(text)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as Slurm has them: ``0-3,7``."""
    runs = (
        [number for _, number in members]
        for _, members in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    )
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
