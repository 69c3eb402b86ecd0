"""dpsim as a system of the allreduce benchmark on a GPU: several logical devices in its memory, one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from dpsim.backend import CUDA_VERSIONS
from dpsim.comm.cuda.available import cupy_version, open_device
from dpsim.comm.cuda.device import Device, DeviceArray
from dpsim.errors import ConfigError
from dpsim.harness.bench.logical import HEAD_START_BYTES, Buffers, Timed, buffers, kind, lane, prepared
from dpsim.harness.bench.turns import MEMCPY, SCALE, SCALING, Burst, Variant, bursts, obey, timed
from dpsim.harness.measurement.environment import version as installed_version
from dpsim.kernels.allreduce.cuda.launch import Mode
from dpsim.kernels.allreduce.reference import from_bfloat16
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.progress import Progress
from dpsim.units import format_size

DEFAULT = CUDA_VERSIONS["auto"]
_SIMULATED_HEAD_START_BYTES = 4
SIMULATED_EFFORT = [1, 1, 0]
"""Bursts, calls and calls before them in the simulator, whose times mean nothing."""


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """The task of ``launch.on_ranks`` on one rank: take part until the benchmark ends."""
    device = open_device(0)
    device.use()
    devices = LogicalDevices(device, argument["devices"], argument["dtype"], argument["algorithms"])
    hello = {"rank": 0, "library": library(device), "simulated": device.simulated}
    obey({"check": devices.check, "visit": devices.visit}, hello, argument["socket"])


def library(device: Device) -> str:
    """The device, and the libraries that run kernels on it."""
    cupy = "" if device.simulated else f", CuPy {cupy_version()}"
    return f"{device.name}, numba-cuda {installed_version('numba-cuda')}{cupy}"


@dataclass(frozen=True, kw_only=True)
class _DeviceVariant(Variant):
    """A variant that runs in the stream it is called with. ``wrong`` counts the wrong elements that a call has left."""

    wrong: Callable[[], int]


class LogicalDevices:
    """Does what the benchmark asks (``turns.Rank``) of all logical devices at once, timed by the GPU's events."""

    def __init__(self, device: Device, devices: int, dtype: str, algorithms: list[str]) -> None:
        self._device, self._slots, self._dtype = device, slots(range(devices + 1)), dtype
        self._algorithms = list(dict.fromkeys([*algorithms, DEFAULT]))
        self._mode: Mode = "split" if device.simulated else "one-launch"
        self._lane = lane(device, _SIMULATED_HEAD_START_BYTES if device.simulated else HEAD_START_BYTES)
        self._prepared: dict[int, tuple[Buffers, list[_DeviceVariant]]] = {}

    def check(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Run every variant once on random numbers; reply the elements that differ in a bit from the reference."""
        memory, variants = self._prepare(size_bytes, seed)
        replies = []
        for variant in variants:
            self._lane.sample(memory.pristine, variant.source, variant.call)
            replies.append(variant.reply(variant.wrong()))
        return {"variants": replies}

    def visit(self, size_bytes: int, seed: int, fresh: list[int], cached: list[int]) -> dict[str, Any]:
        """Time all variants in bursts, as ``turns.Rank.visit`` does, and check the last call of each fresh one."""
        memory, variants = self._prepared[size_bytes]
        wrong = [0] * len(variants)
        if self._device.simulated:
            fresh = cached = SIMULATED_EFFORT

        def run(burst: Burst) -> list[int]:
            variant, calls = variants[burst.variant], burst.warm_up + burst.calls
            if burst.cached:
                variant.source[...] = 0
                self._device.settle()
                times_s = self._lane.burst(calls, variant.call)
            else:
                samples = [self._lane.sample(memory.pristine, variant.source, variant.call) for _ in range(calls)]
                times_s = [time_s for _, time_s in samples]
                wrong[burst.variant] += variant.wrong()
            return [nanoseconds(time_s) for time_s in times_s[burst.warm_up :]]

        times = timed(variants, bursts(variants, seed, fresh, cached), run)
        return times | {"wrong": wrong}

    def _prepare(self, size_bytes: int, seed: int) -> tuple[Buffers, list[_DeviceVariant]]:
        """Memory and variants of a size, kept for its visits. Raises ``ConfigError`` where memory does not suffice."""
        count, stream = len(self._slots.owners), self._lane.stream
        needed, free = (4 * count + 1) * size_bytes, self._device.free_bytes()
        if needed > free:
            raise ConfigError(
                f"arrays of {format_size(size_bytes)} on {count} logical devices take {format_size(needed)}",
                allowed=f"{format_size(free)}, the memory that is free on {self._device.name}",
                remedy="give a smaller --max or fewer --devices",
            )
        memory = buffers(self._device, stream, self._slots, size_bytes, self._dtype, seed)
        source = self._device.memory(memory.whole.nbytes)
        self._prepared[size_bytes] = memory, self._variants(memory, source, size_bytes)
        return self._prepared[size_bytes]

    def _variants(self, memory: Buffers, source: DeviceArray, size_bytes: int) -> list[_DeviceVariant]:
        whole = memory.whole
        wrong_inside = functools.partial(memory.wrong, self._device.xp)
        wrong_outside = functools.partial(self._wrong_outside, memory, source)

        def variant(algorithm: str, call: Timed, repeat: int = 0) -> _DeviceVariant:
            return _DeviceVariant(
                algorithm=algorithm, source=whole, target=whole, call=call, repeat=repeat, wrong=wrong_inside
            )

        not_scaled = functools.partial(self._not_scaled, memory)
        variants = [dataclasses.replace(variant(SCALING, self._scaling(whole)), wrong=not_scaled)]
        copy = functools.partial(self._copy, source, whole)
        not_copied = functools.partial(self._not_copied, memory, source)
        variants.append(dataclasses.replace(variant(MEMCPY, copy), source=source, wrong=not_copied))
        for version in versions("cuda"):
            if version.name not in self._algorithms or size_bytes > (version.most_bytes or size_bytes):
                continue
            make = functools.partial(prepared, version, memory.ranks, self._slots, self._mode)
            in_place = variant(version.name, make())
            after_copy = functools.partial(self._after_copy, source, whole, in_place.call)
            variants.append(in_place)
            variants.append(dataclasses.replace(in_place, source=source, call=after_copy, wrong=wrong_outside))
            if version.name == DEFAULT:
                variants.append(variant(DEFAULT, make(), repeat=1))
        return variants

    def _scaling(self, whole: DeviceArray) -> Timed:
        """x = x * s in place, as two-shot does it for one device, in the same 16-byte accesses."""
        two_shot = next(version for version in versions("cuda") if version.name == "two-shot")
        return prepared(two_shot, [whole.view(kind(self._dtype))], slots([0, 1]), self._mode, SCALE)

    def _copy(self, source: DeviceArray, target: DeviceArray, stream: Any) -> None:
        """The device's own copy, beside scaling. ``stream`` is the lane's."""
        self._device.copy(self._lane.stream, source, target)

    def _after_copy(self, source: DeviceArray, target: DeviceArray, run: Timed, stream: Any) -> None:
        """Reduce out of place: a copy goes before, since the kernels add in place. ``stream`` is the lane's."""
        self._device.copy(self._lane.stream, source, target)
        run(stream)

    def _wrong_outside(self, memory: Buffers, source: DeviceArray) -> int:
        """Wrong elements of the sum, and elements of the source that have changed."""
        changed = int(self._device.xp.count_nonzero(source != memory.pristine))
        return memory.wrong(self._device.xp) + changed

    def _not_copied(self, memory: Buffers, source: DeviceArray) -> int:
        """Bytes of the copy and of its source that are not the original ones."""
        return sum(int(self._device.xp.count_nonzero(each != memory.pristine)) for each in (memory.whole, source))

    def _not_scaled(self, memory: Buffers) -> int:
        """Elements that are not the original ones times SCALE. bfloat16 is compared in float32: halving it is exact."""
        wrong = 0
        for arrays in zip(memory.given, memory.ranks, strict=True):
            before, after = map(from_bfloat16, arrays) if self._dtype == "bfloat16" else arrays
            wrong += int(self._device.xp.count_nonzero(after != before * before.dtype.type(SCALE)))
        return wrong


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, at least one: two events may be closer than their clock resolves."""
    return max(1, round(seconds * 1e9))
