"""What a report says to the question of a sweep, and the words that depend on the question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpsim.records.comparison import Comparison, Group
from dpsim.report.charts import Chart
from dpsim.report.content import Tile
from dpsim.report.table import Table


@dataclass(frozen=True, kw_only=True)
class QuestionReport:
    """The parts of a report that a question decides.

    ``question`` is a sentence, ``answer`` what can be said of a group beside the errors of its predictions, ``tiles``
    the numbers of a group worth seeing at first sight, and ``points`` the table of all settings. ``more_answers`` and
    ``more_tiles`` also stand where nothing can be said of the step times of a group. ``chart`` is the main figure, with
    a panel for each group, named ``figure_name`` and explained by ``caption``, where ``{band}`` stands for what the
    predicted intervals are. ``rules`` are added to those of every sweep where the divergence was measured.
    ``constant`` and ``effect`` complete sentences under the table of scores: the constant baseline is the median of the
    measured steps of ..., the effect is that of the worst ... over the best.
    """

    question: Callable[[Comparison], str]
    answer: Callable[[Comparison, Group], str]
    tiles: Callable[[Comparison, Group], tuple[Tile, ...]]
    points: Callable[[Comparison], Table]
    chart: Callable[[Comparison], Chart]
    figure_name: str
    figure_title: str
    caption: str
    constant: str
    effect: str
    rules: tuple[str, ...] = ()
    more_answers: Callable[[Comparison], tuple[str, ...]] = lambda comparison: ()
    more_tiles: Callable[[Comparison, Group], tuple[Tile, ...]] = lambda comparison, group: ()
