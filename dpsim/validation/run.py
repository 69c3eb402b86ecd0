"""One validation: sets and cases read, everything predicted and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpsim.model.defaults import DEFAULTS, Default
from dpsim.validation.case import Case, read_cases
from dpsim.validation.contestants import PERFECT
from dpsim.validation.defaults import (
    COLLECTIVE_WIDTH,
    as_shipped,
    filling,
    of_other_sets,
    widened,
    widths_of_other_sets,
)
from dpsim.validation.inputs import Fill
from dpsim.validation.judge import JudgedRow, judged
from dpsim.validation.published import FOLDER, PublishedSet, read_sets
from dpsim.validation.scores import Score, pooled, score_sets


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The rows of all cases with their predictions.

    ``rows`` are predicted with every default as the other sets imply it (``assumed``), ``as_shipped`` with dpsim's own
    defaults; nulls know what cases state, and nothing of the defaults. Of another ``folder`` than dpsim's,
    ``as_shipped`` is empty.
    """

    folder: Path = FOLDER
    sets: Mapping[str, PublishedSet]
    cases: Sequence[Case]
    assumed: Mapping[str, Sequence[Default]]
    rows: Sequence[JudgedRow]
    as_shipped: Sequence[JudgedRow]

    @cached_property
    def scores(self) -> list[Score]:
        """The score of each set."""
        return score_sets(self.rows)

    @cached_property
    def shipped_scores(self) -> list[Score]:
        """The score of each set with the defaults that come with dpsim."""
        return score_sets(self.as_shipped)

    def summary(self) -> dict[str, Any]:
        """Return the summary of ``--json``: a record for each set and pooled, also with the defaults of dpsim."""

        def lines(scores: Sequence[Score]) -> list[dict[str, Any]]:
            return [{"dataset": score.name} | score.values() for score in (*scores, *pooled(scores))]

        return {
            "datasets": lines(self.scores),
            "as_shipped": lines(self.shipped_scores),
            "assumed": [
                {"dataset": name, "default": each.field, "value": each.value, "doubt": each.doubt}
                for name, of_set in self.assumed.items()
                for each in of_set
            ],
        }


def validate(folder: Path = FOLDER, *, executor: Executor | None = None) -> Validation:
    """Predict and score all cases of a folder with ``sets`` and ``cases``.

    What cases leave open is taken from the other sets of dpsim; a folder of one's own is predicted with dpsim's
    defaults, which saw none of its sets. The workers of an ``executor`` (any ``concurrent.futures.Executor``) estimate
    what the other sets imply, and predict parts of cases side by side; the result is the same. Raises ``ConfigError``
    and ``FileFormatError``.
    """
    sets = read_sets(folder)
    cases = read_cases(sets, folder)
    steps = [case for case in cases if case.quantity == "step"]
    of_dpsim = folder.resolve() == FOLDER.resolve()
    estimate = executor.submit(of_other_sets, cases, sets) if executor is not None and of_dpsim else None
    rows_as_stated = with_constants(judged(cases, sets, executor=executor))

    def filled(fills: Mapping[str, Fill]) -> list[JudgedRow]:
        """Return all rows, those of steps predicted with what is assumed; nulls know no more than the cases state."""
        assuming = iter(judged(steps, sets, fills=fills, executor=executor))
        return [next(assuming).replaced(others=row.others) if row.quantity == "step" else row for row in rows_as_stated]

    of_collectives = {("collective", name): COLLECTIVE_WIDTH for name in sets}
    shipped = widened(filled(dict.fromkeys(sets, as_shipped)), of_collectives)
    assumed: Mapping[str, Sequence[Default]] = dict.fromkeys((case.dataset for case in steps), DEFAULTS)
    rows = shipped
    if of_dpsim:
        assumed = of_other_sets(cases, sets) if estimate is None else estimate.result()
        rows = filled({name: filling(of_set) for name, of_set in assumed.items()})
        rows = widened(rows, widths_of_other_sets(rows))
    as_shipped_rows = shipped if of_dpsim else ()
    return Validation(folder=folder, sets=sets, cases=cases, assumed=assumed, rows=rows, as_shipped=as_shipped_rows)


def with_constants(rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    """Return the rows, those of steps with one null more: perfect scaling times a constant from the other sets.

    The constant is the median over the other sets of each one's median of published over perfect scaling.
    """
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if PERFECT in row.others:
            ratios.setdefault(row.dataset, []).append(row.measured / row.others[PERFECT])
    medians = {name: float(np.median(of_set)) for name, of_set in ratios.items()}
    scaled_rows = []
    for row in rows:
        others = [value for name, value in medians.items() if name != row.dataset]
        if PERFECT in row.others and others:
            scaled = row.others[PERFECT] * float(np.median(others))
            row = row.replaced(others=row.others | {f"{PERFECT} by other sets": scaled})
        scaled_rows.append(row)
    return scaled_rows
