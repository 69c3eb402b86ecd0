"""Judges the runs of a script: each is held against the first of its precision, beside what rounding explains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dpsim.errors import ConfigError
from dpsim.harness.reproduce.script_verdict import Compared
from dpsim.torch.script.reproduce.causes import finding_among_ranks, first_finding, is_no_number
from dpsim.torch.script.reproduce.differences import TOO_FAST, Finding, Step
from dpsim.torch.script.reproduce.observation import Observed
from dpsim.torch.script.reproduce.repetitions import changed_settings, same_order
from dpsim.torch.script.reproduce.rounding import (
    EPSILON,
    Rounding,
    mean_loss,
    quantities,
    rounding_of,
    sent_epsilon,
    size,
)
from dpsim.torch.script.reproduce.samples import padding
from dpsim.torch.script.reproduce.sixteen_bits import overflow, with_scaler


@dataclass(frozen=True)
class Judge:
    """The run that others of its precision are held against, and what rounding explains in it."""

    first: Observed
    rounding: Rounding

    @staticmethod
    def of(runs: Sequence[Observed]) -> Judge:
        """Return that of the first of these runs, with their nulls."""
        nulls = [each for each in runs if each.run.null_seed and not each.run.free]
        return Judge(runs[0], rounding_of(runs[0], nulls))

    def compared(self, other: Observed) -> Compared:
        """Compare a run of the same precision."""
        return compare_runs(self.first, other, self.rounding)

    def without_first(self, other: Observed, compared: Compared) -> Compared:
        """Return the comparison with a mistake that a run shows by itself, where it cannot be compared or is alike."""
        if compared.finding is not None and compared.finding.is_mistake:
            return compared
        alone = None if compared.finding is None else finding_among_ranks(self.first, other, self.rounding)
        finding = alone or same_order(self.first, other)
        return compared if finding is None else dataclasses.replace(compared, finding=finding)


def by_precision(runs: Sequence[Observed]) -> list[list[Observed]]:
    """The runs as the script is, and those in float32, without what has no first run."""
    several = [[each for each in runs if each.run.in_float32 is in_float32] for in_float32 in (False, True)]
    return [each for each in several if each and not each[0].run.null_seed]


def judge_scaled(other: Observed, judges: Mapping[bool, Judge]) -> Compared | None:
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


def compare_runs(first: Observed, other: Observed, rounding: Rounding) -> Compared:
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
