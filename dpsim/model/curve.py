"""Curves of costs against size: read between their points, and continued beyond them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.jit import jit
from dpsim.model.link_fit import nonnegative
from dpsim.model.scaling import Nearest

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """Costs against size: row 0 of ``points`` (rows, two or more columns) is bytes, ascending; the others seconds.

    The last segment says how costs go on. Sizes from ``first_bytes`` to ``last_bytes`` count as known; the cost of any
    other is extrapolated. Where other tables were scaled (``dpsim.model.scaling``), ``scaled`` are these, and nothing
    counts as known.
    """

    points: Floats
    first_bytes: float
    last_bytes: float
    scaled: Nearest | None = None


@jit
def segment(points, size_bytes):  # type: ignore[no-untyped-def]
    """(column, weight) of a size: a row r of the curve is r[column] + weight (r[column + 1] - r[column]) there.

    Weight is 0 below the first size, and above 1 beyond the last.
    """
    low, high = 0, points.shape[1] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if points[0, middle] <= size_bytes:
            low = middle
        else:
            high = middle
    return low, max(0.0, (size_bytes - points[0, low]) / (points[0, high] - points[0, low]))


@jit
def at(points, row, size_bytes):  # type: ignore[no-untyped-def]
    """Row ``row`` of a curve at a size: linear between points, the first value below them, the last slope above.

    Size 0 costs 0: there is nothing to send.
    """
    if size_bytes <= 0:
        return 0.0
    low, weight = segment(points, size_bytes)
    return points[row, low] + weight * (points[row, low + 1] - points[row, low])


def continued(points: Floats) -> Floats:
    """A table's points, one more at size 0 and one at twice its last size.

    Below the first size costs fall along a line to the alpha of the line that is nearest to the table
    (``fitted_line``), and to as much of the other rows. Above the last size they go on along the last segment, which
    runs from the largest size that is at most half the last one: in a table whose sizes double that is its last two
    points, and in a denser one it does not hang on the noise between two neighbours. A falling one counts as flat. A
    single point goes on in proportion, both ways.
    """
    last_size, last = points[0, -1], points[1:, -1]
    if points.shape[1] == 1:
        slope = last / last_size if last_size > 0 else np.zeros_like(last)
    else:
        base = int(np.clip(np.searchsorted(points[0], last_size / 2, side="right") - 1, 0, points.shape[1] - 2))
        slope = np.maximum((last - points[1:, base]) / (last_size - points[0, base]), 0.0)
    step = max(last_size, 1.0)
    beyond = np.concatenate([[last_size + step], last + slope * step])
    if points[0, 0] == 0:
        return np.column_stack([points, beyond])
    first = points[1:, 0]
    share = min(fitted_line(points[0], points[1])[0] / first[0], 1.0) if first[0] > 0 else 1.0
    return np.column_stack([np.concatenate([[0.0], first * share]), points, beyond])


def fitted_line(sizes: Floats, times: Floats) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of the line nearest to times at sizes in bytes; (0, 0) where all of them are 0."""
    keep = (times > 0) & (sizes > 0)
    if not np.any(keep):
        return 0.0, 0.0
    if np.count_nonzero(keep) == 1:
        return 0.0, float(times[keep][0] / sizes[keep][0])
    alpha_s, beta = nonnegative(np.column_stack([np.ones(int(keep.sum())), sizes[keep]]), times[keep])
    return float(alpha_s), float(beta)
