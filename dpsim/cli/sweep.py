"""``dpsim sweep``: predict, measure, compare; over the fusion threshold, the devices, or any grid of settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, ledger, readers, script_sweep, show
from dpsim.cli.sweep_flags import SweepFlags
from dpsim.errors import ConfigError, unknown

if TYPE_CHECKING:
    from dpsim.harness.sweep.array import ArrayStudy
    from dpsim.harness.sweep.sweep import Study
    from dpsim.records.sweep import Experiment

EXAMPLES = f"""\
Examples:
  dpsim sweep fusion-threshold
  dpsim sweep fusion-threshold --devices 1,2 --network node,paced:50us,1gbit
  dpsim sweep devices --model cnn --devices 1,2 --batch-norm local
  dpsim sweep devices --local-batch 64
  dpsim sweep devices --compute emulated --devices 1,2,4,8
    --network paced:1ms,200mbit --fusion-threshold inf
  dpsim sweep local-batch --devices 1,2 --local-batch 8,16,32,64
  dpsim sweep batch-norm --batch-norm local,global,group --local-batch 16
  dpsim sweep ring-or-halving.toml --budget 60s
  dpsim sweep --torch-script train.py --devices 1,2 -- --batch-size 32
  dpsim sweep --torch-script train.py --workload train.json --predict-only
  dpsim sweep local-batch --torch-script train.py --local-batch 8,16,32
  dpsim sweep --torch-script train.py --algorithm gloo,hook
  dpsim sweep --torch-script train.py --strategy zero3 --devices 1,2
  dpsim sweep --torch-script train.py --algorithm mpi
    --network paced:200us,1gbit --set runtime=torch-ddp,dpsim{flags.WORDS}"""
SHOWN = (
    "--model --dataset --devices --global-batch --local-batch --fusion-threshold --algorithm --batch-norm "
    "--network --compute --budget --output --json --torch-script --accumulate"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""

QUESTIONS = {
    "fusion-threshold": "global_batch fusion_threshold_bytes... overlap",
    "devices": "global_batch local_batch fusion_threshold_bytes overlap batch_norm leaves steps",
    "local-batch": "local_batch... global_batch... fusion_threshold_bytes overlap batch_norm target_loss",
    "batch-norm": "batch_norm... local_batch... global_batch... overlap seeds epochs",
}
"""By question the flags that it has beside those of all, and whether each takes a list; others have ``_OF_A_GRID``."""
_OF_A_GRID = "global_batch"
_JOB = re.compile(r"(?:task:(?P<number>\d{1,9})|last),of=(?P<of>\w+)")
"""The value of ``--array`` in a job of an array."""
_OF_ALL = "model dataset devices fusion_rule algorithm network compute seed wire_dtype compute_dtype"
_OF_A_RUN = "budget wait_until_quiet output json verbose array dry_run"


def sweep(
    *words: Annotated[
        str,
        Parameter(
            name=("QUESTION", "ARGUMENTS"),
            help="fusion-threshold, devices, local-batch, batch-norm, or a file (.toml) that declares any grid of "
            "settings, as docs/grid.md explains; of a script, fusion-threshold or local-batch, or none; and its "
            "arguments after --.",
        ),
    ],
    given: SweepFlags,
    script: script_sweep.ScriptFlags,
) -> int:
    """Predict, measure and compare over a range of settings.

    fusion-threshold: which one makes a step fastest?
    devices: how fast is training on more, and is it still the same training?
    local-batch: how fast is each, and when is a device busy?
    batch-norm: what does it cost, with whose statistics, and other norms?

    Profiles the models and calibrates the networks, and writes a prediction
    down. Then all settings are measured, in random order and in turns with
    more of both, from which they are predicted once more; that is scored. The
    page to open is index.html in the report's folder. Exits with 1 where bits
    that should be the same differ. After an interruption the same command goes
    on where it stopped.

    With --torch-script your own PyTorch script trains under DDP or FSDP,
    unchanged, on ranks of this machine.
    """
    question, arguments = _split(words, with_script=script.is_named())
    if script.is_named():
        script_sweep.measure(question, given, script, arguments)
        return 0
    if given.dry_run and given.array is None:
        raise ConfigError("--dry-run without --array", allowed="--array slurm --dry-run", remedy="leave it out")
    if given.array is not None and (job := _JOB.fullmatch(given.array)) and given.output is not None:
        return _run_job(job, given.output, given)
    if question is None:
        from dpsim.cli.app import build

        build()["sweep"].help_print([])
        return 0
    return _sweep(question, given)


def _sweep(question: str, given: SweepFlags) -> int:
    """Sweep what a question or a file asks for, or submit that; returns the exit code. Raises ``ConfigError``."""
    from dpsim.harness.sweep.array import ArrayStudy
    from dpsim.harness.sweep.sweep import Study, declared
    from dpsim.records.sweep import read_experiment

    file = None if question in QUESTIONS else Path(question)
    if file is not None and not file.suffix and not file.exists():
        raise unknown("question", question, QUESTIONS, remedy="or give a file that declares a sweep")
    flags.writable(given.output, folders=("sweep",), inputs=(file,))
    base = declared(question.replace("-", "_")) if file is None else read_experiment(file)
    experiment = _changed(base, given)
    command = "sweep" if file is not None else f"sweep {question}"
    study = Study.of(experiment) if given.array is None else ArrayStudy.of(experiment)
    folder = given.output if given.output is not None else study.free_folder(Path("reports"))
    if isinstance(study, ArrayStudy) and not study.finished(folder):
        _submit(study, folder, given)
        return 0
    return _run(study, folder, command, given)


def _run_job(job: re.Match[str], folder: Path, given: SweepFlags) -> int:
    """Run a job of an array: a task, or the last one, which reports. Raises ``ConfigError``."""
    from dpsim.harness.sweep.array import ArrayStudy

    study, number = ArrayStudy.submitted(folder, job["of"]), job["number"]
    if number is None:
        return _run(study, folder, "sweep", given)
    with show.measuring(given.wait_until_quiet) as progress:
        study.measure_task(int(number), folder, progress)
    return 0


def _submit(study: ArrayStudy, folder: Path, given: SweepFlags) -> None:
    """Submit the tasks of a sweep that are missing, and say what comes of them; or print the script."""
    from dpsim.harness.sweep.array import job_array, submit

    jobs = job_array(given.array or "", study.experiment)
    words = ["--wait-until-quiet", given.wait_until_quiet] if given.wait_until_quiet is not None else []
    words += [*["--json"] * given.json, *["--verbose"] * given.verbose]
    folder = folder.absolute()
    if given.dry_run:
        study.existing(folder)
        print(jobs.script(folder, "ID", study.missing(folder) or [0], words), end="")
        return
    numbers, ids = submit(study, jobs, folder, words)
    print(
        f"Submitted {jobs.job.scheduler} job {' and '.join(ids)}: {len(numbers)} of {len(study.parts)} tasks, and the "
        f"report.\nThe same command submits again what is missing. What the jobs print: {folder}/tasks/*.out"
    )


def _split(words: tuple[str, ...], *, with_script: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return the question, and the arguments of a script, which follow ``--``. Raises ``ConfigError``."""
    end = words.index(flags.DELIMITER) if flags.DELIMITER in words else len(words)
    arguments = words[end + 1 :]
    excess = words[1:end] if with_script else (*words[1:end], *arguments)
    if excess:
        raise ConfigError(f"{' '.join(excess)!r} is more than this command takes", allowed="one question, and flags")
    return next(iter(words[:end]), None), arguments


def _changed(base: Experiment, given: SweepFlags) -> Experiment:
    """Return ``base`` with what the flags say. Raises ``ConfigError`` for those that its question has no use for."""
    import msgspec

    from dpsim.harness.sweep.norms import norm_cases
    from dpsim.records.checks import check_steps
    from dpsim.setting import FIELDS

    question = base.question
    values = _values(question, given)
    values |= readers.provided(target_loss=given.target_loss, seeds=given.seeds, epochs=given.epochs)
    norms = values.pop("batch_norm", None) if question == "batch-norm" else None
    if question == "devices":
        if "leaves" in values:
            values.setdefault("batch_norm", None)  # the default for this number of leaves
        values |= _batches(base, values)
        if given.steps is not None:
            check_steps(given.steps)
            values["steps"] = given.steps
    elif "local_batch..." in QUESTIONS.get(question, ""):
        values |= _batches(base, values)
    if isinstance(values.get("fusion_threshold_bytes"), float):
        values["fusion_threshold_bytes"] = (values["fusion_threshold_bytes"],)
    of_settings = {name: value for name, value in values.items() if name in FIELDS}
    of_run = {name: value for name, value in values.items() if name not in FIELDS}
    of_run |= readers.provided(budget_s=readers.budget(given.budget))
    experiment = msgspec.structs.replace(base.changed(**of_settings), **of_run)
    if norms is None:
        return experiment
    cleared = experiment.changed(model=None, batch_norm=None, leaves=None)
    return msgspec.structs.replace(cleared, cases=norm_cases(experiment, norms))


def _values(question: str, given: SweepFlags) -> dict[str, Any]:
    """Return the fields that the flags set, one value where the question takes no list. Raises ``ConfigError``."""
    words = QUESTIONS.get(question, _OF_A_GRID).split()
    of_question = {word.removesuffix("..."): word.endswith("...") for word in words}
    used = (*_OF_ALL.split(), *of_question, *_OF_A_RUN.split())
    if unused := [name for name in given.given() if name not in used]:
        raise ConfigError(
            f"{given.spelled(*unused)} in a sweep with the question {question}",
            allowed=given.spelled(*used),
            remedy="leave it out, or ask another question",
        )
    values = given.values()
    for name, listed in [*values.items()]:
        if isinstance(listed, tuple) and name not in _OF_ALL.split() and not of_question.get(name):
            if len(listed) > 1:
                text = f"{given.spelled(name)} {getattr(given, name)}"
                raise ConfigError(
                    f"{text} in a sweep with the question {question}",
                    allowed="one value",
                    remedy="ask a question that compares them, or declare a grid in a file",
                )
            (values[name],) = listed
    return values


def _batches(base: Experiment, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the local batches under weak scaling, the global ones under strong scaling, which those of a flag decide.

    Raises ``ConfigError`` for both.
    """
    local_batch, global_batch = given.get("local_batch"), given.get("global_batch")
    if local_batch and global_batch:
        raise ConfigError(
            "--local-batch and --global-batch",
            allowed="--local-batch under weak scaling, --global-batch under strong scaling",
            remedy="give one of the two",
        )
    if not local_batch and not global_batch:
        return {}
    return {"local_batch": local_batch, "global_batch": global_batch}


def _run(study: Study, folder: Path, command: str, given: SweepFlags) -> int:
    """Run a sweep and print its result; returns the exit code."""
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.saved import points, summary
    from dpsim.report.sweep.summary import Summary

    with show.measuring(given.wait_until_quiet) as progress:
        swept = study.run(folder, progress)
    scored = ledger.scored_sweep(swept)
    if given.json:
        show.print_json(command, points(swept), summary(swept) | ledger.as_record(scored))
    else:
        tables = [for_terminal(swept.comparison)] * given.verbose
        show.rich(*tables, Summary(comparison=swept.comparison, folder=folder))
        ledger.print_scored(scored)
    return 1 if swept.comparison.identical is False else 0
