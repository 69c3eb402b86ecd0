"""How several logical devices of one GPU are measured: their buffers, and one sample of a kernel in its stream.

A sample is three pieces of work in a row: long copies, the head start, during which the host submits what follows; a
copy of the numbers into the buffers, which rewrites them as backward would; and the work that is timed. Events before
and after each of the last two bound them, so that the host's time to launch is in neither: a sample whose head start
ended before the host was done is taken again, with twice the head start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.cuda.device import Device, DeviceArray, Event, Stream
from dpsim.errors import CommunicationError
from dpsim.kernels.allreduce import reference, tree
from dpsim.kernels.allreduce.cuda.launch import Mode
from dpsim.kernels.allreduce.registry import Version
from dpsim.units import format_size

HEAD_START_BYTES = 256 << 20
_ALIGNMENT_BYTES = 256
PERIOD = 1_000_003
"""The random numbers repeat after a prime number of elements, so that no exchange of equal parts goes unnoticed."""
_CALLS_A_HEAD_START = 4
_MOST_COPIES = 256
"""More copies a head start would fill the queue of launches, which the host then waits for."""

Timed = Callable[[Any], object]
"""Work in the stream that it is called with."""


def kind(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the arrays that kernels take: bfloat16 numbers are uint16 codes."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def encoded(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return numbers in ``dtype``, each rounded once."""
    if dtype == "bfloat16":
        return reference.round_to_bfloat16(numbers.astype(np.float32))
    return numbers.astype(dtype)


def bits(array: DeviceArray) -> DeviceArray:
    """Return the same memory as unsigned integers, to be compared to the bit."""
    return array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))


def placed(device: Device, stream: Stream, numbers: NDArray[Any], array: DeviceArray) -> None:
    """Fill ``array`` with ``numbers``, over and over."""
    size = numbers.size
    for first in range(0, array.size, size):
        part = array[first : first + size]
        device.upload(stream, numbers[: part.size], part)
    stream.wait()  # before the host's numbers go


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The memory of the ``pristine`` numbers, and the ``whole`` memory that they are copied to.

    ``given`` and ``ranks`` are the devices' arrays in the one and the other; ``expected`` is the reference's sum.
    """

    pristine: DeviceArray
    whole: DeviceArray
    given: tuple[DeviceArray, ...]
    ranks: tuple[DeviceArray, ...]
    expected: DeviceArray

    def wrong(self, xp: Any) -> int:
        """Count the elements of all ranks' arrays that differ in a bit from the reference's sum."""
        return sum(int(xp.count_nonzero(bits(array) != bits(self.expected))) for array in self.ranks)


def buffers(
    device: Device, stream: Stream, slots: tree.PartialSums, size_bytes: int, dtype: str = "float32", seed: int = 0
) -> Buffers:
    """Return random numbers for as many devices as there are slots, and their sum by the reference."""
    devices, stride = len(slots.owners), -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    pristine, whole = device.memory(devices * stride), device.memory(devices * stride)
    given, ranks = (
        tuple(memory[rank * stride : rank * stride + size_bytes].view(kind(dtype)) for rank in range(devices))
        for memory in (pristine, whole)
    )
    draw, count = np.random.default_rng([seed, devices]), min(size_bytes // kind(dtype).itemsize, PERIOD)
    numbers = [encoded(draw.standard_normal(count), dtype) for _ in range(devices)]
    total = encoded(reference.allreduce([_added_in(each, dtype) for each in numbers], slots), dtype)
    expected = device.memory(size_bytes).view(kind(dtype))
    for array, values in zip((*given, expected), (*numbers, total), strict=True):
        placed(device, stream, values, array)
    return Buffers(pristine=pristine, whole=whole, given=given, ranks=ranks, expected=expected)


def _added_in(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return numbers of ``dtype`` in the dtype in which they are added: 16-bit ones in float32."""
    if dtype == "bfloat16":
        return reference.from_bfloat16(numbers)
    return numbers.astype(np.float32) if dtype == "float16" else numbers


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A stream in which samples are taken; ``head_start``: memory to copy from and to.

    ``copies`` is how many such copies a head start needs for as many timed calls, as far as that is known by now.
    """

    device: Device
    stream: Stream
    head_start: tuple[DeviceArray, DeviceArray]
    copies: dict[int, int] = field(default_factory=dict)

    def sample(self, source: DeviceArray, target: DeviceArray, timed: Timed) -> tuple[float, float]:
        """Return the seconds of the copy from ``source`` that rewrites ``target``, and of what is timed."""

        def submit() -> list[Event]:
            self.device.copy(self.stream, source, target)
            between = self.stream.record()
            timed(self.stream.launch)
            return [between, self.stream.record()]

        before, between, after = self._ahead(1, submit)
        return between.seconds_since(before), after.seconds_since(between)

    def burst(self, calls: int, timed: Timed) -> list[float]:
        """Return the seconds of each of ``calls`` in a row, with nothing between them."""

        def submit() -> list[Event]:
            events = []
            for _ in range(calls):
                timed(self.stream.launch)
                events.append(self.stream.record())
            return events

        events = self._ahead(calls, submit)
        return [after.seconds_since(before) for before, after in itertools.pairwise(events)]

    def _ahead(self, calls: int, submit: Callable[[], list[Event]]) -> list[Event]:
        """Return the end of a head start and the events of what is submitted during it, once they are reached.

        Raises ``CommunicationError`` if no head start is long enough.
        """
        copies = self.copies.setdefault(calls, 1 + calls // _CALLS_A_HEAD_START)
        while True:
            for _ in range(copies):
                self.device.copy(self.stream, *self.head_start)
            before = self.stream.record()
            events = submit()
            late = before.done() and not self.device.simulated  # the device may have waited for the host
            events[-1].wait()
            if not late:
                return [before, *events]
            copies *= 2
            if copies > _MOST_COPIES:
                size = format_size(self.head_start[0].nbytes)
                raise CommunicationError(
                    f"the host takes longer to submit {calls} calls than {copies // 2} copies of {size} take on "
                    f"{self.device.name}, so that its time would be measured",
                    remedy="end what else uses the processor, and measure again",
                )
            self.copies[calls] = copies

    def wrong_after(self, memory: Buffers, timed: Timed) -> int:
        """Return the wrong elements once ``timed`` has run on fresh numbers."""
        self.sample(memory.pristine, memory.whole, timed)
        return memory.wrong(self.device.xp)


def lane(device: Device, head_start_bytes: int) -> Lane:
    """Open a new lane of a device."""
    memory = device.memory(head_start_bytes), device.memory(head_start_bytes)
    return Lane(device=device, stream=device.stream(), head_start=memory)


def prepared(
    version: Version, arrays: Sequence[DeviceArray], slots: tree.PartialSums, mode: Mode, scale: float = 1.0
) -> Timed:
    """Return a version on the arrays of one process: all its stages, one after another."""
    stages: Sequence[Timed] = version.make(list(arrays), slots, mode=mode, scale=scale).stages

    def run(stream: Any) -> None:
        for stage in stages:
            stage(stream)

    return run
