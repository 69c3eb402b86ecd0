"""What a report says, before it is laid out as a page or as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from dpsim.records.comparison import Comparison, Group
from dpsim.report.sweep import scaling
from dpsim.report.sweep.facts import RULES, Facts
from dpsim.report.sweep.tables import Table, score_tables, tables
from dpsim.report.sweep.warnings import ReportWarning, warnings
from dpsim.report.words import (
    answers,
    best_measured,
    best_predicted,
    gain,
    group_name,
    milliseconds,
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
        name=comparison.name,
        heading=f"{comparison.name}: predicted, then measured",
        question=comparison.question,
        answers=told(comparison),
        cards=tuple(_card(comparison, group) for group in comparison.groups),
        tables=shown(comparison),
        warnings=warnings(comparison),
        facts=facts,
        environment=environment,
        rules=RULES if not comparison.drift_measured else RULES + scaling.RULES,
    )


def told(comparison: Comparison) -> tuple[str, ...]:
    """The answers, in sentences."""
    return answers(comparison) if comparison.scaling is None else tuple(scaling.answers(comparison))


def shown(comparison: Comparison) -> tuple[Table, ...]:
    """The tables."""
    if comparison.scaling is None:
        return tables(comparison)
    return scaling.points_table(comparison), *score_tables(comparison)


def _card(comparison: Comparison, group: Group) -> Card:
    if comparison.scaling is None:
        found = _threshold_tiles(comparison, group)
    else:
        found = [Tile(value=value, label=label) for value, label in scaling.tiles(comparison, group)]
    return Card(title=group_name(group), emulated=group.emulated_network, tiles=tuple(found))


def _threshold_tiles(comparison: Comparison, group: Group) -> list[Tile]:
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
            label=f"skill; best baseline errs {percent(group.step.null_median_abs_error)}",
        ),
    ]
    faster = gain(comparison, group)
    if faster is not None:
        tiles.insert(1, Tile(value=f"{faster[0]:.2f}x", label=f"as fast as {faster[1]}"))
    if group.below_noise:
        tiles.insert(0, Tile(value="no effect", label=f"{percent(group.effect)} is within the uncertainty"))
    return tiles
