"""A short fixed computation, timed within every visit: how fast the machine was while its samples were taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.harness.measurement.speed import Mixture, mixture

_PRODUCTS, _TURNS, _GATHERED = 6, 3750, 20_000
_MORE = 2.0
_LEFT = np.full((128, 128), 1e-3, np.float32)
_PRODUCT = np.empty_like(_LEFT)
_MEMORY = np.ones(2**21, np.float32)
_PLACES = np.random.default_rng(0).integers(0, len(_MEMORY), _GATHERED)
_FOUND = np.empty(_GATHERED, np.float32)


def _compute() -> None:
    """About 0.6 ms: products, half as long in the interpreter, and as long reading here and there in 8 MiB.

    A core's neighbours slow these three down differently, and no single one of them follows a step's time as well.
    """
    for _ in range(_PRODUCTS):
        np.matmul(_LEFT, _LEFT, out=_PRODUCT)
    total = 0
    for turn in range(_TURNS):
        total += turn
    np.take(_MEMORY, _PLACES, out=_FOUND)


def reference_s(group: MPI.Intracomm) -> float:
    """Seconds of the reference computation, the mean over these ranks, which compute at once. Collective.

    Of several ranks the slowest in so short a time is rarely the slowest of a step, which takes longer: the mean
    follows the times of steps better.
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
        """Keep the reference times before and after a visit; their mean, which is that of the visit's samples."""
        self._reference_s.setdefault(devices, []).extend((before_s, after_s))
        return statistics.mean((before_s, after_s))

    def mixture(self, devices: int) -> Mixture:
        """The speeds with so many devices at work."""
        return mixture(self._reference_s[devices])

    def mixtures(self) -> dict[int, Mixture]:
        return {devices: self.mixture(devices) for devices in sorted(self._reference_s)}

    def steady(self) -> bool:
        """Whether the machine had one speed so far."""
        return all(speeds.steady for speeds in self.mixtures().values())


def unfinished(comm: MPI.Intracomm, start_s: float, seconds: float, settled: Callable[[], bool]) -> bool:
    """Whether to measure on: for ``seconds``, and for up to twice as long until rank 0 is ``settled``. Collective.

    So long a machine whose speed changes is watched, for the part of the time that each speed holds shows only slowly.
    """
    spent = (now() - start_s) / seconds
    return bool(comm.bcast(comm.rank == 0 and (spent < 1 or (spent < _MORE and not settled()))))
