"""Bug or rounding: a user's own script on several numbers of ranks, held against its first run step by step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.reproduce.baseline import Baseline, baseline_of, noisy_run
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
from dpsim.torch.script.reproduce.causes import finding_among_ranks, first_finding, is_no_number
from dpsim.torch.script.reproduce.differences import OTHER_SAMPLES, REPEATED, TOO_FAST, UNKNOWN, Finding, Step
from dpsim.torch.script.reproduce.observation import Observed, Run, RunsRequest, read_reports
from dpsim.torch.script.reproduce.repetitions import changed_settings, repeats_its_order, same_order
from dpsim.torch.script.reproduce.rounding import (
    EPSILON,
    Rounding,
    mean_loss,
    quantities,
    rounding_of,
    sent_epsilon,
    size,
)
from dpsim.torch.script.reproduce.samples import Samples, padding, told_by_index
from dpsim.torch.script.reproduce.samples import compared as compared_samples
from dpsim.torch.script.reproduce.sixteen_bits import overflow, with_scaler
from dpsim.units import format_size

_MOST_DEVICES = 64
_UNJUDGED = "(in float32 the script does not train)"
_ONE_ORDER = (
    "every epoch has the same order of samples, on any number of devices: nothing calls set_epoch of the"
    " DistributedSampler"
)
_WORDS = {True: "Not rounding", False: "Not comparable"}


@dataclass(frozen=True)
class Compared:
    """A run against the first one: how many steps, how far its gradients were, its finding, and what is by design.

    ``samples`` are those of the first step on all ranks, ``largest`` is the largest difference of a reduced gradient or
    of the finding, in units of what rounding explains (None where no numbers were compared). From step
    ``no_number_from`` on the loss is ``no_number`` (nan, inf) in both runs (None: it is a number in the last step).
    """

    run: Run
    steps: int
    samples: int
    largest: float | None
    finding: Finding | None
    designs: tuple[str, ...]
    no_number_from: int | None = None
    no_number: str = ""

    @property
    def point(self) -> dict[str, Any]:
        """Return the flat record of this run."""
        finding = {} if self.finding is None else vars(self.finding) | {"is_mistake": self.finding.is_mistake}
        return {
            "run": self.run.name,
            "devices": self.run.devices,
            "bucket_cap_bytes": self.run.bucket_cap_bytes,
            "accumulate": self.run.accumulate,
            "in_float32": self.run.in_float32,
            "steps": self.steps,
            "global_batch": self.samples,
            "largest_difference_over_rounding": self.largest,
            "no_number_from_step": self.no_number_from,
            "finding": finding,
        }


@dataclass(frozen=True)
class Verdict:
    """What all runs came to. ``computes_in`` says what computes in 16 bits; later runs have the ``baseline``.

    ``notes`` are what no number of devices changes, and may be meant otherwise.
    """

    first: Run
    compared: tuple[Compared, ...]
    computes_in: tuple[str, ...] = ()
    baseline: Baseline | None = None
    notes: tuple[str, ...] = ()

    @property
    def finding(self) -> Finding | None:
        """The finding that is told.

        A mistake before what cannot be compared, one that has a class, an early step, and float32, which names better.
        """
        findings = [(each.finding, each.run) for each in self.compared if each.finding is not None]
        told = min(
            findings,
            key=lambda each: (not each[0].is_mistake, each[0].kind == UNKNOWN, each[0].step, not each[1].in_float32),
            default=None,
        )
        return None if told is None else told[0]

    @property
    def is_mistake(self) -> bool:
        """Whether the finding is a mistake."""
        return self.finding is not None and self.finding.is_mistake

    @property
    def designs(self) -> tuple[str, ...]:
        """What differs by design, and is no mistake."""
        return tuple(dict.fromkeys(design for each in self.compared for design in each.designs))

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        finding = self.finding
        if finding is not None:
            return f"{_WORDS[finding.is_mistake]}: {finding.sentence}{self._shown(finding.is_mistake)}"
        if without := [each for each in self.compared if each.no_number_from is not None]:
            return self._without_numbers(min(without, key=lambda each: each.no_number_from or 0))
        steps = min(each.steps for each in self.compared)
        apart = ", apart from what differs by design" if self.designs else ""
        return f"The difference is rounding in all {steps} steps{apart}{self._judged}."

    @property
    def _judged(self) -> str:
        """The judgements of a script that computes in 16 bits."""
        if not self.computes_in:
            return ""
        in_float32 = "and in float32" if self._in_float32(self.compared) else _UNJUDGED
        return f", with {' and '.join(self.computes_in)} {in_float32}"

    def _shown(self, is_mistake: bool) -> str:
        """The judgements that show a mistake of a script that computes in 16 bits."""
        if not (self.computes_in and is_mistake):
            return ""
        as_it_is = f"with {' and '.join(self.computes_in)}"
        shows = {each.run.in_float32 for each in self.compared if each.finding is not None and each.finding.is_mistake}
        if not self._in_float32(self.compared):
            return f" It shows {as_it_is} {_UNJUDGED}."
        if shows == {False}:
            return f" It shows {as_it_is} alone, not in float32."
        if shows == {True}:
            return f" It shows in float32 alone, not {as_it_is}."
        return f" It shows {as_it_is}, and in float32."

    @staticmethod
    def _in_float32(compared: Sequence[Compared]) -> bool:
        return any(each.run.in_float32 for each in compared)

    def _without_numbers(self, compared: Compared) -> str:
        """The answer where the loss ends as no number on any number of devices."""
        step = compared.no_number_from or 1
        before = f"the difference is rounding in the {step - 1} before" if step > 1 else "no step can be compared"
        return (
            f"The loss is {compared.no_number} from step {step} on, on {self.first.name} too: it does not come from the"
            f" number of devices. Of {compared.steps} steps {before}."
        )


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
        judges = {of[0].run.in_float32: _Judge.of(of) for of in _by_precision(plain)}
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
        scaled = [found for each in observed if each not in plain and (found := _scaled(each, judges))]
        notes = (_ONE_ORDER,) if repeats_its_order(first) else ()
        return Verdict(
            first.run, (*compared.values(), *scaled), report.computes_in, _baseline(comparison, plain), notes
        )


def _baseline(comparison: ScriptComparison, runs: Sequence[Observed]) -> Baseline | None:
    """Return the baseline that the first of these runs makes, where one is wanted."""
    nulls = [each for each in runs if each.run.null_seed and not each.run.in_float32]
    free = [each for each in nulls if each.run.free]
    others = [each for each in nulls if not each.run.free]
    return baseline_of(runs[0], free[0], others, comparison.training) if free else None


@dataclass(frozen=True)
class _Judge:
    """The run that others of its precision are held against, and what rounding explains in it."""

    first: Observed
    rounding: Rounding

    @staticmethod
    def of(runs: Sequence[Observed]) -> _Judge:
        """Return that of the first of these runs, with their nulls."""
        nulls = [each for each in runs if each.run.null_seed and not each.run.free]
        return _Judge(runs[0], rounding_of(runs[0], nulls))

    def compared(self, other: Observed) -> Compared:
        """Compare a run of the same precision."""
        return _compared(self.first, other, self.rounding)

    def without_first(self, other: Observed, compared: Compared) -> Compared:
        """Return the comparison with a mistake that a run shows by itself, where it cannot be compared or is alike."""
        if compared.finding is not None and compared.finding.is_mistake:
            return compared
        alone = None if compared.finding is None else finding_among_ranks(self.first, other, self.rounding)
        finding = alone or same_order(self.first, other)
        return compared if finding is None else dataclasses.replace(compared, finding=finding)


def _by_precision(runs: Sequence[Observed]) -> list[list[Observed]]:
    """The runs as the script is, and those in float32, without what has no first run."""
    several = [[each for each in runs if each.run.in_float32 is in_float32] for in_float32 in (False, True)]
    return [each for each in several if each and not each[0].run.null_seed]


def _scaled(other: Observed, judges: Mapping[bool, _Judge]) -> Compared | None:
    """What a run without a scaler of gradients, or with an overflow of one rank, shows; None without a mistake."""
    narrow, judge = judges[False], judges[max(judges)]
    if other.run.overflow:
        run, finding = other.run, overflow(Step(narrow.first, other, narrow.rounding, 0))
    elif judge is narrow and narrow.first.reports[0].computes_in:
        return None  # it does not train in float32
    else:
        run, finding = judge.first.run, with_scaler(other, judge.first, judge.rounding)
    if finding is None:
        return None
    samples = sum(rank.samples for rank in other.step(0))
    return Compared(run, other.steps, samples, _over_rounding(finding), finding, ())


def _over_rounding(finding: Finding) -> float | None:
    return (finding.difference or 0.0) / finding.rounding if finding.rounding else None


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


def _compared(first: Observed, other: Observed, rounding: Rounding) -> Compared:
    steps = min(first.steps, other.steps)
    finding = first_finding(first, other, rounding)
    if finding is None and first.step(0)[0].bypassed:
        raise ConfigError(
            "the script trains a model in DistributedDataParallel without calling it, and reduces the gradients itself",
            allowed="a script that calls what DistributedDataParallel returned",
            remedy="call it in place of the model inside, and leave out the script's own all_reduce",
        )
    ratio = None if finding is None else _over_rounding(finding)
    ratios = [] if ratio is None else [ratio]
    for number in range(steps if finding is None else finding.step - 1):
        if is_no_number(first.step(number)) or is_no_number(other.step(number)):
            continue
        ratios += _ratios(Step(first, other, rounding, number))
    samples = sum(rank.samples for rank in other.step(0))
    schedule = "" if finding is None or finding.kind != TOO_FAST else finding.tensor
    designs = tuple(each for each in _designs(first, other) if not schedule or not each.startswith(schedule))
    return Compared(other.run, steps, samples, max(ratios, default=None), finding, designs, *_no_numbers(first, other))


def _ratios(step: Step) -> list[float]:
    """The differences of the gradients of a step, in units of what rounding explains: the smaller of two of each.

    What the script has made of a reduced gradient may be right where that is not.
    """
    ratios: dict[str, float] = {}
    for kind in ("reduced", "prepared"):
        ours, theirs = quantities(step.ours, kind), quantities(step.theirs, kind)
        for name in ours.keys() & theirs.keys():
            explained = step.rounding.explains(kind, name, step.number, ours[name])
            ratio = size(ours[name] - theirs[name]) / explained if explained else 0.0
            ratios[name] = min(ratio, ratios.get(name, ratio))
    return list(ratios.values())


def _no_numbers(first: Observed, other: Observed) -> tuple[int | None, str]:
    """The step from which on the loss is no number in both runs, and what it is; None where it ends as a number."""
    since, word = None, ""
    for number in reversed(range(min(first.steps, other.steps))):
        loss = mean_loss(first.step(number))
        if math.isfinite(loss) or not is_no_number(other.step(number)):
            break
        since, word = number + 1, word or f"{loss:g}"
    return since, word


def _designs(first: Observed, other: Observed) -> list[str]:
    """What differs by design between two runs."""
    report, designs = other.reports[0], list[str]()
    if other.run.same_samples:
        designs.append("samples in another order (compared on those of the first run)")
    if report.local_norms and first.run.parts != other.run.parts:
        names = ", ".join(report.local_norms[:3]) + (", ..." if len(report.local_norms) > 3 else "")
        whose = "device's own samples" if first.run.accumulate == other.run.accumulate else "micro-batch's own samples"
        compared = ", and is compared with the running ones" if other.run.running_norms else ""
        designs.append(f"batch norm takes the statistics of each {whose} ({names}){compared}")
    if report.switched:
        designs.append(f"{' and '.join(sorted(report.switched))} (drawn here from one stream a sample)")
    if sent_epsilon(other) > EPSILON:
        by = f"the communication hook {report.hook}" if report.hook else f"reduce_dtype={report.sent_as} of the policy"
        designs.append(f"{by} rounds what ranks send")
    designs += changed_settings(first, other)
    extra, samples = padding(other)
    if extra:
        on = replace(other.run, in_float32=False).name
        designs.append(f"the sampler repeats {extra} of {samples} samples at the end of each epoch on {on}")
    return designs


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
