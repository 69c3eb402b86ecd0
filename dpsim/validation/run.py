"""One validation: sets and cases read, everything predicted and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpsim.model.cells import Cell
from dpsim.model.defaults import DEFAULTS, Default
from dpsim.uncertainty import IntervalWidth
from dpsim.validation.case import Case, read_cases
from dpsim.validation.contestants import PERFECT
from dpsim.validation.defaults import (
    NOBODY,
    as_shipped,
    filling,
    of_other_clusters,
    widened_as_shipped,
    widened_by_others,
)
from dpsim.validation.judge import JudgedRow, judged
from dpsim.validation.published import FOLDER, PublishedSet, read_sets
from dpsim.validation.scores import QUANTITIES, Score, pooled, score_sets
from dpsim.validation.widths import widths_by_cell


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The rows of all cases with their predictions.

    Every default, and how wide intervals are, is what the other clusters imply (``assumed``, by cluster); of another
    ``folder`` than dpsim's it is dpsim's own. ``raw`` are the same rows with intervals as wide as the model's own.
    """

    folder: Path = FOLDER
    sets: Mapping[str, PublishedSet]
    cases: Sequence[Case]
    assumed: Mapping[str, Sequence[Default]]
    rows: Sequence[JudgedRow]
    raw: Sequence[JudgedRow]

    @cached_property
    def scores(self) -> list[Score]:
        """The score of each set."""
        return score_sets(self.rows)

    @cached_property
    def widths(self) -> Mapping[Cell, IntervalWidth]:
        """How wide the intervals of the next cluster must be, in each cell."""
        return {
            cell: width
            for quantity in QUANTITIES
            for cell, width in widths_by_cell([row for row in self.raw if row.quantity == quantity]).items()
        }

    def summary(self) -> dict[str, Any]:
        """Return the summary of ``--json``: a record for each set and pooled, also with the defaults of dpsim."""

        return {
            "datasets": [{"dataset": score.name} | score.values() for score in (*self.scores, *pooled(self.scores))],
            "assumed": [
                {"cluster": name, "default": each.field, "value": each.value, "doubt": each.doubt}
                for name, of_cluster in self.assumed.items()
                for each in of_cluster
            ],
            "widths": [msgspec.structs.asdict(width) for width in self.widths.values()],
        }


def validate(folder: Path = FOLDER, *, executor: Executor | None = None) -> Validation:
    """Predict and score all cases of a folder with ``sets`` and ``cases``.

    What cases leave open is taken from the other clusters of dpsim; a folder of one's own is predicted with dpsim's
    defaults, which saw none of its sets. The workers of an ``executor`` (any ``concurrent.futures.Executor``) estimate
    what the other clusters imply, and predict parts of cases side by side; the result is the same. Raises
    ``ConfigError`` and ``FileFormatError``.
    """
    sets = read_sets(folder)
    cases = read_cases(sets, folder)
    of_dpsim = folder.resolve() == FOLDER.resolve()
    if of_dpsim:
        assumed: Mapping[str, Sequence[Default]] = of_other_clusters(cases, sets, executor=executor)
        fills = {name: filling(assumed.get(each.provenance.cluster, ())) for name, each in sets.items()}
    else:
        assumed, fills = {NOBODY: DEFAULTS}, dict.fromkeys(sets, as_shipped)
    raw = with_constants(judged(cases, sets, fills=fills, executor=executor))
    rows = widened_by_others(raw) if of_dpsim else widened_as_shipped(raw)
    return Validation(folder=folder, sets=sets, cases=cases, assumed=assumed, rows=rows, raw=raw)


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
