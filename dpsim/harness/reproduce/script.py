"""Bug or rounding: a user's own script on several numbers of ranks, held against its first run step by step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.reproduce.baseline import Baseline, baseline_of, noisy_run
from dpsim.harness.reproduce.script_judge import Judge, by_precision, judge_scaled
from dpsim.harness.reproduce.script_verdict import ONE_ORDER, Compared, Verdict
from dpsim.launch import scratch
from dpsim.launch.child_process import child
from dpsim.launch.job_python import JobPython, job_python
from dpsim.launch.protection import protected, script_protection
from dpsim.launch.rank_process import WITHOUT_TERMINAL_SIGNALS
from dpsim.launch.script_output import shown_once, written
from dpsim.launch.user_program import check_program
from dpsim.progress import Progress
from dpsim.torch.script.probe.reproduce.report import MICRO_BATCHES, REQUEST
from dpsim.torch.script.profile_script import START, script_environment
from dpsim.torch.script.reproduce.differences import OTHER_SAMPLES, REPEATED
from dpsim.torch.script.reproduce.observation import Observed, Run, RunsRequest, read_reports
from dpsim.torch.script.reproduce.repetitions import repeats_its_order
from dpsim.torch.script.reproduce.samples import Samples, told_by_index
from dpsim.torch.script.reproduce.samples import compared as compared_samples
from dpsim.units import format_size

_MOST_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """What is compared: a script with its arguments, the numbers of devices (the first is held as right), and caps.

    And micro-batches of a step, also on 2 devices alone. The script accumulates so many where its arguments have
    ``{accumulate}``; else each pass of its loop becomes one, as in a sweep. With ``makes_baseline`` the first run also
    becomes a baseline. With a ``compute_dtype`` of 16 bits it computes under autocast to that type.
    """

    script: str
    arguments: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    caps_bytes: tuple[float, ...] = ()
    accumulates: tuple[int, ...] = (1,)
    steps: int = 8
    script_may_write: bool = False
    python: str | None = None
    makes_baseline: bool = False
    compute_dtype: str = ""

    def __post_init__(self) -> None:
        several = len({*self.accumulates}) > 1
        if not self.devices:
            object.__setattr__(self, "devices", (2,) if several else (1, 2, 4))
        if not several and len({*self.devices}) < 2 and len(self.caps_bytes) < 2:
            raise ConfigError(
                f"--devices {','.join(map(str, self.devices))}, with which there is nothing to compare",
                allowed="two or more numbers of devices, several bucket caps, or several --accumulate",
                remedy="give more, such as --devices 1,2,4",
            )
        if min(self.accumulates) < 1:
            raise ConfigError(f"--accumulate {','.join(map(str, self.accumulates))}", allowed="1 or more")
        if min(self.devices) < 1 or max(self.devices) > _MOST_DEVICES:
            raise ConfigError(
                f"--devices {','.join(map(str, self.devices))} for a script",
                allowed=f"1 to {_MOST_DEVICES}: each is a process with PyTorch on this machine",
            )
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}", allowed="1 or more")

    @property
    def by(self) -> JobPython:
        """The Python that the ranks run: ``python``, or the one that ``dpsim.launch.job_python`` finds."""
        return job_python(self.python)

    @property
    def training(self) -> dict[str, str]:
        """What makes the first run another training than that of a baseline."""
        cap = self.caps_bytes[0] if self.caps_bytes else None
        return {
            "devices": str(self.devices[0]),
            "micro-batches": str(self.accumulates[0]),
            "bucket cap": "the script's" if cap is None else format_size(cap),
            "type": self.compute_dtype or "float32",
            "arguments": " ".join(self.arguments) or "none",
        }

    @property
    def runs(self) -> tuple[Run, ...]:
        """The first run, its nulls, and all others; then those of scripts that compute in 16 bits or scale losses."""
        accumulates = tuple(dict.fromkeys(self.accumulates))
        settings = itertools.product(dict.fromkeys(self.devices), self.caps_bytes or (None,), accumulates)
        is_told = any(MICRO_BATCHES in each for each in self.arguments)
        runs = [
            Run(
                folder=f"run-{number}",
                devices=devices,
                bucket_cap_bytes=cap,
                accumulate=accumulate,
                wraps=accumulate > 1 and not is_told,
                running_norms=len(accumulates) > 1,
            )
            for number, (devices, cap, accumulate) in enumerate(settings)
        ]
        nulls = [
            replace(runs[0], folder=f"null-{seed}", null_seed=seed, permuted=permuted)
            for seed, permuted in ((1, True), (2, False))
        ]
        as_it_is = (runs[0], *nulls, *runs[1:])
        several = [each for each in runs if each.devices > 1][:1]
        return (
            *as_it_is,
            *([noisy_run(runs[0])] if self.makes_baseline else []),
            *(replace(each, folder=f"float32-{each.folder}", in_float32=True) for each in as_it_is),
            replace(runs[0], folder="unscaled", in_float32=True, without_scaler=True),
            *(replace(each, folder="overflow", overflow=True) for each in several),
        )


def compare(comparison: ScriptComparison, progress: Progress) -> Verdict:
    """Let the script train in all runs, and return what they came to. Raises ``ConfigError``."""
    check_program(comparison.script)
    comparison.by.tell(Path(comparison.script).name)
    with scratch.scratch("torch") as folder:
        observed = _observed(comparison, comparison.runs, folder, progress)
        first, report = observed[0], observed[0].reports[0]
        plain = [each for each in observed if not (each.run.without_scaler or each.run.overflow)]
        judges = {of[0].run.in_float32: Judge.of(of) for of in by_precision(plain)}
        others = [each for each in plain if not each.run.null_seed and each.run.in_float32 in judges]

        def judged(other: Observed) -> Compared:
            return judges[other.run.in_float32].compared(other)

        firsts = [judge.first for judge in judges.values()]
        compared = {each.run: judged(each) for each in others if each not in firsts}
        loads = any(report.loaders for each in others for report in each.reports)
        for change in (_with_own_batches, _with_same_samples) if loads else ():
            again = {run: repeat for run, each in compared.items() if (repeat := change(first, each))}
            for run, each in _again(comparison, first, again, folder, progress):
                repeated = judged(each)
                if repeated.steps and not _has_other_samples(repeated):
                    compared[run] = repeated
        again = {run: repeat for run, each in compared.items() if (repeat := _with_own_seeds(first, each))}
        for run, each in _again(comparison, first, again, folder, progress):
            if compared_samples(first, each, 0) is not Samples.SAME_ON_ALL_RANKS:
                compared[run] = _drawn_without_seed(compared[run])
        for other in others:
            if other.run in compared:
                compared[other.run] = judges[other.run.in_float32].without_first(other, compared[other.run])
        scaled = [found for each in observed if each not in plain and (found := judge_scaled(each, judges))]
        notes = (ONE_ORDER,) if repeats_its_order(first) else ()
        return Verdict(
            first.run, (*compared.values(), *scaled), report.computes_in, _baseline(comparison, plain), notes
        )


def _baseline(comparison: ScriptComparison, runs: Sequence[Observed]) -> Baseline | None:
    """Return the baseline that the first of these runs makes, where one is wanted."""
    nulls = [each for each in runs if each.run.null_seed and not each.run.in_float32]
    free = [each for each in nulls if each.run.free]
    others = [each for each in nulls if not each.run.free]
    return baseline_of(runs[0], free[0], others, comparison.training) if free else None


def _again(
    comparison: ScriptComparison, first: Observed, again: Mapping[Run, Run], folder: Path, progress: Progress
) -> list[tuple[Run, Observed]]:
    """Train once more in the runs that are to take the place of others; returns these and what was observed."""
    if not again:
        return []
    repeats = {each.run: each for each in _observed(comparison, (first.run, *again.values()), folder, progress)}
    return [(run, repeats[repeat]) for run, repeat in again.items() if repeat in repeats]


def _has_other_samples(compared: Compared) -> bool:
    return compared.finding is not None and compared.finding.kind == OTHER_SAMPLES and compared.finding.step == 1


def _with_own_batches(first: Observed, compared: Compared) -> Run | None:
    """The run once more with the script's own batch sizes, where it seems to divide its batches itself."""
    if not _has_other_samples(compared) or compared.samples == sum(rank.samples for rank in first.step(0)):
        return None
    return replace(compared.run, own_batches=True, folder=f"{compared.run.folder}-batches")


def _with_same_samples(_: Observed, compared: Compared) -> Run | None:
    """The run once more with the first run's samples, where its own come in another order."""
    if not _has_other_samples(compared):
        return None
    return replace(compared.run, same_samples=True, folder=f"{compared.run.folder}-samples")


def _with_own_seeds(first: Observed, compared: Compared) -> Run | None:
    """The run once more with a random state of each rank's own, where all train on the same samples of no data loader.

    Without a seed in the script ranks of ``torchrun`` begin with states of their own, and those of dpsim with one.
    """
    if compared.finding is None or compared.finding.kind != REPEATED or told_by_index(first, first, 0):
        return None
    return replace(compared.run, own_seeds=True, folder=f"{compared.run.folder}-seeds")


def _drawn_without_seed(compared: Compared) -> Compared:
    assert compared.finding is not None
    because = "the script draws its samples without a seed, so that every process draws others whenever it is started"
    finding = dataclasses.replace(compared.finding, kind=OTHER_SAMPLES, because=because)
    return dataclasses.replace(compared, finding=finding)


def _observed(comparison: ScriptComparison, runs: Sequence[Run], folder: Path, progress: Progress) -> list[Observed]:
    """Let the script train in these runs, all in ``folder``. Raises ``ConfigError``."""
    there = (folder / runs[0].folder).exists()
    request = RunsRequest(
        script=comparison.script,
        arguments=comparison.arguments,
        steps=comparison.steps,
        runs=tuple(runs),
        first_is_there=there,
        autocast="" if comparison.compute_dtype == "float32" else comparison.compute_dtype,
    )
    codec.write(folder / REQUEST, request)
    names = [run.name for run in runs if not (run.in_float32 or run.overflow)]
    progress(f"training {comparison.steps} steps, {len(names) - there} times: {', '.join(names)}")
    start = folder / f"start-{runs[-1].folder}"
    start.mkdir()
    command = [*WITHOUT_TERMINAL_SIGNALS, comparison.by.path, str(START), "reproduce.ranks", str(folder)]
    if not comparison.script_may_write:
        protection = script_protection(comparison.script, comparison.arguments, str(folder))
        command = protected(command, protection, start)
    environment = script_environment(2, start, comparison.by.environment()) | scratch.environment(folder)
    with shown_once() as output:
        with written(start, output) as file, child(command, env=environment, stdout=file, stderr=file) as process:
            process.wait()
        return [each for run in runs if (each := _observed_run(comparison, run, folder)) is not None]


def _observed_run(comparison: ScriptComparison, run: Run, folder: Path) -> Observed | None:
    """Return what the ranks of a run said, or None of one that does not train otherwise than the script is.

    Raises ``ConfigError`` for a run of the script as it is that came to no step.
    """
    name, own = Path(comparison.script).name, folder / run.folder
    reports = read_reports(own, run.devices)
    said = [report for report in reports if report is not None]
    errors = [report.error for report in said if report.error is not None]
    complete = len(said) == run.devices and all(report.steps for report in said)
    failed = errors and not (complete and len(errors) < len(said))  # ranks may lose one that has taken all its steps
    if (failed or not complete) and (run.in_float32 or run.overflow or run.own_batches or run.same_samples):
        return None
    if failed:
        given, allowed, remedy = min(
            errors, key=lambda each: "closed by peer" in each[0]
        )  # as where another died first
        raise ConfigError(f"{given} ({run.name})", allowed=allowed, remedy=remedy)
    if len(said) < run.devices:
        raise ConfigError(
            f"{name}: a rank of {run.devices} ended its process before it had taken {comparison.steps} steps",
            allowed="a script that trains until dpsim ends it",
            remedy="see what it printed above",
        )
    if not complete:
        raise ConfigError(
            f"{name} ended on {run.name} without a step of an optimizer after a backward of a wrapped model",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel or calls fully_shard,"
            " and trains it",
            remedy="wrap the model, call backward() and the step() of an optimizer of torch.optim",
        )
    return Observed(run, own, tuple(said))
