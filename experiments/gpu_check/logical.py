"""All versions with several logical devices on one GPU, in one process, against copies in the same memory.

Every sample stands by itself: a long copy gives the host time to hand in all that follows; a copy of fresh numbers into
the buffers, which is timed and is the bound, and which rewrites them as a backward pass would; then the allreduce. Two
events each bound what is timed, so that the host's time to launch is not in it.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsim import codec
from dpsim.comm.cuda.device import Device, DeviceArray, Stream, open_device
from dpsim.experiments.gpu_check.record import Samples, kept
from dpsim.kernels.allreduce import reference, registry, tree
from dpsim.kernels.allreduce.cuda import Mode
from dpsim.kernels.allreduce.registry import Version

if TYPE_CHECKING:
    from mpi4py import MPI

_ALIGNMENT_BYTES = 256
_PERIOD_BYTES = 4 * 1_000_003
"""The random numbers repeat after a prime number of words, so that no exchange of equal parts goes unnoticed."""

_EMPTY = ""

Timed = Callable[[Any], None]
"""Work for the stream it is given."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure: ``samples`` of each at a size, or as many as fit into ``size_s``, but ``least``."""

    devices: tuple[int, ...] = (2, 4, 8)
    sizes_bytes: tuple[int, ...] = tuple(4**power for power in range(1, 15))
    samples: int = 25
    least: int = 5
    size_s: float = 2.0
    mode: Mode = "one-launch"
    head_start_bytes: int = 256 << 20


SIMULATOR = Effort(devices=(2, 3), sizes_bytes=(4, 60, 256), samples=2, least=2, mode="split", head_start_bytes=4)


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """``pristine`` numbers and the ``whole`` memory they are copied to; ``ranks`` are the arrays in it, float32."""

    pristine: DeviceArray
    whole: DeviceArray
    ranks: tuple[DeviceArray, ...]
    expected: DeviceArray

    def wrong(self, xp: Any) -> int:
        """Elements of all ranks' arrays that differ in a bit from the reference's sum."""
        bits = self.expected.view(np.uint32)
        return sum(int(xp.count_nonzero(array.view(np.uint32) != bits)) for array in self.ranks)


def alone(comm: MPI.Intracomm, argument: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """``measure`` as the task of one rank, for ``seconds`` at most."""
    device = open_device(0)
    device.use()
    effort = SIMULATOR if argument["simulated"] else Effort()
    found, left_out = measure(device, effort, tell, time.monotonic() + argument["seconds"])
    return {"samples": codec.to_builtins(found), "left_out": left_out}


def measure(
    device: Device, effort: Effort, tell: Callable[[str], None], deadline_s: float
) -> tuple[list[Samples], list[str]]:
    """Every version at every number of devices and size; and what was left out, with the reason.

    ``deadline_s``: when to stop, on ``time.monotonic``.
    """
    bench = _Bench(
        device=device, stream=device.stream(), effort=effort, empty=empty_launch(device),
        head_start=tuple(device.memory(effort.head_start_bytes) for _ in range(2)),
    )  # fmt: skip
    found: list[Samples] = []
    left_out: list[str] = []
    for devices in effort.devices:
        for size_bytes in effort.sizes_bytes:
            where = f"{devices} logical devices of {size_bytes} bytes"
            if time.monotonic() > deadline_s:
                left_out.append(f"{where}: no time left")
            elif 4 * devices * size_bytes > device.free_bytes():
                left_out.append(f"{where}: not enough memory")
            else:
                tell(where)
                found += _at_size(bench, devices, size_bytes)
    return found, left_out


def buffers(device: Device, stream: Stream, slots: tree.Slots, size_bytes: int) -> Buffers:
    """Random numbers for as many devices as there are slots, and what their sum must be."""
    devices, stride = len(slots.owners), -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    pristine, whole = device.memory(devices * stride), device.memory(devices * stride)
    draw = np.random.default_rng(devices)
    for rank in range(devices):
        numbers = draw.standard_normal(min(size_bytes, _PERIOD_BYTES) // 4, np.float32).view(np.uint8)
        for first in range(0, size_bytes, _PERIOD_BYTES):
            part = pristine[rank * stride + first : rank * stride + min(first + _PERIOD_BYTES, size_bytes)]
            device.upload(stream, numbers[: part.nbytes], part)
        stream.wait()  # before the host's numbers go
    given, ranks = (
        tuple(memory[rank * stride : rank * stride + size_bytes].view(np.float32) for rank in range(devices))
        for memory in (pristine, whole)
    )
    expected = reference.allreduce(given, slots)
    device.settle()
    return Buffers(pristine=pristine, whole=whole, ranks=ranks, expected=expected)


def empty_launch(device: Device) -> Timed:
    """A cooperative launch of one block a multiprocessor that does nothing."""
    if device.simulated:
        return lambda stream: None
    cuda: Any = importlib.import_module("numba.cuda")

    def empty(array: Any, never: int) -> None:
        grid = cuda.cg.this_grid()  # what makes the launch cooperative
        if never:
            grid.sync()

    kernel = cuda.jit("void(float32[::1], int64)")(empty)
    blocks = cuda.get_current_device().MULTIPROCESSOR_COUNT
    array = cuda.as_cuda_array(device.memory(4).view(np.float32), sync=False)
    return lambda stream: kernel[blocks, 512, stream](array, 0)


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What all sizes share; ``head_start``: memory to copy from and to."""

    device: Device
    stream: Stream
    effort: Effort
    empty: Timed
    head_start: tuple[DeviceArray, ...]

    def wrong_after(self, memory: Buffers, timed: Timed) -> int:
        """Wrong elements once ``timed`` has run on fresh numbers."""
        self.device.copy(self.stream, memory.pristine, memory.whole)
        timed(self.stream.launch)
        self.stream.wait()
        return memory.wrong(self.device.xp)

    def sample(self, memory: Buffers, timed: Timed) -> tuple[float, float]:
        """Seconds of the copy that rewrites the buffers, and of what is timed."""
        self.device.copy(self.stream, *self.head_start)
        before = self.stream.record()
        self.device.copy(self.stream, memory.pristine, memory.whole)
        between = self.stream.record()
        timed(self.stream.launch)
        after = self.stream.record()
        after.wait()
        return between.seconds_since(before), after.seconds_since(between)


def _at_size(bench: _Bench, devices: int, size_bytes: int) -> list[Samples]:
    effort, slots = bench.effort, tree.slots(range(devices + 1))
    memory = buffers(bench.device, bench.stream, slots, size_bytes)
    ready = [version for version in registry.versions("cuda") if size_bytes <= (version.most_bytes or size_bytes)]
    run = {version.name: _prepared(version, memory, slots, effort.mode) for version in ready}
    wrong = {name: bench.wrong_after(memory, timed) for name, timed in run.items()}
    timed = run | {_EMPTY: bench.empty}
    times: dict[str, list[float]] = {name: [] for name in timed}
    copies: dict[str, list[float]] = {name: [] for name in timed}
    begin_s = time.monotonic()
    for sample in range(-1, effort.samples):  # the first one warms up
        if sample >= effort.least and time.monotonic() - begin_s > effort.size_s:
            break
        for name in random.Random(sample).sample(sorted(timed), len(timed)):
            copy_s, time_s = bench.sample(memory, timed[name])
            if sample >= 0:
                copies[name].append(copy_s)
                times[name].append(time_s)
    return [
        Samples(
            algorithm=name, mode=effort.mode, devices=devices, processes=1, size_bytes=size_bytes, dtype="float32",
            wrong=wrong[name] + bench.wrong_after(memory, run[name]), clock="events", samples_s=kept(times[name]),
            copy_s=kept(copies[name]), empty_s=kept(times[_EMPTY]),
        )
        for name in run
    ]  # fmt: skip


def _prepared(version: Version, memory: Buffers, slots: tree.Slots, mode: Mode) -> Timed:
    stages: Sequence[Timed] = version.make(list(memory.ranks), slots, mode=mode).stages

    def run(stream: Any) -> None:
        for stage in stages:
            stage(stream)

    return run
