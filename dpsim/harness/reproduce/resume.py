"""A user's own script, started until it writes a checkpoint, and resumed from that on another number of devices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.launch import scratch
from dpsim.launch.child_process import child
from dpsim.launch.job_python import JobPython, job_python
from dpsim.launch.protection import protected, script_protection
from dpsim.launch.rank_process import WITHOUT_TERMINAL_SIGNALS
from dpsim.launch.script_output import shown_once, written
from dpsim.launch.user_program import check_program
from dpsim.progress import Progress
from dpsim.torch.script.probe.reproduce.report import REPORT, REQUEST
from dpsim.torch.script.profile_script import START, script_environment
from dpsim.torch.script.reproduce.resumption import Judged, began_anew, judge

_MOST_DEVICES = 64
_MOST_STEPS = 2000
_MOST_CHECKPOINTS = 3
"""Checkpoints that are tried: the first that a script writes may hold the weights alone, and resume nothing."""

_Ranks = list[dict[str, Any]]


class Start(Noun, frozen=True):
    """One start of the script: what it writes goes to ``folder``."""

    folder: str
    devices: int
    arguments: tuple[str, ...]
    resumed: bool = False


class ResumeRequest(Noun, frozen=True):
    """Both starts; the first ends ``steps`` steps after its ``checkpoint``-th checkpoint, the second after as many."""

    script: str
    steps: int
    checkpoint: int
    starts: tuple[Start, ...]
    most_steps: int = _MOST_STEPS


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A script that is started on ``devices``, and resumed on ``resume_on`` with arguments of its own."""

    script: str
    arguments: tuple[str, ...] = ()
    resumed_arguments: tuple[str, ...] = ()
    devices: int
    resume_on: int
    steps: int = 8
    script_may_write: bool = False
    python: str | None = None

    def __post_init__(self) -> None:
        for flag, number in (("--devices", self.devices), ("--resume-on", self.resume_on)):
            if not 1 <= number <= _MOST_DEVICES:
                raise ConfigError(f"{flag} is {number} for a script", allowed=f"1 to {_MOST_DEVICES}")
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}", allowed="1 or more")

    @property
    def starts(self) -> tuple[Start, Start]:
        """The start that writes a checkpoint, and the one that resumes."""
        return (
            Start(folder="first", devices=self.devices, arguments=self.arguments),
            Start(folder="second", devices=self.resume_on, arguments=self.resumed_arguments, resumed=True),
        )


@dataclass(frozen=True)
class Resumed:
    """What resuming came to: the steps before the checkpoint, and what was lost."""

    resumption: Resumption
    steps: int
    judged: Judged

    @property
    def sentences(self) -> list[str]:
        """The answer, a line for each."""
        of = f"The checkpoint after step {self.steps} on {_devices(self.resumption.devices)}"
        on = f"resumed on {_devices(self.resumption.resume_on)}"
        lines = [f"Lost: {loss.because} (class: {loss.kind})." for loss in self.judged.losses]
        lines += [f"By design: {each}." for each in self.judged.designs]
        lines += [f"Not known: {each}." for each in self.judged.unknown]
        kept = "" if self.judged.losses else ": nothing is lost" + (" of what is known" if self.judged.unknown else "")
        return [f"{of}, {on}{kept}.", *lines]

    @property
    def point(self) -> dict[str, Any]:
        """Return the flat record."""
        return {
            "devices": self.resumption.devices,
            "resume_on": self.resumption.resume_on,
            "steps_before": self.steps,
            "losses": [vars(each) for each in self.judged.losses],
        }


def _devices(number: int) -> str:
    return f"{number} device{'s' if number > 1 else ''}"


def resume(resumption: Resumption, progress: Progress) -> Resumed:
    """Start the script twice, and return what the second start has lost. Raises ``ConfigError``.

    A checkpoint from which the script does not resume is followed by its next one.
    """
    check_program(resumption.script)
    by = job_python(resumption.python)
    by.tell(Path(resumption.script).name)
    progress(f"training on {_devices(resumption.devices)} up to a checkpoint, then on {resumption.resume_on}")
    refused: list[ConfigError] = []
    for number in range(1, _MOST_CHECKPOINTS + 1):
        try:
            first, second = _both_starts(resumption, number, by)
        except ConfigError as error:  # of the first start: it has no such checkpoint
            raise (*refused, error)[0] from None
        if not isinstance(second, ConfigError):
            return Resumed(resumption, first[0]["checkpoint"], judge(first, second))
        refused.append(second)
    raise refused[0]


def _both_starts(resumption: Resumption, number: int, by: JobPython) -> tuple[_Ranks, _Ranks | ConfigError]:
    """Return what the ranks of each start wrote, around the ``number``-th checkpoint; of the second, or why it did not.

    Raises ``ConfigError`` where the first start has no such checkpoint.
    """
    starts = resumption.starts
    with scratch.scratch("torch") as folder:
        request = ResumeRequest(script=resumption.script, steps=resumption.steps, checkpoint=number, starts=starts)
        codec.write(folder / REQUEST, request)
        own = folder / "start"
        own.mkdir()
        command = [*WITHOUT_TERMINAL_SIGNALS, by.path, str(START), "reproduce.resume", str(folder)]
        if not resumption.script_may_write:
            arguments = (*starts[0].arguments, *starts[1].arguments)
            command = protected(command, script_protection(resumption.script, arguments, str(folder)), own)
        environment = script_environment(2, own, by.environment()) | scratch.environment(folder)
        with shown_once() as output:
            with written(own, output) as file, child(command, env=environment, stdout=file, stderr=file) as process:
                process.wait()
            first = _first(resumption, folder)
            try:
                return first, _second(resumption, folder, first)
            except ConfigError as error:
                return first, error


def _first(resumption: Resumption, folder: Path) -> _Ranks:
    """Return what the ranks of the first start wrote. Raises ``ConfigError`` where there is no checkpoint."""
    name = Path(resumption.script).name
    ranks = _ranks(name, resumption.starts[0], folder)
    if not all(rank["checkpoint"] for rank in ranks):
        raise ConfigError(
            f"{name} has written no checkpoint between two of its first {len(ranks[0]['steps'])} steps on"
            f" {_devices(resumption.devices)}",
            allowed="a script that calls torch.save() or torch.distributed.checkpoint.save(), and trains on",
            remedy="let it save earlier, by its arguments after --",
        )
    return ranks


def _second(resumption: Resumption, folder: Path, first: _Ranks) -> _Ranks:
    """Return what the ranks of the second start wrote. Raises ``ConfigError`` where they have not resumed."""
    name = Path(resumption.script).name
    ranks = _ranks(name, resumption.starts[1], folder)
    if not all(rank["steps"] for rank in ranks):
        raise ConfigError(
            f"{name} ended on {_devices(resumption.resume_on)} without training a step after its checkpoint",
            allowed="a script that has steps to train after it",
            remedy="let it save earlier, or train longer, by its arguments after --",
        )
    if began_anew(first, ranks):
        raise ConfigError(
            f"{name} has not resumed: the second start begins with the parameters that the first one began with",
            allowed="a script that loads its checkpoint where it is there, or where its arguments say so",
            remedy="give the second start its arguments after a second --, as in -- --lr 0.1 -- --lr 0.1 --resume",
        )
    return ranks


def _ranks(name: str, start: Start, folder: Path) -> _Ranks:
    """Return what the ranks of a start wrote. Raises ``ConfigError`` where one raised an error."""
    paths = [folder / start.folder / REPORT.format(rank) for rank in range(start.devices)]
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    if errors := [rank["error"] for rank in ranks if rank["error"]]:
        given, allowed, remedy = min(errors, key=lambda each: "closed by peer" in each[0])
        when = " after its checkpoint" if start.resumed else ""
        raise ConfigError(f"{given} ({_devices(start.devices)}{when})", allowed=allowed, remedy=remedy)
    if len(ranks) < start.devices:
        raise ConfigError(
            f"{name}: a rank of {start.devices} ended its process before its steps were known",
            allowed="a script that trains until dpsim ends it",
            remedy="see what it printed above",
        )
    return ranks
