"""What a report says, before it is laid out as a page, as Markdown or for a terminal."""

from __future__ import annotations

from dataclasses import dataclass

from dpsim.records.sweep import Environment
from dpsim.report.charts import Chart
from dpsim.report.seen import seen
from dpsim.report.table import Table
from dpsim.units import format_size

Facts = tuple[tuple[str, str], ...]
"""Pairs of a name and a value."""


@dataclass(frozen=True, kw_only=True)
class ReportWarning:
    """A reason to doubt a result, and what to do about it. ``kind`` is a fixed word for programs."""

    kind: str
    text: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A number worth seeing at first sight."""

    value: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """One part of a measurement in a few numbers."""

    title: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """A figure; ``name`` is that of its files, and ``caption`` says how to read it."""

    name: str
    title: str
    caption: str
    chart: Chart

    @property
    def seen(self) -> str:
        """What there is to see in it, in a sentence."""
        return seen(self.chart)


@dataclass(frozen=True, kw_only=True)
class Content:
    """The texts, tables and facts of a report, in the order in which they are shown. Figures are passed separately."""

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


def environment_facts(environment: Environment) -> Facts:
    """Return the machine and the software of a measurement."""
    fixed = (
        ("processor", f"{environment.processor}, {environment.cores} cores, {format_size(environment.memory_bytes)}"),
        ("platform", environment.platform),
        (
            "software",
            f"dpsim {environment.dpsim}, Python {environment.python}, NumPy {environment.numpy}, "
            f"numba {environment.numba}",
        ),
        ("MPI", environment.mpi),
        ("BLAS", environment.blas),
    )
    return (*fixed, *sorted(environment.variables.items()))
