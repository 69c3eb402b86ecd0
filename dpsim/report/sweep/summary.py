"""A sweep in one screen: a row and a sentence for each network, how good the predictions were, and what to doubt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from dpsim.records.comparison import Comparison, Group
from dpsim.report.quality import answers as quality_answers
from dpsim.report.sweep.question import QUESTIONS, Question
from dpsim.report.sweep.reliability import beforehand_sentence, said
from dpsim.report.sweep.summary_table import network_text, times_table, where
from dpsim.report.sweep.tables import ddp_sentences, hook_sentences, same_buckets_sentences
from dpsim.report.sweep.verdict import verdict
from dpsim.report.sweep.warnings import instant, warnings
from dpsim.report.terminal import paragraph, table_lines
from dpsim.report.words import (
    counted,
    enumerated,
    interval_name,
    percent,
    skill_text,
)

MOST_LINES = 20
_FIRST = ("not-identical", "run", "predicted-after-measured", "no-time", "not-measured", "other-environment")
"""Warnings that are told before that of a machine that changes its speed."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The short form of a sweep's report, as ``rich.print`` shows it: at most 20 lines from 80 columns on."""

    comparison: Comparison
    folder: Path
    page: str = "index.html"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, comparison = options.max_width, self.comparison
        head = [*paragraph(_heading(comparison), width, style="bold"), Text("")]
        rows = [*table_lines(times_table(comparison, _report(comparison).screen), width), Text("")]
        foot = [
            *_hanging(_predictions(comparison), width),
            *_hanging(_doubts(comparison), width, style="yellow"),
            *_links(self.folder, self.page, width),
        ]
        yield from head
        yield from rows
        room = MOST_LINES - len(head) - len(rows) - len(foot)
        sentences = list(verdicts(comparison))
        if len([line for sentence in sentences for line in _hanging(sentence, width)]) > room:
            sentences = [*_short_verdicts(comparison), *sentences[len(comparison.groups) :]]
        yield from _fitting(sentences, width, room)
        yield from foot


def _links(folder: Path, page: str, width: int) -> list[Text]:
    """Return where the page is and what shows all tables: one line where that fits. Paths are never wrapped."""
    links = [f"Open  {folder / page}", f"All tables:  dpsim report {folder} --verbose"]
    line = "     ".join(links)
    return [Text(text, no_wrap=True, overflow="ignore") for text in ([line] if len(line) <= width else links)]


def _fitting(sentences: Sequence[str], width: int, lines: int) -> list[Text]:
    """Return the first sentences that fit into so many lines, and how many others there are."""
    shown: list[Text] = []
    for number, sentence in enumerate(sentences):
        wrapped = _hanging(sentence, width, style="bold")
        others = len(sentences) - number
        if len(shown) + len(wrapped) + (others > 1) > lines:
            return [*shown, Text(f"{counted(others, 'more sentence')} in the report.")]
        shown += wrapped
    return shown


def _hanging(text: str, width: int, style: str = "") -> list[Text]:
    return list(paragraph(text, width, style=style, hanging=2)) if text else []


def _heading(comparison: Comparison) -> str:
    """Return what was trained, where, and how long it was measured."""
    experiment, first = comparison.experiment, comparison.points[0]
    batches = {point.local_batch if experiment.weak else point.global_batch for point in comparison.points}
    where = "at once on each device" if experiment.weak else "a step"
    batch = f"{first.local_batch if experiment.weak else first.global_batch:g} samples {where}"
    if len(batches) > 1:
        batch = f"{len(batches)} batches"
    models = enumerated(point.model for point in comparison.points[:3])
    begin, end = instant(comparison.measured_from), instant(comparison.measured_until)
    time = f" for {_minutes(end, begin)}" if begin and end and end > begin else ""
    processor = first.calibrated_on.partition(",")[0].partition(";")[0]
    machine = f"{counted(comparison.cores, 'core')}{f' ({processor})' if processor else ''}"
    order = "Profiled and measured in turns" if comparison.blind_predicted_at else "Predicted first, then measured"
    without = ", predicted without a sample" * bool(comparison.blind_predicted_at)
    return f"{models} on {experiment.dataset}, {batch}, {machine}. {order}{time}{without}."


def _minutes(end: datetime, begin: datetime) -> str:
    seconds = round((end - begin).total_seconds())
    return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdicts(comparison: Comparison) -> Iterator[str]:
    """Yield a verdict on each group, then what the sweep learnt beside times."""
    for group in comparison.groups:
        text = said(comparison, group, _report(comparison))
        yield f"{_place(comparison, group)}: {text[:1].lower()}{text[1:]}"
    if not comparison.groups:
        yield "Only one device was run: there is nothing to choose."
    yield from _report(comparison).more_verdicts(comparison)
    yield from hook_sentences(comparison)
    yield from ddp_sentences(comparison)
    yield from same_buckets_sentences(comparison)
    if comparison.quality is not None:
        yield from quality_answers(comparison.quality)


def _report(comparison: Comparison) -> Question:
    return QUESTIONS.find(comparison.experiment.question)


def _place(comparison: Comparison, group: Group) -> str:
    """Return the network of a group at the start of its verdict, with what sets it apart where others share it."""
    networks = [network_text(each) for each in comparison.groups]
    return _sentence(network_text(group) if networks.count(network_text(group)) == 1 else where(group))


def _short_verdicts(comparison: Comparison) -> list[str]:
    """Return the verdicts in a few words each, for a screen that has no room for sentences; equal ones only once."""
    texts = [_short(comparison, group) for group in comparison.groups]
    if len(texts) > 1 and len(set(texts)) == 1:
        return [f"Everywhere: {texts[0]}."]
    return [f"{_place(comparison, group)}: {text}." for group, text in zip(comparison.groups, texts, strict=True)]


def _short(comparison: Comparison, group: Group) -> str:
    of, report = verdict(comparison, group), _report(comparison)
    if of.said != "best":
        return {"nothing": "nothing can be said", "one setting": "one setting"}.get(
            of.said, f"no {report.noun(group)} is surely best"
        )
    labels = dict.fromkeys(report.label(comparison, point) for point in of.chosen)
    choice = "as predicted" if of.model == "right" else f"predicted {' or '.join(labels)}"
    return f"{report.choices(comparison, group)}, {choice}"


def _predictions(comparison: Comparison) -> str:
    """Return how far the predictions were off, and how many medians lie in their intervals."""
    many = [point for point in comparison.scored if point.devices > 1] or list(comparison.scored)
    error = statistics.median(abs(point.error) for point in many)
    text = f"Predictions: {percent(error)} off."
    if comparison.beforehand_median_abs_error is not None:
        text = f"Predictions from the same minutes: {percent(error)} off. {beforehand_sentence(comparison)}"
    covered = comparison.interval
    if covered is not None:
        inside = round(covered.coverage * covered.points)
        text += f" {inside} of {covered.points} medians lie inside their {interval_name(comparison.interval_level)}s."
    if comparison.share_clean is not None:
        text += f" {percent(comparison.share_clean)} of the samples were clean."
    return " ".join([text, *_guesses(comparison)])


def _guesses(comparison: Comparison) -> Iterator[str]:
    """Yield for each network what the best simple guess was off, in one sentence for all of them."""
    scores = [(each, each.step) for each in comparison.networks if each.step.skill is not None]
    if not scores:
        return
    parts = [
        f"{percent(step.null_median_abs_error)} off (skill {skill_text(step.skill)})"
        + f" on {network_text(each)}" * (len(scores) > 1)
        for each, step in scores
    ]
    yield f"The best simple guess: {'; '.join(parts)}."


def _doubts(comparison: Comparison) -> str:
    """Return the gravest reason to doubt the sweep, and how many there are; nothing where there is none."""
    every = warnings(comparison)
    if not every:
        return ""
    number = f"{counted(len(every), 'warning')} in the report."
    grave = next((warning for kind in _FIRST for warning in every if warning.kind == kind), None)
    if grave is not None:
        return f"! {_sentence(grave.text)}: {grave.remedy}. {number}"
    if any(verdict(comparison, group).said == "nothing" for group in comparison.groups):
        return f"! The machine was disturbed: stop other processes, and run the sweep again. {number}"
    if comparison.share_clean is not None and (busy := next((each for each in every if each.kind == "busy"), None)):
        return f"! {_sentence(busy.text)}: {busy.remedy}. {number}"
    if any(warning.kind == "unsteady" for warning in every):
        change = percent(comparison.relative_uncertainty)
        return (
            f"! The machine changed its speed by itself while it was profiled, by about {change}. Trust the order, not "
            f"the milliseconds. {number}"
        )
    return f"! {_sentence(every[0].text)}: {every[0].remedy}. {number}"
