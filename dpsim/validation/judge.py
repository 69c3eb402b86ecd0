"""Predicts the rows of all cases, beside everyone who competes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

from dpsim.columns import Column, Row
from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.workers import in_order
from dpsim.model.cells import Cell, cell_of
from dpsim.model.interval import predict_with_interval
from dpsim.model.residuals import ratio
from dpsim.model.step import scheduled
from dpsim.validation.case import Case, Part, parts
from dpsim.validation.contestants import MODELS, of_collective, of_step
from dpsim.validation.inputs import Fill, RowInputs, as_stated, collective_inputs, fitted_step_inputs, outcome_s
from dpsim.validation.published import PublishedRow, PublishedSet

_CHUNK = 16
"""Parts that a worker is sent at once."""


class JudgedRow(Row):
    """A row of a case: what was published, and what was predicted of it."""

    part: Part
    published: PublishedRow
    inputs: RowInputs
    others: dict[str, float]

    dataset = Column["JudgedRow", str]("name", "The set.", lambda row: row.part.dataset)
    case = Column["JudgedRow", str]("name", "The case, with what is held out of it.", lambda row: row.part.name)
    line = Column["JudgedRow", int](
        "count", "The line of the row in the set's CSV file.", lambda row: row.published.line
    )
    quantity = Column["JudgedRow", str]("name", "`collective` or `step`.", lambda row: row.part.case.quantity)
    role = Column["JudgedRow", str]("name", "`development` or `held out`.", lambda row: row.part.case.role)
    devices = Column["JudgedRow", int]("count", "The devices that take part.", lambda row: row.inputs.plan.devices)
    measured = Column["JudgedRow", float]("s", "The published time.")
    predicted = Column["JudgedRow", float]("s", "The predicted time.")
    low = Column["JudgedRow", float]("s", "The lower end of its 90 % interval.")
    high = Column["JudgedRow", float]("s", "The upper end of its 90 % interval.")
    error = Column["JudgedRow", float](
        "ratio", "The relative error: predicted / measured - 1.", lambda row: row.predicted / row.measured - 1
    )
    cluster = Column["JudgedRow", str]("name", "The cluster that the set was measured on.")
    cell = Column["JudgedRow", Cell]("name", "What is asked beyond what is known (`dpsim.model.cells`).")
    unknown = Column["JudgedRow", str]("name", "What makes most of the interval on the side of the error.")
    null_s = Column["JudgedRow", dict[str, float]]("s", "What each null says.", lambda row: row.nulls(), each=True)
    model_s = Column["JudgedRow", dict[str, float]](
        "s",
        "What each published formula says.",
        lambda row: {n: row.others[n] for n in MODELS if n in row.others},
        each=True,
    )

    @property
    def miss(self) -> float:
        """The error over the interval's half width on that side, both in logarithms."""
        return ratio(self.measured, self.predicted, self.low, self.high)

    def nulls(self) -> dict[str, float]:
        """Return what the nulls of the case say: those that it names, or all."""
        named = self.part.case.nulls
        return {n: s for n, s in self.others.items() if n not in MODELS and (not named or n in named)}


def judged(
    cases: Iterable[Case],
    sets: Mapping[str, PublishedSet],
    *,
    fills: Mapping[str, Fill] | None = None,
    executor: Executor | None = None,
) -> list[JudgedRow]:
    """Return every row of the cases with its prediction, its interval and what everyone else says.

    ``fills`` put into the inputs of a set's steps what is assumed of those that its cases leave open; nulls know no
    more than the cases state.
    ``executor`` predicts the parts of cases side by side: any ``concurrent.futures.Executor``. Raises ``ConfigError``.
    """
    tasks = (part for case in cases for part in parts(case, sets[case.dataset]))
    rows = in_order(executor, functools.partial(_judged_part, sets, fills or {}), tasks, chunk=_CHUNK)
    return [row for of_task in rows for row in of_task]


def _judged_part(sets: Mapping[str, PublishedSet], fills: Mapping[str, Fill], part: Part) -> list[JudgedRow]:
    """Return the rows of a part. An error names the case."""
    try:
        return _judged_rows(sets, fills, part)
    except DpsimError as error:
        if part.case.name in error.given:
            raise
        raise ConfigError(f"case {part.name}: {error.given}", allowed=error.allowed, remedy=error.remedy) from error


def _judged_rows(sets: Mapping[str, PublishedSet], fills: Mapping[str, Fill], part: Part) -> list[JudgedRow]:
    published = sets[part.dataset]
    collective = part.case.quantity == "collective"
    if collective:
        inputs = collective_inputs(part)
    else:
        inputs = fitted_step_inputs(part, sets, fills.get(part.dataset, as_stated))
        as_published = fitted_step_inputs(part, sets)  # for nulls, which know no more than the case states
    judged = []
    for row in part.judged:
        own = inputs[row.line]
        prediction, interval = predict_with_interval(own.workload, own.machine, own.plan)
        measured_s = outcome_s(row, published, own.plan)
        if collective:
            others = of_collective(part.known, row, own.plan)
        else:
            others = of_step(part.known, row, as_published, published)
        judged.append(
            JudgedRow(
                part=part,
                published=row,
                inputs=own,
                others=others,
                cluster=published.provenance.cluster,
                cell=cell_of(own.machine, scheduled(own.workload, own.machine, own.plan)),
                unknown=interval.unknown(longer=measured_s > prediction.step_s),
                measured=measured_s,
                predicted=prediction.step_s,
                low=prediction.low_s,
                high=prediction.high_s,
            )
        )
    return judged
