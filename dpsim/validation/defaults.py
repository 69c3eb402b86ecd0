"""What published machines leave open, estimated for the steps of one cluster from the steps of all others.

A prediction of a published step uses no default that its own cluster influenced: neither a value nor a width.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from dpsim.grouping import grouped
from dpsim.launch.workers import in_order
from dpsim.model.defaults import DEFAULTS, WIDTHS, Default, with_defaults
from dpsim.uncertainty import IntervalWidth
from dpsim.validation.case import Case, parts
from dpsim.validation.inputs import Fill, RowInputs, fitted_step_inputs, outcome_s
from dpsim.validation.judge import JudgedRow
from dpsim.validation.published import PublishedSet
from dpsim.validation.widths import widths_by_cell

_ALIKE = 1e-3
"""Mean misfits that differ by no more are as good as each other."""


TRIED: Mapping[str, tuple[float, ...]] = {
    "computation_taken": (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0),
    "contention": (1.0, 1.2, 1.5, 1.8, 2.2, 3.0),
    "compute_slowdown": (1.0, 1.02, 1.03, 1.04, 1.05, 1.06, 1.08, 1.2),
    "loss_growth": (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.08),
    "fixed_share": (0.01, 0.05, 0.09, 0.12, 0.18, 0.3, 0.6),
}
"""The values that are tried of each default that predictions depend on."""
BESIDE: Mapping[str, float] = {
    "computation_taken": 0.2,
    "contention": 1.5,
    "compute_slowdown": 1.04,
    "loss_growth": 0.01,
    "fixed_share": 0.1,
}
"""Round values of all others beside which those of one are tried: no set decides them, so that what is left out has no
part in what the others imply."""


def as_shipped(
    inputs: RowInputs, defaults: Sequence[Default] = DEFAULTS, widths: Sequence[IntervalWidth] = WIDTHS
) -> RowInputs:
    """Return the inputs with ``defaults`` for what a case leaves open: as shipped, those of ``dpsim predict``."""
    machine = with_defaults(inputs.workload, inputs.machine, defaults, widths)
    return replace(inputs, machine=machine)


def filling(assumed: Sequence[Default]) -> Fill:
    """Return what puts these defaults, and no widths, into the inputs of a row."""
    return functools.partial(as_shipped, defaults=tuple(assumed), widths=())


NOBODY = ""
"""Stands for a cluster that nobody has seen: what all clusters imply is assumed of it."""


def of_other_clusters(
    cases: Iterable[Case],
    sets: Mapping[str, PublishedSet],
    defaults: Sequence[Default] = DEFAULTS,
    *,
    executor: Executor | None = None,
) -> dict[str, tuple[Default, ...]]:
    """Return for each cluster with steps, and for ``NOBODY``, what the others imply of each default.

    A cluster's misfit with a value is the mean |log(predicted / published)| over all rows that its cases judge, beside
    round values of the other defaults (``BESIDE``). A cluster takes the value with the least sum of the others'
    misfits, so that one whose steps hardly depend on it says little; none, where no other one's do. Doubts are those of
    ``defaults``: they weigh unknowns against each other, and how wide intervals are is told by other clusters too.
    """
    steps = [case for case in cases if case.quantity == "step"]
    steps.sort(key=lambda case: -len(sets[case.dataset].rows))  # so that no worker ends with the largest one
    by_cluster = grouped(steps, lambda case: sets[case.dataset].provenance.cluster)
    tried = [default for default in defaults if default.field in TRIED]
    tasks = [(default, own) for own in by_cluster.values() for default in tried]
    each = in_order(executor, functools.partial(_misfits, sets, tried), tasks, chunk=1)
    misfits = dict(zip(itertools.product(by_cluster, (default.field for default in tried)), each, strict=True))
    estimated = dict[str, tuple[Default, ...]]()
    for name in (*by_cluster, NOBODY):
        of_name = list[Default]()
        for default in tried:
            others = [misfits[other, default.field] for other in by_cluster if other != name]
            told = [each for each in others if each is not None]
            if told:
                best = int(np.argmin(np.sum(told, axis=0)))
                of_name.append(replace(default, value=TRIED[default.field][best]))
        estimated[name] = tuple(of_name)
    return estimated


def _misfits(
    sets: Mapping[str, PublishedSet], defaults: Sequence[Default], task: tuple[Default, Sequence[Case]]
) -> list[float] | None:
    """Return how far off the cases of a cluster are with each of the tried values of a default.

    ``None`` where all are alike, and where the largest one is among the best: then something else that its sets do not
    state makes its steps longer.
    """

    default, cases = task
    beside = [replace(each, value=BESIDE[each.field]) for each in defaults if each != default]

    def misfit(value: float) -> float:
        fill, errors = filling((*beside, replace(default, value=value))), list[float]()
        for case in cases:
            published = sets[case.dataset]
            for part in parts(case, published, undivided=True):
                inputs = fitted_step_inputs(part, sets, fill)
                for row in part.judged:
                    own = inputs[row.line]
                    errors.append(abs(math.log(own.step_s() / outcome_s(row, published, own.plan))))
        return float(np.mean(errors))

    tried = TRIED[default.field]
    if misfit(tried[0]) == misfit(tried[-1]) == misfit(tried[len(tried) // 2]):
        return None
    misfits = [misfit(value) for value in tried]
    return None if misfits[-1] <= min(misfits) + _ALIKE else misfits


def widened_by_others(rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    """Return the rows with intervals as wide as the other clusters' rows of the same quantity say."""
    widths = {
        (quantity, cluster): widths_by_cell([r for r in rows if r.quantity == quantity and r.cluster != cluster])
        for quantity, cluster in dict.fromkeys((row.quantity, row.cluster) for row in rows)
    }

    def factor(row: JudgedRow) -> float:
        of_others = widths[row.quantity, row.cluster]
        return (
            of_others[row.cell].factor
            if row.cell in of_others
            else max((width.factor for width in of_others.values()), default=1.0)
        )

    return [_widened(row, factor(row)) for row in rows]


def widened_as_shipped(rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    """Return the rows, collectives with intervals as wide as dpsim's are; those of steps are so already."""
    factors = {width.group: width.factor for width in WIDTHS}
    return [_widened(row, factors[row.cell]) if row.quantity == "collective" else row for row in rows]


def _widened(row: JudgedRow, factor: float) -> JudgedRow:
    """Return a row with an interval so many times as wide, in logarithms."""
    ends = (("low", row.low), ("high", row.high))
    widened = {name: row.predicted * math.exp(factor * math.log(end / row.predicted)) for name, end in ends}
    return row.replaced(**widened)
