"""Which strategy, with which settings, is predicted to be the fastest of those that fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.machine import Machine
from dpsim.model.interval import undecided
from dpsim.model.points import ScriptDefaults, plan_one
from dpsim.model.ranking import Refusal, ranked_strategies
from dpsim.model.rows import PredictedRow, Ratio
from dpsim.model.step import price, scheduled
from dpsim.setting import Grid
from dpsim.workload import Workload

SMALL_GAIN = 0.02
"""Plain data parallelism is advised before a strategy that is predicted to be faster by this share or less: predictions
err by more, and it asks the least of whoever trains."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is advised for one workload, machine, number of devices and global batch.

    ``choices``: the best row of each strategy, first the advised one, then in the order of ``PredictedRow.rank``.
    ``candidates``: all that were priced, in that order. ``plain``: the best one of plain data parallelism. ``script``
    is what the workload's script told DDP.
    """

    machine: Machine
    choices: tuple[PredictedRow, ...]
    candidates: tuple[PredictedRow, ...]
    refusals: tuple[Refusal, ...]
    plain: PredictedRow
    script: ScriptDefaults

    @property
    def advised(self) -> PredictedRow | None:
        """The fastest choice that may fit, or plain data parallelism (``SMALL_GAIN``); ``None`` where nothing fits."""
        first = self.choices[0]
        return None if first.memory.fits is False else first

    @property
    def equally_fast(self) -> list[PredictedRow]:
        """The other choices that may fit whose step cannot be told apart from the advised one's (``interval``)."""
        fitting = [each for each in self.choices[1:] if each.memory.fits is not False]
        return self.advised.as_fast(fitting) if self.advised else []

    @property
    def over_plain(self) -> Ratio | None:
        """Times as fast as plain data parallelism; ``None`` where nothing fits."""
        return self.advised.over(self.plain) if self.advised else None

    @property
    def undecided(self) -> str | None:
        """What is the most uncertain about the difference of the advised one from the one that comes nearest.

        See ``interval.undecided``. ``None`` where no other is equally fast.
        """
        if self.advised is None or not self.equally_fast:
            return None
        return undecided(self.advised.predicted[1], self.equally_fast[0].predicted[1])


def advise(workload: Workload, machine: Machine, grid: Grid, *, every: bool = False) -> Advice:
    """Return all strategies with their settings, ranked by their predicted step at one global batch.

    The grid has one setting; what is ranked is not among its fields: strategy, micro-batches, threshold and overlap.
    Without a global batch each device has the largest local batch of
    the workload. Each strategy has the settings of its ``Strategy.candidates``. A pipeline has 1, 2, 4 and so on
    micro-batches, up to ``MICRO_BATCHES_A_STAGE`` a stage; any other strategy the plan's own number, and twice and four
    times as many where nothing fits otherwise. Thresholds are those that ``plan_thresholds`` finds for plain data
    parallelism; overlaps are ``compare.known_mechanisms``.

    Without ``every``, candidates are left out that cannot become the best of their strategy: those whose step on a
    network that takes no time is as long as the step of another one that may fit. The choices are the same.

    Raises ``ConfigError`` where plain data parallelism cannot be priced.
    """
    base, script = plan_one(workload, machine, grid)
    price(scheduled(workload, machine, base), machine)
    candidates, refusals = ranked_strategies(workload, machine, base, every=every)
    plain, *others = (rows[0] for rows in candidates.values() if rows)
    return Advice(
        machine=machine,
        choices=_in_order(plain, others),
        candidates=tuple(sorted(itertools.chain(*candidates.values()), key=lambda row: row.rank)),
        refusals=refusals,
        plain=plain,
        script=script,
    )


def _in_order(plain: PredictedRow, others: Sequence[PredictedRow]) -> tuple[PredictedRow, ...]:
    """Return choices in the order of their rank, plain data parallelism first where others gain little."""
    fastest, *_ = ordered = sorted((plain, *others), key=lambda row: row.rank)
    if plain.step_s <= (1 + SMALL_GAIN) * fastest.step_s and plain.memory.fits is not False:
        ordered.sort(key=lambda row: row is not plain)
    return tuple(ordered)
