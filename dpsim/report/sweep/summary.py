"""A sweep in one screen: a row and a sentence for each network, how good the predictions were, and what to doubt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.quality.content import answers as quality_answers
from dpsim.report.sweep.batch_norm import norm_name
from dpsim.report.sweep.devices import drift_sentence
from dpsim.report.sweep.reliability import (
    as_fast,
    beforehand_sentence,
    cost_of_choice,
    disturbance,
    nothing_said,
    uncertainty,
    unsure,
)
from dpsim.report.sweep.settings import setting_name
from dpsim.report.sweep.summary_table import network_text, times_table, where
from dpsim.report.sweep.warnings import instant, warnings
from dpsim.report.terminal import paragraph, table_lines
from dpsim.report.words import (
    counted,
    devices_name,
    enumerated,
    percent,
    skill_text,
    threshold_noun,
)
from dpsim.units import format_size

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
        rows = [*table_lines(times_table(comparison), width), Text("")]
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
    where = " on each device" * experiment.weak
    batch = f"{first.local_batch if experiment.weak else first.global_batch:g} samples a step{where}"
    if len(batches) > 1:
        batch = f"{len(batches)} batches"
    models = enumerated(point.model for point in comparison.points[:3])
    begin, end = instant(comparison.measured_from), instant(comparison.measured_until)
    time = f" for {_minutes(end, begin)}" if begin and end and end > begin else ""
    processor = first.calibrated_on.partition(",")[0].partition(";")[0]
    machine = f"{counted(comparison.cores, 'core')}{f' ({processor})' if processor else ''}"
    predicted = "Predicted first, then profiled and" if comparison.blind_predicted_at else "Predicted first, then"
    return f"{models} on {experiment.dataset}, {batch}, {machine}. {predicted} measured{time}."


def _minutes(end: datetime, begin: datetime) -> str:
    seconds = round((end - begin).total_seconds())
    return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdicts(comparison: Comparison) -> Iterator[str]:
    """Yield a verdict on each group, then what the sweep learnt beside times."""
    for group in comparison.groups:
        text = nothing_said(comparison, group)
        if not text:
            parts = [_worth(comparison, group), _choice(comparison, group), _model(comparison, group)]
            text = " ".join(_sentence(part) for part in parts if part)
        yield f"{_place(comparison, group)}: {text[:1].lower()}{text[1:]}"
    if not comparison.groups:
        yield "Only one device was run: there is nothing to choose."
    if comparison.experiment.question == "devices" and (drift := drift_sentence(comparison)) is not None:
        yield drift
    if comparison.quality is not None:
        yield from quality_answers(comparison.quality)


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
    if disturbance(comparison, group):
        return "nothing can be said"
    if unsure(group):
        return f"no {_noun(comparison, group)} is surely best"
    predicted = comparison.best_predicted(group)
    as_predicted = predicted in as_fast(comparison, group)
    choice = "as predicted" if as_predicted else f"predicted {_label(comparison, predicted)}"
    return f"{_choices(comparison, group)}, {choice}"


def _worth(comparison: Comparison, group: Group) -> str:
    """Return whether several devices are faster than one, at all settings of a group or at the best."""
    if comparison.experiment.question != "fusion-threshold":
        return ""
    speedups = [p.measured_speedup for p in comparison.members(group) if p.measured_speedup is not None]
    if not speedups:
        return ""
    devices, low, high = devices_name(group.devices), min(speedups), max(speedups)
    if 1 / high - 1 > group.noise_floor:
        return f"do not use {devices}, 1 is faster."
    if low - 1 > group.noise_floor:
        span = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{high:.1f}"
        return f"{devices} are {span} times as fast as 1, whatever the {threshold_noun(group.runtime)}."
    if high - 1 > group.noise_floor:
        return f"{devices} are {high:.1f} times as fast as 1 at best."
    return f"{devices} are as fast as 1, as far as can be seen."


def _choice(comparison: Comparison, group: Group) -> str:
    """Return which settings to choose, or that none is surely the best."""
    best, slowest = (
        choose(comparison.members(group), key=lambda point: point.measured_s_per_sample) for choose in (min, max)
    )
    if best is slowest:
        return "only one setting was measured."
    if unsure(group):
        return f"no {_noun(comparison, group)} is surely best: {uncertainty(group)}."
    tensors = next((point for point in comparison.members(group) if point.fusion_threshold_bytes == 0), None)
    if comparison.experiment.question == "fusion-threshold" and tensors and tensors not in as_fast(comparison, group):
        slowest = tensors
    ratio = slowest.measured_s_per_sample / best.measured_s_per_sample
    return f"{_choices(comparison, group)} trained fastest, {ratio:.2g} times as fast as {_label(comparison, slowest)}."


def _choices(comparison: Comparison, group: Group) -> str:
    """Return the settings that are as fast as the best: ``a threshold of 32 KiB or more``, or the best one's name."""
    near = as_fast(comparison, group)
    if comparison.experiment.question != "fusion-threshold":
        best = _label(comparison, comparison.best_measured(group))
        return best if len(near) == 1 else f"{best} (and {counted(len(near) - 1, 'other')} as fast)"
    members = sorted(point.fusion_threshold_bytes for point in comparison.members(group))
    sizes = sorted(point.fusion_threshold_bytes for point in near)
    noun = f"a {threshold_noun(group.runtime)} of "
    if len(sizes) == 1:
        ends = {0.0: "one bucket for each tensor", math.inf: "one bucket"}
        token = format_size(sizes[0])
        return f"{ends[sizes[0]]} ({threshold_noun(group.runtime)} {token})" if sizes[0] in ends else noun + token
    first = members.index(sizes[0])
    if members[first : first + len(sizes)] != sizes:
        return noun + ", ".join(map(format_size, sizes[:-1])) + f" or {format_size(sizes[-1])}"
    if sizes[-1] == members[-1]:
        return f"{noun}{format_size(sizes[0])} or more"
    return f"{noun}{format_size(sizes[0])} to {format_size(sizes[-1])}"


def _noun(comparison: Comparison, group: Group) -> str:
    nouns = {
        "fusion-threshold": threshold_noun(group.runtime),
        "devices": "number of devices",
        "local-batch": "local batch",
        "batch-norm": "norm",
    }
    return nouns.get(comparison.experiment.question, "setting")


def _label(comparison: Comparison, point: ComparedPoint) -> str:
    """Return the name of a setting among those of its group."""
    question = comparison.experiment.question
    if question == "fusion-threshold":
        size = point.fusion_threshold_bytes
        ends = {0.0: "one message per tensor", math.inf: "one message per step"}
        return ends.get(size, f"{threshold_noun(point.runtime)} {format_size(size)}")
    if question == "devices":
        return f"{point.layout} device{'s' * (point.layout != '1')}"
    if question == "local-batch":
        return f"local batch {point.local_batch:g}"
    if question == "batch-norm":
        return f"norm {norm_name(point)}"
    return setting_name(comparison, point)


def _model(comparison: Comparison, group: Group) -> str:
    """Return what the model had chosen, and what that costs."""
    if unsure(group):
        return ""
    best, predicted = comparison.best_measured(group), comparison.best_predicted(group)
    if best is predicted:
        return "the model had chosen it."
    return f"the model had chosen {_label(comparison, predicted)}, {cost_of_choice(comparison, group)}."


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
        text += f" {inside} of {covered.points} medians lie inside their {covered.level:.0%} intervals."
    if comparison.overall is not None and comparison.overall.step.skill is not None:
        skill, guess = comparison.overall.step.skill, percent(comparison.overall.step.null_median_abs_error)
        known = "A simple guess was as good" if skill <= 0 else "The best simple guess was worse"
        text += f" {known}: {guess} off (skill {skill_text(skill)})."
    return text


def _doubts(comparison: Comparison) -> str:
    """Return the gravest reason to doubt the sweep, and how many there are; nothing where there is none."""
    every = warnings(comparison)
    if not every:
        return ""
    number = f"{counted(len(every), 'warning')} in the report."
    grave = next((warning for kind in _FIRST for warning in every if warning.kind == kind), None)
    if grave is not None:
        return f"! {_sentence(grave.text)}: {grave.remedy}. {number}"
    if any(disturbance(comparison, group) for group in comparison.groups):
        return f"! The machine was disturbed: stop other processes, and run the sweep again. {number}"
    if any(warning.kind == "unsteady" for warning in every):
        change = percent(comparison.relative_uncertainty)
        return (
            f"! The machine changed its speed by itself while it was profiled, by about {change}. Trust the order, not "
            f"the milliseconds. {number}"
        )
    return f"! {_sentence(every[0].text)}: {every[0].remedy}. {number}"
