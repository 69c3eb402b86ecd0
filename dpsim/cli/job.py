"""``dpsim explain -- COMMAND``: a job of one's own, started as it is, and what some of its steps say."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpsim.cli import ledger, outputs, show
from dpsim.errors import ConfigError, DpsimError

if TYPE_CHECKING:
    from dpsim.model.ledger import Scored
    from dpsim.model.watch import Watched
    from dpsim.study.disturbance import Block


class Answer(NamedTuple):
    """What is said as text, as one line of JSON, and as a JSON object for the job's own logger."""

    text: str
    line: str
    logged: str


STEPS, _LEAST_STEPS = 40, 5
_NICE = 10
_POLL_S, _LAST_BLOCK_S, _AFTER_THE_JOB_S = 0.1, 2.0, 30.0
"""Once the job has ended its exit code waits for an answer no longer than so many seconds."""


def explain(command: tuple[str, ...], steps: int, *, json_line: Path | None = None) -> int:
    """Start a job with DDP or FSDP, and print on stderr where its steps' time goes; return its exit code.

    The file ``json_line`` gets it as one line of JSON, also where nothing was learned. The job itself trains on, as it
    would without dpsim. Raises ``ConfigError`` for one that cannot be started.
    """
    from dpsim.dates import stamp
    from dpsim.launch import watched_job
    from dpsim.launch.scratch import scratch

    outputs.writable(json_line, show.SCHEMA, flag="--json-line")
    watched_job.check_command(command)
    if steps < _LEAST_STEPS:
        raise ConfigError(f"--steps is {steps}", allowed=f"{_LEAST_STEPS} or more")
    if watched_job.is_watched():
        print("dpsim: this job is already being watched; it is started as it is", file=sys.stderr)
        os.execvp(command[0], command)
    at = stamp()
    with (
        scratch("watch") as folder,
        watched_job.started(command, watched_job.environment(folder, steps, command[0])) as job,
    ):
        answer = _answer(job, folder, at)
        _write(folder / watched_job.ANSWER, answer.logged)
        print(f"\n{answer.text}", file=sys.stderr, flush=True)  # a progress bar may have left its line open
        if json_line is not None:
            _write(json_line, answer.line)
        return watched_job.exit_code(job)


def _answer(job: subprocess.Popen[bytes], folder: Path, at: str = "") -> Answer:
    """Return what there is to say of the job, which began ``at``, once its ranks have written their records.

    It is computed in a process of its own: while the job runs behind it, and once the job has ended with a limit.
    """
    from dpsim.comm.clock import now
    from dpsim.launch import watched_job
    from dpsim.launch.workers import computed
    from dpsim.study.disturbance import JobBlocks
    from dpsim.torch.script.watch_records import complete

    others = JobBlocks(job.pid)
    files = watched_job.records(job, folder, complete, others.look)
    recorded_s = now()
    while not others.reach(recorded_s) and now() < recorded_s + _LAST_BLOCK_S:
        if watched_job.ends_within(job, _POLL_S):
            break
        others.look()
    task = functools.partial(said, files, at, tuple(others.blocks))
    try:
        answer = computed(task, lambda: watched_job.ends_within(job, _POLL_S), _NICE) if job.poll() is None else None
        if answer is None:
            until_s = now() + _AFTER_THE_JOB_S

            def is_late() -> bool:
                time.sleep(_POLL_S)
                return now() > until_s

            answer = computed(task, is_late)
    except OSError as error:  # no process can be started
        answer = error
    if answer is None:
        return _nothing(
            f"the job has ended, and what it says was not computed within {_AFTER_THE_JOB_S:.0f} s;"
            " to do: watch it again when other processes leave it a core"
        )
    if isinstance(answer, BaseException):
        return _nothing(f"its records say nothing: {type(answer).__name__}: {' '.join(str(answer).split())[:200]}")
    return answer


def _write(path: Path, line: str) -> None:
    """Write the line whole; where it cannot be written that is told, for the job's own exit code is what counts."""
    from dpsim import codec

    try:
        codec.write_output(path, f"{line}\n".encode())
    except ConfigError as error:
        print(f"dpsim: {error}", file=sys.stderr, flush=True)


def _nothing(reason: str) -> Answer:
    """The answer where nothing was learned of the job."""
    from dpsim import codec

    line = codec.to_json(show.json_object("explain", (), {"nothing_learned": reason, "advice": []}), indent=None)
    return Answer(f"dpsim: {reason}", line, "{}")


def said(files: Sequence[Path], at: str = "", blocks: Sequence[Block] = ()) -> Answer:
    """Return what the records in these files say of the job, which began ``at``, and the ledger of its prediction.

    ``blocks`` say when other processes left it the cores.
    """
    from dpsim import codec
    from dpsim.dates import stamp
    from dpsim.model.ledger import score
    from dpsim.model.watch import run_of, watched
    from dpsim.report import watch as own
    from dpsim.torch.script.watch_records import paired, read

    records, unused = read(files)
    try:
        if not records:
            raise ConfigError(
                "; ".join(
                    [
                        "nothing was learned of the job: none of its processes left a record of"
                        " DistributedDataParallel or fully_shard" + " that can be used" * bool(unused),
                        *unused,
                    ]
                ),
                allowed="a job whose ranks are processes of this machine that read PYTHONPATH (not python -I or -E) and"
                " wrap their model in it, or call fully_shard",
                remedy="on processors Accelerate needs torchrun and Accelerator(cpu=True), and Hugging Face's Trainer"
                " use_cpu=True, or each rank trains alone",
            )
        ranks, left_out = paired(records)
        seen = watched(ranks, (*unused, *left_out))
        scored = score([run_of(seen, at, blocks)], stamp())
        return Answer(_text(seen, scored), _json_line(seen, scored), codec.to_json(own.logged(seen), indent=None))
    except DpsimError as error:
        return _nothing(str(error))


def _text(seen: Watched, scored: Scored) -> str:
    from dpsim.report import explain as report
    from dpsim.report import watch as own
    from dpsim.report.ledger import sentences as ledger_sentences

    of = seen.explained
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show.table(report.columns(of), of.parts, title=own.headline(seen))
        lines = [report.cause(of), *report.details(of), *report.remedies(of), *(f"Note: {each}." for each in of.notes)]
        print("\n".join([*lines, *own.advice(seen), *ledger_sentences(scored)]))
    return text.getvalue().rstrip()


def _json_line(seen: Watched, scored: Scored | None = None) -> str:
    """Return what ``dpsim explain --json`` says of a script, and what is advised, in one line."""
    from dpsim import codec
    from dpsim.report import explain as report
    from dpsim.report import watch as own

    of = seen.explained
    summary = codec.to_builtins(report.summary(of)) | {"advice": own.advice(seen)} | ledger.as_record(scored)
    points = [codec.to_builtins(part) for part in of.parts]
    return codec.to_json(show.json_object("explain", points, summary), indent=None)
