"""What a report says, before it is laid out as a page or as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from dpsim.report.comparison import Comparison, Group
from dpsim.report.facts import RULES, Facts
from dpsim.report.tables import Table, tables
from dpsim.report.warning import ReportWarning, warnings
from dpsim.report.words import (
    answers,
    best_measured,
    best_predicted,
    devices_name,
    gain,
    milliseconds,
    network_name,
    percent,
    skill_text,
)
from dpsim.units import format_size


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A number worth seeing at once."""

    value: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """One part of what was measured in a few numbers."""

    title: str
    emulated: bool
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class Content:
    """The texts, tables and facts of a report, in the order in which they are shown; figures are handed in beside."""

    name: str
    heading: str
    question: str
    answers: tuple[str, ...]
    cards: tuple[Card, ...]
    tables: tuple[Table, ...]
    warnings: tuple[ReportWarning, ...]
    rules: tuple[str, ...]
    facts: Facts
    environment: Facts


def content(comparison: Comparison, facts: Facts, environment: Facts) -> Content:
    """What the report of a sweep says."""
    return Content(
        name=comparison.name, heading=f"{comparison.name}: predicted, then measured", question=comparison.question,
        answers=tuple(answers(comparison)), cards=tuple(_card(comparison, group) for group in comparison.groups),
        tables=tables(comparison), warnings=warnings(comparison), rules=RULES, facts=facts, environment=environment,
    )  # fmt: skip


def _card(comparison: Comparison, group: Group) -> Card:
    best, guess = best_measured(comparison, group), best_predicted(comparison, group)
    tiles = [
        Tile(
            value=format_size(best.fusion_threshold_bytes),
            label=f"best threshold, {milliseconds(best.measured_step_s)} ms",
        ),
        Tile(
            value=format_size(guess.fusion_threshold_bytes),
            label=f"predicted best, {milliseconds(guess.measured_step_s)} ms measured",
        ),
        Tile(value=percent(group.step.median_abs_error), label="median error of the step time"),
        Tile(
            value=skill_text(group.step.skill),
            label=f"skill; best null errs {percent(group.step.null_median_abs_error)}",
        ),
    ]
    faster = gain(comparison, group)
    if faster is not None:
        tiles.insert(1, Tile(value=f"{faster[0]:.2f}x", label=f"as fast as {faster[1]}"))
    if group.below_noise:
        tiles.insert(0, Tile(value="no effect", label=f"{percent(group.effect)} is within the noise"))
    title = f"{network_name(group.network, group.emulated_network)}, {devices_name(group.devices)}"
    return Card(title=title, emulated=group.emulated_network, tiles=tuple(tiles))
