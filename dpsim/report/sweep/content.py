"""The content of a sweep's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dpsim.constraints import FSDP
from dpsim.model.critical_batch import StepsFit, paying_devices
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.records.convergence import Convergence
from dpsim.report.content import Card, Content, Facts, Tile
from dpsim.report.quality import RULES as QUALITY_RULES
from dpsim.report.quality import answers as quality_answers
from dpsim.report.quality import tables as quality_tables
from dpsim.report.sweep.cells import samples_per_s
from dpsim.report.sweep.facts import rules
from dpsim.report.sweep.question import QUESTIONS, Question
from dpsim.report.sweep.reliability import said, uncertainty
from dpsim.report.sweep.tables import (
    by_network,
    ddp_sentences,
    errors_sentence,
    group_title,
    hook_sentences,
    own_runtime_sentence,
    same_buckets_sentences,
    score_tables,
)
from dpsim.report.sweep.verdict import verdict
from dpsim.report.sweep.warnings import warnings
from dpsim.report.table import Table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import devices_name, milliseconds, percent
from dpsim.units import format_duration


def content(comparison: Comparison, facts: Facts, environment: Facts) -> Content:
    """Return what the report of a sweep says."""
    report = QUESTIONS.find(comparison.experiment.question)
    return Content(
        name=comparison.experiment.name,
        heading=f"{_title(comparison)}: {_order(comparison)}",
        question=report.question(comparison),
        answers=answers(comparison),
        cards=tuple(Card(title=group_title(group), tiles=tiles(comparison, group)) for group in comparison.groups),
        tables=tables(comparison),
        warnings=warnings(comparison),
        facts=facts,
        environment=environment,
        rules=(
            *rules(comparison),
            *(report.rules if comparison.drift_measured else ()),
            *(QUALITY_RULES if comparison.quality is not None else ()),
        ),
    )


def _title(comparison: Comparison) -> str:
    """Return the experiment's name, or what PyTorch's DDP or FSDP trained."""
    experiment = comparison.experiment
    if not experiment.script:
        return experiment.name
    trainer = "FSDP" if {*experiment.values("runtime")} == {FSDP} else "DDP"
    return f"{Path(experiment.script).name} under PyTorch's {trainer}"


def _order(comparison: Comparison) -> str:
    """Return in which order the scored predictions and the measurement were made."""
    return "predicted and measured in the same minutes" if comparison.blind_predicted_at else "predicted, then measured"


def answers(comparison: Comparison) -> tuple[str, ...]:
    """Return the answers of a sweep, in sentences, of its times and then of the quality of training."""
    report = QUESTIONS.find(comparison.experiment.question)
    of_times = (*(answer(comparison, group) for group in comparison.groups), *report.more_answers(comparison))
    of_times += (*hook_sentences(comparison), *ddp_sentences(comparison), *same_buckets_sentences(comparison))
    if comparison.quality is None:
        return of_times
    return (*of_times, *quality_answers(comparison.quality), *time_to_target(comparison))


def answer(comparison: Comparison, group: Group) -> str:
    """Return the verdict on one group, with the numbers that support it."""
    report = QUESTIONS.find(comparison.experiment.question)
    text = said(comparison, group, report)
    text = f"On {group_title(group)}: {text[:1].lower()}{text[1:]}"
    if verdict(comparison, group).said == "nothing":
        return text
    sentences = [text, report.beside(comparison, group), errors_sentence(group)]
    return " ".join(filter(None, sentences)) + own_runtime_sentence(comparison.members(group))


def tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    """Return the numbers of a group that are worth seeing at first sight."""
    report = QUESTIONS.find(comparison.experiment.question)
    of_times = tuple(_verdict_tiles(comparison, group, report))
    baseline = f"the best baseline's is {percent(group.step.null_median_abs_error)}"
    error = Tile(value=percent(group.step.median_abs_error), label=f"median error; {baseline}")
    return *of_times, error, *report.more_tiles(comparison, group)


def _verdict_tiles(comparison: Comparison, group: Group, report: Question) -> Iterator[Tile]:
    """Yield what is best and what the model chose as far as that can be said, and the question's own numbers."""
    of, noun = verdict(comparison, group), report.noun(group)

    def tile(point: ComparedPoint, what: str) -> Tile:
        if report.short is None:
            name = report.label(comparison, point)
            return Tile(value=samples_per_s(point), label=f"samples/s, {what}: {name}" if name else "samples/s")
        return Tile(value=report.short(point), label=f"{what}, {milliseconds(point.measured_step_s)} ms measured")

    if of.said == "nothing":
        yield Tile(value="disturbed", label="nothing can be said; run the sweep again")
        return
    if of.said == "one setting":
        yield tile(of.fastest, f"the only {noun}")
    elif of.said == "best":
        yield tile(of.fastest, f"best {noun}")
    else:
        effect = "no effect" if of.said == "no difference" else "unsure"
        yield Tile(value=effect, label=f"no {noun} is surely best: {uncertainty(group)}")
    if of.choice:
        yield tile(of.chosen[0], f"predicted best {noun}" + " (a tie)" * (len(of.chosen) > 1))
    yield from report.tiles(comparison, group)


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the points, the scores, and what overlap does."""
    report = QUESTIONS.find(comparison.experiment.question)
    of_quality = quality_tables(comparison.quality) if comparison.quality is not None else ()
    return report.points(comparison), *score_tables(comparison, report), *of_quality


def for_terminal(comparison: Comparison) -> TerminalReport:
    """Return all of a sweep as ``rich.print`` shows it; ``Summary`` is its short form."""
    return TerminalReport(tables=tables(comparison), warnings=warnings(comparison), answers=answers(comparison))


def time_to_target(comparison: Comparison) -> Iterator[str]:
    """Yield, for each network, where training to the target loss is fastest, and how many devices pay."""
    if comparison.quality is None:
        return
    for convergence in comparison.quality.convergence.convergence:
        for network, points in by_network(comparison.scored).items():
            yield target_sentence(network, points, convergence)


def target_sentence(network: str, points: Sequence[ComparedPoint], convergence: Convergence) -> str:
    """Return where training to a target is fastest among these points, and how many devices pay."""
    fit = StepsFit(min_steps=convergence.min_steps, noise_batch=convergence.noise_batch)

    def measured_s(point: ComparedPoint) -> float:
        return fit.time_s(point.global_batch, point.measured_step_s)

    def predicted_s(point: ComparedPoint) -> float:
        return fit.time_s(point.global_batch, point.predicted_step_s)

    best, chosen = min(points, key=measured_s), min(points, key=predicted_s)
    images_per_s = best.global_batch / best.measured_step_s
    text = (
        f"On {network}, training to loss {convergence.target_loss:g} is fastest with {_name(best)}: "
        f"{fit.steps(best.global_batch):.0f} steps, {format_duration(measured_s(best))} (predicted "
        f"{format_duration(predicted_s(best))}), goodput {fit.goodput(best.global_batch, images_per_s):,.0f} of "
        f"{images_per_s:,.0f} samples/s"
    )
    if not min(convergence.batches) <= best.global_batch <= max(convergence.batches):
        text += f"; global batch {best.global_batch} is outside the batches at which steps were fitted"
    if chosen is best:
        text += ". The model chose the same"
    else:
        text += f". The model chose {_name(chosen)}, which takes {format_duration(measured_s(chosen))}"
    pay, expected = (paying_devices(_fastest(points, time_s)) for time_s in (measured_s, predicted_s))
    if pay < max(point.devices for point in points):
        return f"{text}. Beyond {devices_name(pay)} more do not pay (predicted: {expected})."
    return f"{text}. All {devices_name(pay)} pay (predicted: {expected})."


def _name(point: ComparedPoint) -> str:
    return f"local batch {point.local_batch:g} on {devices_name(point.devices)}"


def _fastest(points: Sequence[ComparedPoint], time_s: Callable[[ComparedPoint], float]) -> dict[int, float]:
    """Return the shortest time to the target on each number of devices."""
    fastest: dict[int, float] = {}
    for point in points:
        fastest[point.devices] = min(time_s(point), fastest.get(point.devices, time_s(point)))
    return fastest
