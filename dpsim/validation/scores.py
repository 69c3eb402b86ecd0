"""Scores of predictions, by set and pooled: error, skill against nulls, coverage and interval score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.columns import Column, Row
from dpsim.errors import ConfigError
from dpsim.harness.sweep.coverage import constant_scores, interval_scores
from dpsim.model.residuals import LEVEL
from dpsim.validation.case import Quantity
from dpsim.validation.judge import JudgedRow

Floats = NDArray[np.float64]
_ROUNDING = 1e-9
QUANTITIES: tuple[Quantity, ...] = ("collective", "step")


class Score(Row):
    """How right the predictions of some rows are. ``weights`` (one a row) sum to 1."""

    rows_judged: Sequence[JudgedRow]
    weights: Floats
    null_errors: Floats
    best_null_errors: Floats
    constant: Floats

    name = Column["Score", str]("name", "The set, or what is pooled.")
    quantity = Column["Score", str]("name", "`collective` or `step`.", lambda s: s.rows_judged[0].quantity)
    cases = Column["Score", int]("count", "Cases: what is held out at once.", lambda s: len(s.cases_named))
    rows = Column["Score", int]("count", "Rows that are judged.", lambda s: len(s.rows_judged))
    median_abs_error = Column["Score", float]("ratio", "The median of |error| over rows.", lambda s: s.median(s.errors))
    max_abs_error = Column["Score", float]("ratio", "The largest |error|.", lambda s: float(s.errors.max()))
    null = Column["Score", str](
        "name",
        "The null that is chosen beforehand: of those that saw no judged row, the one that errs least on the other"
        " sets, by the geometric mean of its median error over that of each set's best null. A set that is alone takes"
        " its best one.",
    )
    null_median_abs_error = Column["Score", float](
        "ratio", "The median of |error| of the null.", lambda s: s.median(s.null_errors)
    )
    best_null = Column["Score", str](
        "name", "The null that errs least on the set itself: it is chosen with hindsight, by the judged rows."
    )
    best_null_median_abs_error = Column["Score", float](
        "ratio", "The median of |error| of the best null with hindsight.", lambda s: s.median(s.best_null_errors)
    )
    skill = Column["Score", float | None](
        "ratio",
        "1 - median error / that of the null that is chosen beforehand; missing where that makes none.",
        lambda s: s.skill_over(s.null_median_abs_error),
    )
    best_null_skill = Column["Score", float | None](
        "ratio", "The same over the best null with hindsight.", lambda s: s.skill_over(s.best_null_median_abs_error)
    )
    better_cases = Column["Score", int](
        "count", "Cases with a smaller median error than the null.", lambda s: s.count_better_cases()
    )
    coverage = Column["Score", float](
        "ratio", "The share of rows inside their 90 % intervals.", lambda s: s.mean(s.inside)
    )
    interval_score = Column["Score", float](
        "ratio",
        "The mean of (width + 20 times the distance outside) / measured: less is better.",
        lambda s: s.mean(s.interval_scores),
    )
    constant_interval_score = Column["Score", float](
        "ratio",
        "The same of intervals a constant factor wide, which is the best one for the other sets.",
        lambda s: s.mean(s.constant),
    )
    too_fast = Column["Score", float](
        "ratio",
        "The share of rows that are predicted too fast.",
        lambda s: s.mean(np.array([float(row.error < 0) for row in s.rows_judged])),
    )

    @property
    def cases_named(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows_judged))

    @property
    def errors(self) -> Floats:
        return np.array([abs(row.error) for row in self.rows_judged])

    @property
    def inside(self) -> Floats:
        return np.array([float(row.low <= row.measured <= row.high) for row in self.rows_judged])

    @property
    def interval_scores(self) -> Floats:
        low, high, measured = (np.array([getattr(r, name) for r in self.rows_judged]) for name in _ENDS)
        return interval_scores(low, high, measured, LEVEL)

    def skill_over(self, null_error: float) -> float | None:
        """Return 1 - median error / error of a null; ``None`` where that makes none."""
        return 1 - self.median_abs_error / null_error if null_error > 0 else None

    def mean(self, values: Floats) -> float:
        """Return the weighted mean."""
        return float(np.dot(values, self.weights))

    def median(self, values: Floats) -> float:
        """Return the weighted median: the mean of the lower and the upper one."""
        order = np.argsort(values)
        reached = np.cumsum(self.weights[order])
        middle = [int(np.searchsorted(reached, 0.5 - _ROUNDING)), int(np.searchsorted(reached, 0.5 + _ROUNDING))]
        return float(values[order][middle].mean())

    def count_better_cases(self) -> int:
        """Return in how many cases the median error is below the null's."""
        names = np.array([row.case for row in self.rows_judged])
        return sum(
            bool(np.median(self.errors[names == name]) < np.median(self.null_errors[names == name]))
            for name in self.cases_named
        )


_ENDS = ("low", "high", "measured")


def score_sets(rows: Sequence[JudgedRow], key: Callable[[JudgedRow], str] = lambda row: row.dataset) -> list[Score]:
    """Return a score for each set (or other ``key``), collectives before steps."""
    found = []
    for quantity in QUANTITIES:
        alike = [row for row in rows if row.quantity == quantity]
        constant = _constant(alike) if alike else np.empty(0)
        nulls = _nulls_beforehand(alike)
        for name in dict.fromkeys(map(key, alike)):
            chosen = np.array([key(row) == name for row in alike])
            of_key = [row for row in alike if key(row) == name]
            found.append(_score(name, of_key, constant[chosen], nulls[of_key[0].dataset]))
    return found


def _nulls_beforehand(rows: Sequence[JudgedRow]) -> dict[str, str | None]:
    """Return for each set the null that errs least on the other sets; ``None`` for one that is alone."""
    excess: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row.dataset for row in rows):
        errors = {
            null: max(float(np.median(of_null)), _ROUNDING)
            for null, of_null in _null_errors(name, [row for row in rows if row.dataset == name]).items()
        }
        excess[name] = {null: math.log(error / min(errors.values())) for null, error in errors.items()}

    def beforehand(name: str) -> str | None:
        others = [of_set for other, of_set in excess.items() if other != name]
        means = {
            null: float(np.mean(values))
            for null in excess[name]
            if (values := [of_set[null] for of_set in others if null in of_set])
        }
        return min(means, key=means.__getitem__, default=None)

    return {name: beforehand(name) for name in excess}


def pooled(scores: Iterable[Score]) -> list[Score]:
    """Return one score for collectives and one for steps, in which every set weighs the same."""
    listed = list(scores)
    found = []
    for quantity in QUANTITIES:
        members = [score for score in listed if score.quantity == quantity]
        if not members:
            continue
        joined = {
            name: np.concatenate([getattr(score, name) for score in members])
            for name in ("null_errors", "best_null_errors", "constant")
        }
        found.append(
            Score(
                name=f"all {quantity}s",
                rows_judged=[row for score in members for row in score.rows_judged],
                weights=np.concatenate([score.weights for score in members]) / len(members),
                null="that of each set",
                best_null="the best of each set",
                **joined,
            )
        )
    return found


def _null_errors(name: str, rows: Sequence[JudgedRow]) -> dict[str, Floats]:
    """Return the |error| of each row by each null that says something of all of them. Raises ``ConfigError``."""
    nulls = [row.nulls() for row in rows]
    common = [null for null in nulls[0] if all(null in each for each in nulls)]
    if not common:
        raise ConfigError(
            f"{name} has no null for all of its rows: {', '.join(rows[0].part.case.nulls)}",
            allowed=", ".join(rows[0].others),
            remedy="name others of these as nulls of the case, or none for all",
        )
    measured = np.array([row.measured for row in rows])
    return {null: np.abs(np.array([each[null] for each in nulls]) / measured - 1) for null in common}


def _score(name: str, rows: Sequence[JudgedRow], constant: Floats, beforehand: str | None) -> Score:
    errors = _null_errors(name, rows)
    best = min(errors, key=lambda null: float(np.median(errors[null])))
    null = beforehand or best
    return Score(
        name=name,
        rows_judged=rows,
        weights=np.full(len(rows), 1 / len(rows)),
        null=null,
        null_errors=errors[null],
        best_null=best,
        best_null_errors=errors[best],
        constant=constant,
    )


def _constant(rows: Sequence[JudgedRow]) -> Floats:
    """Return the interval score of each row where the width is a constant factor, the best one for the other sets."""
    predicted, measured = (np.array([getattr(row, name) for row in rows]) for name in ("predicted", "measured"))
    _, members = np.unique([row.dataset for row in rows], return_inverse=True)
    return constant_scores(predicted, measured, members, LEVEL, weights=1 / np.bincount(members)[members])[1]
