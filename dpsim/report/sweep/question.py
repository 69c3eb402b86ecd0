"""``Question``: what a sweep may ask, and all that depends on it; see ``dpsim.harness.sweep.questions``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.records.sweep import Experiment
from dpsim.registry import Registry
from dpsim.report.charts import Chart
from dpsim.report.content import ReportFigure, Tile
from dpsim.report.sweep.verdict import verdict
from dpsim.report.table import Column, Table
from dpsim.report.words import counted


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a sweep asks, what of it the model is scored on, and what its report says.

    ``completed`` returns the experiment with what the question fills in, and raises ``ConfigError`` where it cannot be
    asked. ``apart`` are the fields that divide the settings into groups: only those of one group are compared.
    ``nulls`` are the predicted baselines on several devices, ``single_nulls`` those on one; without them one device is
    not scored, for its prediction repeats the profile. ``interpolates``: only every other local batch is profiled, so
    that predictions go beyond what was profiled. ``alternatives``: under overlap ``auto`` a second mechanism is
    measured too, to show what overlap does. ``alternatives_apart``: only settings with the recommended overlap are
    compared with each other.

    ``about`` says what such a sweep is over, ``question`` is a sentence, and ``points`` the table of all settings.
    ``beside`` and ``tiles`` are sentences and numbers of a group that stand beside its verdict where something can be
    said of it; ``more_answers`` and ``more_tiles`` also stand where nothing can. ``chart`` is the main figure, with a
    panel for each group, named ``figure_name`` and explained by ``caption``, where ``{band}`` stands for what the
    predicted intervals are; ``more_charts`` are figures after it.
    ``rules`` are added to those of every sweep where the divergence was measured.
    ``constant`` and ``effect`` complete sentences under the table of scores: the constant baseline is the median of the
    measured steps of ..., the effect is that of the worst ... over the best.

    The short form has a row for each group with the columns ``screen``. A setting is called by its ``label``, in a tile
    by what is ``short``, what is chosen by its ``noun``, and the settings that are as ``fastest`` as the best by all of
    them, or else by the best one.
    ``worth`` says first whether several devices pay, ``usual`` is the setting to compare the best with where that is
    slower, and ``more_verdicts`` are sentences at the end.
    """

    name: str
    about: str
    completed: Callable[[Experiment], Experiment]
    apart: Callable[[Experiment], tuple[str, ...]]
    nulls: tuple[str, ...]
    single_nulls: tuple[str, ...] = ()
    interpolates: bool = False
    alternatives: bool = False
    alternatives_apart: bool = True
    question: Callable[[Comparison], str]
    points: Callable[[Comparison], Table]
    chart: Callable[[Comparison], Chart]
    figure_name: str
    figure_title: str
    caption: str
    constant: str
    effect: str
    label: Callable[[Comparison, ComparedPoint], str]
    screen: Callable[[Comparison, Sequence[Group]], list[Column[Group]]]
    noun: Callable[[Group], str] = lambda group: "setting"
    short: Callable[[ComparedPoint], str] | None = None
    beside: Callable[[Comparison, Group], str] = lambda comparison, group: ""
    tiles: Callable[[Comparison, Group], tuple[Tile, ...]] = lambda comparison, group: ()
    rules: tuple[str, ...] = ()
    more_answers: Callable[[Comparison], tuple[str, ...]] = lambda comparison: ()
    more_verdicts: Callable[[Comparison], tuple[str, ...]] = lambda comparison: ()
    more_charts: Callable[[Comparison], tuple[ReportFigure | None, ...]] = lambda comparison: ()
    worth: Callable[[Comparison, Group], str] = lambda comparison, group: ""
    usual: Callable[[Comparison, Group], ComparedPoint | None] = lambda comparison, group: None
    fastest: Callable[[Comparison, Group], str] | None = None
    more_tiles: Callable[[Comparison, Group], tuple[Tile, ...]] = lambda comparison, group: ()

    def choices(self, comparison: Comparison, group: Group) -> str:
        """Return the settings that are as fast as the best."""
        if self.fastest is not None:
            return self.fastest(comparison, group)
        of = verdict(comparison, group)
        best, others = self.label(comparison, of.fastest), len(of.as_fast) - 1
        return f"{best} (and {counted(others, 'other')} as fast)" if others else best


QUESTIONS: Registry[Question] = Registry("question", Question, group="dpsim.questions")
