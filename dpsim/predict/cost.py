"""What one collective costs on a Machine: its tables first, the link's formula where no table covers the case."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError, unknown
from dpsim.layout import check_hierarchy, check_layout, node_counts
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.plan import ALGORITHMS
from dpsim.predict.formulas import hierarchical_points, link_points, on_the_wire, wire_share
from dpsim.wire_dtype import SIXTEEN_BIT_MESSAGES

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """Costs against size: row 0 of ``points`` (rows, two or more columns) is bytes, ascending; the others seconds.

    The last segment says how costs go on. ``last_bytes`` is the largest size that counts as known; beyond it a cost is
    extrapolated.
    """

    points: Floats
    last_bytes: float


@numba.njit(cache=True, nogil=True)
def at(points, row, size_bytes):  # type: ignore[no-untyped-def]
    """Row ``row`` of a curve at a size: linear between points, the first value below them, the last slope above.

    Size 0 costs 0: there is nothing to send.
    """
    last = points.shape[1] - 1
    if size_bytes <= 0:
        return 0.0
    if size_bytes <= points[0, 0]:
        return points[row, 0]
    if size_bytes >= points[0, last]:
        slope = (points[row, last] - points[row, last - 1]) / (points[0, last] - points[0, last - 1])
        return points[row, last] + slope * (size_bytes - points[0, last])
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        if points[0, middle] <= size_bytes:
            low = middle
        else:
            high = middle
    weight = (size_bytes - points[0, low]) / (points[0, high] - points[0, low])
    return points[row, low] * (1.0 - weight) + points[row, high] * weight


def _continued(points: Floats) -> Floats:
    """A table's points and one more at twice its last size, along the table's last segment.

    The last segment runs from the largest size that is at most half the last one: in a table whose sizes double that
    is its last two points, and in a denser one it does not hang on the noise between two neighbours. A falling one
    counts as flat. A single point goes on in proportion.
    """
    last_size, last = points[0, -1], points[1:, -1]
    if points.shape[1] == 1:
        slope = last / last_size if last_size > 0 else np.zeros_like(last)
    else:
        base = int(np.clip(np.searchsorted(points[0], last_size / 2, side="right") - 1, 0, points.shape[1] - 2))
        slope = np.maximum((last - points[1:, base]) / (last_size - points[0, base]), 0.0)
    step = max(last_size, 1.0)
    return np.column_stack([points, np.concatenate([[last_size + step], last + slope * step])])


def collective_cost(
    machine: Machine, algorithm: str, devices: int, size_bytes: float, wire_dtype: str = "float32", layout: str = ""
) -> tuple[float, bool]:
    """(seconds of one allreduce alone, whether that is extrapolated).

    Within a table of this algorithm, device count and layout: linear in bytes, the first value below the first size,
    extrapolated along the last segment (``_continued``) above the last size.
    No such table: the link's formula, extrapolated if the machine has tables at all. One device costs 0.
    Raises ``ConfigError`` where the machine has neither.
    """
    if devices == 1:
        return 0.0, False
    curve = solo_curve(machine, algorithm, devices, wire_dtype, layout)
    return float(at(curve.points, 1, float(size_bytes))), bool(size_bytes > curve.last_bytes)


def solo_curve(machine: Machine, algorithm: str, devices: int, wire_dtype: str = "float32", layout: str = "") -> Curve:
    """The allreduce's cost curve (bytes, seconds), nothing else running. Raises ``ConfigError``."""
    key = ("solo", algorithm, devices, wire_dtype, layout)
    curve = machine.memo.get(key)
    if curve is None:
        curve = machine.memo[key] = _solo_curve(machine, algorithm, devices, wire_dtype, layout)
    found: Curve = curve
    return found


def _solo_curve(machine: Machine, algorithm: str, devices: int, wire_dtype: str, layout: str) -> Curve:
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    if devices < 1:
        raise ConfigError(f"devices is {devices}", allowed="1 or more")
    if devices == 1:
        return Curve(np.array([[0.0, 1.0], [0.0, 0.0]]), math.inf)
    check_layout(layout, devices)
    check_hierarchy(algorithm, devices, layout)
    table = _fitting(machine.allreduce, algorithm, devices, wire_dtype, layout)
    if table is not None:
        known = table.sizes_bytes[-1] if table.wire_dtype == wire_dtype else -1.0
        return Curve(_continued(np.array([_sizes(table, wire_dtype), table.time_s], np.float64)), known)
    if machine.link is None:
        covered = sorted({(t.algorithm, t.layout or str(t.devices)) for t in machine.allreduce})
        raise ConfigError(
            f"machine {machine.name!r} does not say what an allreduce by {algorithm!r} on {layout or devices} devices"
            " costs",
            allowed=", ".join(f"{name} on {count}" for name, count in covered),
            remedy="calibrate it, or add a [link] with latency_s and bandwidth_bytes_per_s to the machine file",
        )
    nodes, of_a_node = node_counts(layout, devices)
    link = on_the_wire(machine.link, wire_dtype)
    if algorithm == "hierarchical":
        points = hierarchical_points(link, machine.link_in_node or machine.link, nodes, of_a_node)
    else:
        if nodes == 1 and machine.link_in_node is not None:
            link = on_the_wire(machine.link_in_node, wire_dtype)
        points = link_points(link, algorithm, devices)
    return Curve(points, -1.0 if machine.allreduce else math.inf)


def _sizes(table: AllreduceCost | OverlapCost, wire_dtype: str) -> Floats:
    """A table's sizes, for a wire dtype: where none of that dtype is there, messages cost what as many bytes do.

    (``hierarchical`` sends only some of its bytes in that dtype, and shared memory none: charged as the table's own.)
    """
    sizes = np.array(table.sizes_bytes, np.float64)
    share = wire_share(table.wire_dtype) / wire_share(wire_dtype)
    return sizes * share if table.algorithm in SIXTEEN_BIT_MESSAGES else sizes


def _fitting(
    tables: tuple[AllreduceCost, ...], algorithm: str, devices: int, wire_dtype: str, layout: str
) -> AllreduceCost | None:
    """The table of this algorithm, device count and layout, of the same wire dtype if there is one."""
    fitting = [t for t in tables if (t.algorithm, t.devices, t.layout) == (algorithm, devices, layout)]
    same = [t for t in fitting if t.wire_dtype == wire_dtype]
    return next(iter(same or fitting), None)


def beside_curve(
    machine: Machine, algorithm: str, devices: int, overlap: str, wire_dtype: str = "float32", layout: str = ""
) -> tuple[Curve, float]:
    """(curve with rows bytes, seconds beside a running backward, compute seconds lost; seconds of one poll).

    Without a table of this algorithm, device count and mechanism the allreduce takes as long as alone and takes no
    compute time away, as for a GPU's copy engines; that is extrapolated where the machine has tables of the mechanism.
    """
    key = ("beside", algorithm, devices, overlap, wire_dtype, layout)
    found = machine.memo.get(key)
    if found is None:
        of_mechanism = [t for t in machine.overlap if t.overlap == overlap]
        asked = (algorithm, devices, layout)
        fitting = [t for t in of_mechanism if (t.algorithm, t.devices, t.layout) == asked]
        fitting.sort(key=lambda t: t.wire_dtype != wire_dtype)
        if fitting:
            table: OverlapCost = fitting[0]
            points = np.array([_sizes(table, wire_dtype), table.time_s, table.compute_loss_s], np.float64)
            known = float(table.sizes_bytes[-1]) if table.wire_dtype == wire_dtype else -1.0
            found = (Curve(_continued(points), known), table.poll_s)
        else:
            solo = solo_curve(machine, algorithm, devices, wire_dtype, layout)
            points = np.vstack([solo.points, np.zeros(solo.points.shape[1])])
            found = (Curve(points, -1.0 if of_mechanism else math.inf), 0.0)
        machine.memo[key] = found
    result: tuple[Curve, float] = found
    return result


def alpha_beta(
    machine: Machine, algorithm: str, devices: int, wire_dtype: str = "float32", layout: str = ""
) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of the line alpha + beta M nearest to the allreduce's cost.

    Least squares of the relative error over the table's points, neither number below 0; the formula's own first value
    and last slope where there is no table; a single point is all bandwidth. (0, 0) on one device.
    """
    if devices == 1:
        return 0.0, 0.0
    key = ("alpha_beta", algorithm, devices, wire_dtype, layout)
    found = machine.memo.get(key)
    if found is None:
        table = _fitting(machine.allreduce, algorithm, devices, wire_dtype, layout)
        if table is None:
            sizes, times = solo_curve(machine, algorithm, devices, wire_dtype, layout).points
            found = float(times[0]), float((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
        else:
            found = _line(_sizes(table, wire_dtype), np.array(table.time_s))
        machine.memo[key] = found
    line: tuple[float, float] = found
    return line


def _line(sizes: Floats, times: Floats) -> tuple[float, float]:
    keep = (times > 0) & (sizes > 0)
    sizes, times = sizes[keep], times[keep]
    if len(sizes) == 0:
        return 0.0, 0.0
    weight = 1.0 / times
    a, b = weight, weight * sizes
    aa, ab, bb = float(a @ a), float(a @ b), float(b @ b)
    determinant = aa * bb - ab * ab
    alpha = beta = -1.0
    if len(sizes) > 1 and determinant > 1e-12 * aa * bb:
        alpha = (float(a.sum()) * bb - float(b.sum()) * ab) / determinant
        beta = (float(b.sum()) * aa - float(a.sum()) * ab) / determinant
    if beta < 0 and alpha > 0:
        return float(a.sum()) / aa, 0.0
    if alpha < 0:
        return 0.0, float(b.sum()) / bb
    return alpha, beta


def compute_slowdown(machine: Machine, devices: int) -> tuple[float, bool]:
    """(factor on every compute time when ``devices`` compute at once, whether that is extrapolated).

    Linear between calibrated device counts, 1 for one device unless it is given, the largest count's beyond it.
    """
    key = ("slowdown", devices)
    found = machine.memo.get(key)
    if found is None:
        factors = {1: 1.0} | {s.devices: s.factor for s in machine.compute_slowdown}
        counts = sorted(factors)
        factor = float(np.interp(devices, counts, [factors[count] for count in counts]))
        found = machine.memo[key] = (factor, bool(machine.compute_slowdown) and devices > counts[-1])
    result: tuple[float, bool] = found
    return result
