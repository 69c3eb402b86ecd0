"""What following the advice of ``tune`` costs, by what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.harness.sweep.scores import regret
from dpsim.model.rows import PredictedRow
from dpsim.records.comparison import Comparison
from dpsim.report.tuning import measured_point

MEASURED = 4
"""How many settings are measured beside the default."""


def measured_regret(comparison: Comparison, options: Sequence[PredictedRow], advised: PredictedRow) -> float:
    """Return time per sample of the advised option over that of the best of those measured - 1 (``scores.regret``).

    The best is chosen on other rounds than it is timed on, where there are enough, so that it may be negative.
    """
    measured = {option: measured_point(comparison, option.plan) for option in options}
    points = {option: point for option, point in measured.items() if point is not None}
    return regret([*points.values()], [*points].index(advised)).mean
