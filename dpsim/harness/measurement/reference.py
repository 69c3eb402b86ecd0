"""A short fixed computation, timed in every visit: it tells how fast the machine was while the samples were taken."""

from __future__ import annotations

import statistics

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.harness.measurement.speed import Mixture, Visits, mixture, slowdown
from dpsim.machine import LEAST_SLOWDOWN, ComputeSlowdown

_PRODUCTS, _ADDITIONS, _READS = 6, 3750, 20_000
_LEFT = np.full((128, 128), 1e-3, np.float32)
_PRODUCT = np.empty_like(_LEFT)
_MEMORY = np.ones(2**21, np.float32)
_INDICES = np.random.default_rng(0).integers(0, len(_MEMORY), _READS)
_VALUES = np.empty(_READS, np.float32)


def _compute() -> None:
    """About 0.6 ms of work: matrix products, half as long in the interpreter, and as long reading from 8 MiB at random.

    A core's neighbours slow these three down differently, and no single one of them follows a step's time as well.
    """
    for _ in range(_PRODUCTS):
        np.matmul(_LEFT, _LEFT, out=_PRODUCT)
    total = 0
    for number in range(_ADDITIONS):
        total += number
    np.take(_MEMORY, _INDICES, out=_VALUES)


def reference_s(group: MPI.Intracomm) -> float:
    """Seconds of the reference computation on these ranks at once, their mean. Collective.

    In so short a time the slowest rank is rarely the slowest one of a step, which takes longer: the mean follows the
    times of steps better.
    """
    _compute()
    group.Barrier()
    start_s = now()
    _compute()
    return float(group.allreduce(now() - start_s, MPI.SUM) / group.size)


class SpeedLog:
    """The reference times of a job's visits, by the number of devices that computed at once."""

    def __init__(self) -> None:
        self._reference_s: dict[int, list[float]] = {}

    def visited(self, devices: int, before_s: float, after_s: float) -> float:
        """Keep the reference times before and after a visit; return their mean, the reference time of its samples."""
        self._reference_s.setdefault(devices, []).extend((before_s, after_s))
        return statistics.mean((before_s, after_s))

    def mixture(self, devices: int) -> Mixture:
        """The machine's speeds with ``devices`` at work."""
        return mixture(self._reference_s[devices])

    def mixtures(self) -> dict[int, Mixture]:
        """The machine's speeds by the number of devices at work."""
        return {devices: self.mixture(devices) for devices in sorted(self._reference_s)}

    def steady(self) -> bool:
        """Whether the machine has had one speed so far."""
        return all(speeds.steady for speeds in self.mixtures().values())

    def compute_slowdown(self, devices: int, alone: Visits, together: Visits) -> ComputeSlowdown:
        """How much longer the same computation takes on ``devices`` devices at once than on one, at full speed.

        A factor below the least that a machine may have was measured while something else slowed the one device down.
        """
        ratio = slowdown(alone, together, self.mixture(1), self.mixture(devices))
        factor = max(ratio.median, LEAST_SLOWDOWN)
        return ComputeSlowdown(devices=devices, factor=factor, half_width=ratio.relative_half_width)
