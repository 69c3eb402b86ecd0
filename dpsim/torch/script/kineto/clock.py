"""When the work that a host began was done: on the host itself, or on its device, where the trace has one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.torch.script.kineto.marks import Marks

Floats = NDArray[np.float64]


class HostClock:
    """Seconds at which work begun by the host in a span of its time began and was done, in the trace's own time.

    Here the host computes itself: what it began is done when the next thing begins.
    """

    def begun_s(self, start_s: float, end_s: float) -> float:
        """When the first computation that the host began in this span began."""
        return start_s

    def done_s(self, end_s: float) -> float:
        """When all computation that the host began before this moment was done."""
        return end_s

    def communicated_s(self, start_s: float, end_s: float) -> float:
        """When the last communication that the host began in this span was done; minus infinity without any."""
        return -math.inf


@dataclass(frozen=True, eq=False)
class _Work:
    """Pieces of device work in the order in which the host launched them, and when all so far were done."""

    launched_s: Floats
    start_s: Floats
    done_s: Floats

    @staticmethod
    def of(launched_s: Floats, start_s: Floats, end_s: Floats) -> _Work:
        order = np.argsort(launched_s, kind="stable")
        return _Work(launched_s[order], start_s[order], np.maximum.accumulate(end_s[order]))


class DeviceClock(HostClock):
    """A device computes what the host launches: kernels and copies by their launches; NCCL's kernels communicate."""

    def __init__(self, computation: _Work, communication: _Work) -> None:
        self._computation, self._communication = computation, communication

    def begun_s(self, start_s: float, end_s: float) -> float:
        work = self._computation
        first, last = np.searchsorted(work.launched_s, (start_s, end_s))
        return float(work.start_s[first:last].min()) if first < last else self.done_s(start_s)

    def done_s(self, end_s: float) -> float:
        work = self._computation
        count = int(np.searchsorted(work.launched_s, end_s))
        return float(work.done_s[count - 1]) if count else end_s

    def communicated_s(self, start_s: float, end_s: float) -> float:
        work = self._communication
        first, last = np.searchsorted(work.launched_s, (start_s, end_s))
        return float(work.done_s[last - 1]) if first < last else -math.inf


def clock_of(marks: Marks) -> HostClock:
    """The device's clock where the trace has kernels whose launches it has too, otherwise the host's."""
    device = marks.device
    if not len(device.launch) or not len(marks.launch):
        return HostClock()
    order = np.argsort(np.array(marks.launch, np.int64), kind="stable")
    numbers, moments_s = np.array(marks.launch, np.int64)[order], np.array(marks.launched_s, float)[order]
    launch = np.array(device.launch, np.int64)
    place = np.minimum(np.searchsorted(numbers, launch), len(numbers) - 1)
    known = numbers[place] == launch
    columns = [moments_s[place], np.array(device.start_s, float), np.array(device.end_s, float)]
    communicates = np.array(device.communicates, bool)
    if not (known & ~communicates).any():
        return HostClock()
    computation, communication = (
        _Work.of(*(column[known & kind] for column in columns)) for kind in (~communicates, communicates)
    )
    return DeviceClock(computation, communication)
