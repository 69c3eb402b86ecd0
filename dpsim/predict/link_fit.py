"""The link that a machine's own tables imply. It prices, as an extrapolation, what no table covers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS, Line
from dpsim.collective import node_counts
from dpsim.machine import AllreduceCost, Link
from dpsim.predict.formulas import wire_share

Floats = NDArray[np.float64]
_MOST_ROUNDS = 20


def fitted_link(
    tables: Sequence[AllreduceCost], *, emulated: bool = False, wire_latency_s: float | None = None
) -> Link | None:
    """The latency and bandwidth nearest to all tables, by the formulas of their algorithms; ``None`` without a time.

    Non-negative least squares of the relative error over all points, where seconds = alpha latency + beta M / bandwidth
    (reducing is part of the bandwidth). Where an algorithm costs the lowest of several lines, each point belongs
    to the line that is lowest there; this is repeated until no point changes. ``emulated``: each device has a link.
    What a message takes beyond ``wire_latency_s``, where that is known (an emulated link), is overhead of the host.
    """
    points = [
        (ALGORITHMS.find(table.algorithm).lines(*node_counts(table.layout, table.devices)), sent_bytes, time_s)
        for table in tables
        if table.devices > 1
        for sent_bytes, time_s in zip(_sent(table), table.time_s, strict=True)
        if sent_bytes > 0 and time_s > 0
    ]
    if not points:
        return None
    times = np.array([time_s for _, _, time_s in points])
    choices = [0] * len(points)
    for _ in range(_MOST_ROUNDS):
        rows = np.array([_row(lines[i], size, emulated) for (lines, size, _), i in zip(points, choices, strict=True)])
        solution = nonnegative(rows, times)
        costs = ([np.dot(_row(line, size, emulated), solution) for line in lines] for lines, size, _ in points)
        lowest = [int(np.argmin(of_point)) for of_point in costs]
        if lowest == choices:
            break
        choices = lowest
    residuals = np.abs(rows @ solution / times - 1)
    message_s, seconds_per_byte = solution.tolist()
    latency_s = message_s if wire_latency_s is None else min(wire_latency_s, message_s)
    return Link(
        latency_s=latency_s,
        message_overhead_s=message_s - latency_s,
        bandwidth_bytes_per_s=1 / seconds_per_byte if seconds_per_byte else float("inf"),
        fitted_to=", ".join(dict.fromkeys(f"{table.algorithm} on {table.layout or table.devices}" for table in tables)),
        median_residual=float(np.median(residuals)),
        largest_residual=float(np.max(residuals)),
    )


def _sent(table: AllreduceCost) -> list[float]:
    """A table's sizes in bytes on the wire."""
    share = wire_share(table.wire_dtype) if ALGORITHMS.find(table.algorithm).sixteen_bit_messages else 1.0
    return [share * size for size in table.sizes_bytes]


def _row(line: Line, size_bytes: float, emulated: bool) -> tuple[float, float]:
    """The factors of latency and of seconds per byte."""
    senders = 1 if emulated else line.senders
    return line.alpha + line.alpha_in_node, (line.beta * senders + line.beta_in_node) * size_bytes


def nonnegative(rows: Floats, times: Floats) -> Floats:
    """x >= 0 that makes ``rows @ x`` nearest to ``times`` (above 0): least squares of the relative error."""
    from scipy.optimize import nnls

    weighted = rows / times[:, None]
    scale = np.max(weighted, axis=0)
    scale[scale == 0] = 1.0
    solution: Floats = nnls(weighted / scale, np.ones(len(times)))[0] / scale
    return solution
