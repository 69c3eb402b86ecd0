"""Scores of predictions, by set and pooled: error, skill against nulls, coverage and interval score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpsim.columns import Column, Row
from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.harness.sweep.coverage import constant_scores, interval_scores
from dpsim.model.residuals import LEVEL
from dpsim.validation.case import Quantity
from dpsim.validation.judge import JudgedRow

Floats = NDArray[np.float64]
_ROUNDING = 1e-9
_RESAMPLES = 2000
QUANTITIES: tuple[Quantity, ...] = ("collective", "step")


class Score(Row):
    """How right the predictions of some rows are.

    ``table`` has a row for each, with its ``case``, ``cluster``, ``measured``, ``predicted``, ``low`` and ``high``, its
    |error| (``error``) and those of both nulls (``null_error``, ``best_null_error``), whether it lies ``inside`` its
    interval or is predicted ``too_fast``, its ``interval_score`` and that of a constant factor (``constant``), and its
    ``weight``; the weights sum to 1.
    """

    rows_judged: Sequence[JudgedRow]
    table: pd.DataFrame

    name = Column["Score", str]("name", "The set, or what is pooled.")
    quantity = Column["Score", str]("name", "`collective` or `step`.", lambda s: s.rows_judged[0].quantity)
    cases = Column["Score", int]("count", "Cases: what is held out at once.", lambda s: s.table.case.nunique())
    clusters = Column["Score", int]("count", "Clusters that were measured.", lambda s: s.table.cluster.nunique())
    rows = Column["Score", int]("count", "Rows that are judged.", lambda s: len(s.rows_judged))
    median_abs_error = Column["Score", float]("ratio", "The median of |error| over rows.", lambda s: s.median("error"))
    max_abs_error = Column["Score", float]("ratio", "The largest |error|.", lambda s: float(s.table.error.max()))
    null = Column["Score", str](
        "name",
        "The null that is chosen beforehand: of those that saw no judged row, the one that errs least on the other"
        " clusters, by the geometric mean of its median error over that of each cluster's best null. A cluster that is"
        " alone takes its best one.",
    )
    null_median_abs_error = Column["Score", float](
        "ratio", "The median of |error| of the null.", lambda s: s.median("null_error")
    )
    best_null = Column["Score", str](
        "name", "The null that errs least on the set itself: it is chosen with hindsight, by the judged rows."
    )
    best_null_median_abs_error = Column["Score", float](
        "ratio", "The median of |error| of the best null with hindsight.", lambda s: s.median("best_null_error")
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
        "ratio", "The share of rows inside their 90 % intervals.", lambda s: s.mean("inside")
    )
    interval_score = Column["Score", float](
        "ratio",
        "The mean of (width + 20 times the distance outside) / measured: less is better.",
        lambda s: s.mean("interval_score"),
    )
    constant_interval_score = Column["Score", float](
        "ratio",
        "The same of intervals a constant factor wide, which is the best one for the other clusters.",
        lambda s: s.mean("constant"),
    )
    coverage_of_clusters = Column["Score", tuple[float, float]](
        "ratio",
        "The 5 % and 95 % quantile of the share inside, over resampled clusters.",
        lambda s: s.over_clusters("inside"),
    )
    interval_score_of_clusters = Column["Score", tuple[float, float]](
        "ratio", "The same of the interval score.", lambda s: s.over_clusters("interval_score")
    )
    too_fast = Column["Score", float](
        "ratio",
        "The share of rows that are predicted too fast.",
        lambda s: s.mean("too_fast"),
    )

    def over_clusters(self, column: str) -> tuple[float, float]:
        """Return the 5 % and the 95 % quantile of a column's mean over resampled clusters, which weigh the same."""
        means = self.table.groupby("cluster")[column].mean().to_numpy()
        drawn = np.random.default_rng(0).integers(0, len(means), (_RESAMPLES, len(means)))
        low, high = np.quantile(means[drawn].mean(axis=1), [0.05, 0.95])
        return float(low), float(high)

    def skill_over(self, null_error: float) -> float | None:
        """Return 1 - median error / error of a null; ``None`` where that makes none."""
        return 1 - self.median_abs_error / null_error if null_error > 0 else None

    def mean(self, column: str) -> float:
        """Return the weighted mean."""
        return float(np.dot(self.table[column], self.table.weight))

    def median(self, column: str) -> float:
        """Return the weighted median: the mean of the lower and the upper one."""
        ordered = self.table.sort_values(column)
        middle = np.searchsorted(np.cumsum(ordered.weight), [0.5 - _ROUNDING, 0.5 + _ROUNDING])
        return float(ordered[column].to_numpy()[middle].mean())

    def count_better_cases(self) -> int:
        """Return in how many cases the median error is below the null's."""
        medians = self.table.groupby("case")[["error", "null_error"]].median()
        return int((medians.error < medians.null_error).sum())


def score_sets(rows: Sequence[JudgedRow], key: Callable[[JudgedRow], str] = lambda row: row.dataset) -> list[Score]:
    """Return a score for each set (or other ``key``), collectives before steps."""
    scores = []
    for quantity in QUANTITIES:
        alike = [row for row in rows if row.quantity == quantity]
        if not alike:
            continue
        nulls, table, names = _nulls_beforehand(alike), _table(alike), np.array([key(row) for row in alike])
        for name in dict.fromkeys(names.tolist()):
            members = np.flatnonzero(names == name).tolist()
            scores.append(_score(name, [alike[number] for number in members], table.iloc[members], nulls))
    return scores


def _table(rows: Sequence[JudgedRow]) -> pd.DataFrame:
    """Return the rows with their scores, but for those of nulls."""
    names = ("case", "measured", "predicted", "low", "high", "cluster")
    table = pd.DataFrame({name: [getattr(row, name) for row in rows] for name in names})
    _, members = np.unique([row.cluster for row in rows], return_inverse=True)
    measured, predicted, low, high = (table[name].to_numpy() for name in names[1:5])
    weights = 1 / np.bincount(members)[members]
    return table.assign(
        error=[abs(row.error) for row in rows],
        inside=((low <= measured) & (measured <= high)).astype(float),
        too_fast=(predicted < measured).astype(float),
        interval_score=interval_scores(low, high, measured, LEVEL),
        constant=constant_scores(predicted, measured, members, LEVEL, weights=weights)[1],
    )


def _nulls_beforehand(rows: Sequence[JudgedRow]) -> dict[str, str]:
    """Return for each cluster the null that errs least on the others; one that is alone has none."""
    errors = {name: _null_errors(name, own) for name, own in grouped(rows, lambda row: row.cluster).items()}
    medians = pd.DataFrame(
        {name: {null: np.median(e) for null, e in of_set.items()} for name, of_set in errors.items()}
    )
    excess = np.log(medians.clip(lower=_ROUNDING) / medians.clip(lower=_ROUNDING).min())
    means = {
        name: excess.loc[list(of_set), excess.columns != name].mean(axis=1).dropna() for name, of_set in errors.items()
    }
    return {name: str(mean.idxmin()) for name, mean in means.items() if len(mean)}


def pooled(scores: Iterable[Score]) -> list[Score]:
    """Return one score for collectives and one for steps, in which every cluster weighs the same."""
    every = []
    for quantity, members in grouped(scores, lambda score: score.quantity).items():
        table = pd.concat(score.table for score in members)
        rows_of = table.groupby("cluster").cluster.transform("size")
        every.append(
            Score(
                name=f"all {quantity}s",
                rows_judged=[row for score in members for row in score.rows_judged],
                null="that of each cluster",
                best_null="the best of each set",
                table=table.assign(weight=1 / rows_of / table.cluster.nunique()),
            )
        )
    return every


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


def _score(name: str, rows: Sequence[JudgedRow], table: pd.DataFrame, beforehand: Mapping[str, str]) -> Score:
    errors = _null_errors(name, rows)
    best = min(errors, key=lambda null: float(np.median(errors[null])))
    null = beforehand.get(rows[0].cluster, best)
    table = table.assign(null_error=errors[null], best_null_error=errors[best], weight=1 / len(rows))
    return Score(name=name, rows_judged=rows, null=null, best_null=best, table=table)
