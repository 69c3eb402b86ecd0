"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dpsim.report.comparison import Comparison, Group
from dpsim.report.facts import RULES, Facts
from dpsim.report.tables import MEASURED_MARK, PREDICTED_MARK, tables
from dpsim.report.warning import warnings
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
class PageFigure:
    """A figure drawn for wide and for narrow windows, as ``<svg>`` text, and its caption."""

    title: str
    wide: str
    narrow: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """A number worth seeing at once."""

    value: str
    label: str


@dataclass(frozen=True, kw_only=True)
class _Card:
    """One network and device count in a few numbers."""

    title: str
    emulated: bool
    tiles: tuple[_Tile, ...]


def page(comparison: Comparison, figures: Sequence[PageFigure], facts: Facts, environment: Facts) -> str:
    """The page's HTML: no script, no resource from elsewhere."""
    loader = Environment(
        loader=PackageLoader("dpsim.report"), autoescape=select_autoescape(default=True), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return loader.get_template("index.html.j2").render(
        comparison=comparison, answers=answers(comparison), cards=[_card(comparison, g) for g in comparison.groups],
        figures=[(f.title, Markup(f.wide), Markup(f.narrow), f.caption) for f in figures],
        tables=tables(comparison), warnings=warnings(comparison), facts=facts, environment=environment, rules=RULES,
        marks=(MEASURED_MARK, PREDICTED_MARK),
    )  # fmt: skip


def _card(comparison: Comparison, group: Group) -> _Card:
    best, guess = best_measured(comparison, group), best_predicted(comparison, group)
    tiles = [
        _Tile(
            value=format_size(best.fusion_threshold_bytes),
            label=f"best threshold, {milliseconds(best.measured_step_s)} ms",
        ),
        _Tile(
            value=format_size(guess.fusion_threshold_bytes),
            label=f"predicted best, {milliseconds(guess.measured_step_s)} ms measured",
        ),
        _Tile(value=percent(group.step.median_abs_error), label="median error of the step time"),
        _Tile(
            value=skill_text(group.step.skill),
            label=f"skill; best null errs {percent(group.step.null_median_abs_error)}",
        ),
    ]
    faster = gain(comparison, group)
    if faster is not None:
        tiles.insert(1, _Tile(value=f"{faster[0]:.2f}x", label=f"as fast as {faster[1]}"))
    if group.below_noise:
        tiles.insert(0, _Tile(value="no effect", label=f"{percent(group.effect)} is within the noise"))
    title = f"{network_name(group.network, group.emulated_network)}, {devices_name(group.devices)}"
    return _Card(title=title, emulated=group.emulated_network, tiles=tuple(tiles))
