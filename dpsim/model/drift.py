"""How far trainings drift apart whose bits depend on the device count: from rounding, and from local batch norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsim.data.sharding import shard
from dpsim.dtypes import ComputeDtype


def rounding_drift(
    *,
    spacing_updates: float,
    squared_updates: float,
    parameter_rms: float,
    unit: float,
    global_batch: int,
    devices: int,
    wire_unit: float = 0.0,
) -> float:
    """|w_n - w_1| / |w_1| after training, from the order of additions alone.

    A gradient element is a sum of B samples: on one device A = B additions one after another, on n devices B/n and then
    n - 1. In a sum of k numbers of random signs the k partial sums have sizes s sqrt(1) to s sqrt(k), and each rounding
    has variance unit^2/3 of its partial sum's square, so the sum, of size s sqrt(k), has the relative variance
    (unit^2/3) k/2. The two sums are independent: r^2 = (unit^2/3) (B + B/n + n - 1)/2, and an update u is another by
    d = r u. With 16 bits on the wire, of ``wire_unit``, n contributions and their sum are rounded once more, of which
    the relative variance is 2 wire_unit^2/3.

    Parameters are kept on a grid, of the spacing of floating-point numbers at w. A difference d far below the spacing h
    becomes h with probability d/h, else nothing: its variance is d h, with d^2 where the grid is finer. Over the steps
    these walk at random: rms^2 = sum of (mean of d h) + sum of (mean of d^2). What the differences do to later
    gradients is left out, so the prediction is of the beginning of the drift, and low once that matters.

    ``spacing_updates`` is the sum over steps of the mean of |u| h, ``squared_updates`` that of u^2, ``parameter_rms``
    the root mean square of w; ``unit`` is half the relative spacing (2^-24 in float32).
    """
    if devices == 1 or parameter_rms == 0:
        return 0.0
    additions = (global_batch + global_batch / devices + devices - 1) / 2
    relative = math.sqrt((unit**2 * additions + 2 * wire_unit**2) / 3)
    return math.sqrt(relative * spacing_updates + relative**2 * squared_updates) / parameter_rms


def unpredictable_drift(compute_dtype: ComputeDtype) -> str:
    """Return why the drift of the parameters is not predicted where products are computed in this dtype; else ``""``.

    ``rounding_drift`` takes the gradients of nearly equal parameters for nearly equal. With operands rounded to
    bfloat16, of relative spacing s = 2^-8, a relative difference d is another operand with probability of about d / s,
    and then it is s: the expected squared difference is d s, not d^2. So nothing happens until the first of the
    operands turns, and then the drift grows by orders of magnitude within few steps. When that is, is chance.
    """
    if compute_dtype == "float32":
        return ""
    return (
        f"not predicted for {compute_dtype}: as soon as rounding turns a first operand to the next number of "
        f"{compute_dtype}, which is by chance, the drift grows by orders of magnitude"
    )


def statistics_drift(local_batches: Sequence[int], global_batch: int) -> float:
    """Root mean square over devices of (a device's batch-norm mean - the global batch's), in deviations of a sample.

    Var = sigma^2 (1/b - 1/B): b of B samples without replacement, where sigma^2 is the variance (over the samples of
    the batch, divisor B - 1) of a sample's own mean. Devices without samples do not count.
    """
    variances = [1 / local - 1 / global_batch for local in local_batches if local]
    return math.sqrt(sum(variances) / len(variances))


def local_batches(global_batch: int, devices: int) -> list[int]:
    """Samples of each device."""
    return [stop - start for start, stop in (shard(global_batch, devices, rank) for rank in range(devices))]
