"""dpsim as a system of the allreduce benchmark on a GPU: several logical devices in its memory, one process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from dpsim.backend import CUDA_VERSIONS
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.device import Device, DeviceArray
from dpsim.errors import ConfigError
from dpsim.harness.bench.logical import HEAD_START_BYTES, Buffers, Timed, buffers, kind, lane, prepared
from dpsim.harness.bench.turns import SCALE, SCALING, obey
from dpsim.harness.measurement.environment import version
from dpsim.kernels.allreduce.cuda.launch import Mode
from dpsim.kernels.allreduce.reference import from_bfloat16
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.units import format_size

DEFAULT = CUDA_VERSIONS["auto"]
_SIMULATED_HEAD_START_BYTES = 4


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> None:
    """The task of ``launch.on_ranks`` on one rank: take part until the benchmark ends."""
    device = open_device(0)
    device.use()
    alone = LogicalDevices(device, argument["devices"], argument["dtype"], argument["algorithms"])
    hello = {"rank": 0, "library": library(device), "simulated": device.simulated}
    obey({"check": alone.check, "visit": alone.visit}, hello, argument["socket"])


def library(device: Device) -> str:
    """The device and what runs on it."""
    cupy = "" if device.simulated else f", CuPy {version('cupy-cuda13x')}"
    return f"{device.name}, numba-cuda {version('numba-cuda')}{cupy}"


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way to reduce: ``run`` expects fresh numbers in ``fresh``, and cached ones wherever they are.

    ``wrong`` counts the wrong elements that a run has left.
    """

    algorithm: str
    in_place: bool
    repeat: int
    fresh: DeviceArray
    run: Timed
    wrong: Callable[[], int]


class LogicalDevices:
    """Does what the benchmark asks (``turns.Rank``), by the GPU's events, of all logical devices at once."""

    def __init__(self, device: Device, devices: int, dtype: str, algorithms: list[str]) -> None:
        self._device, self._slots, self._dtype = device, slots(range(devices + 1)), dtype
        self._algorithms = list(dict.fromkeys([*algorithms, DEFAULT]))
        self._mode: Mode = "split" if device.simulated else "one-launch"
        self._lane = lane(device, _SIMULATED_HEAD_START_BYTES if device.simulated else HEAD_START_BYTES)
        self._ready: dict[int, tuple[Buffers, list[_Way]]] = {}

    def check(self, size_bytes: int, seed: int) -> dict[str, Any]:
        """Every way once, on random numbers: how many elements differ in a bit from the sum in the fixed order."""
        memory, ways = self._prepared(size_bytes, seed)
        found = []
        for way in ways:
            self._lane.sample(memory.pristine, way.fresh, way.run)
            told = {"algorithm": way.algorithm, "in_place": way.in_place, "repeat": way.repeat}
            found.append(told | {"wrong": way.wrong()})
        return {"ways": found}

    def visit(self, size_bytes: int, seed: int, fresh: list[int], cached: list[int]) -> dict[str, Any]:
        """Time all ways in bursts in random order, as ``turns.Rank.visit`` does; the last call of each is checked."""
        memory, ways = self._ready[size_bytes]
        if self._device.simulated:
            fresh = cached = [1, 1, 0]  # its times mean nothing
        order = [(number, False) for number in range(len(ways)) for _ in range(fresh[0])]
        order += [(number, True) for number in range(len(ways)) if not ways[number].repeat for _ in range(cached[0])]
        random.Random(seed).shuffle(order)
        times: list[tuple[list[int], list[int]]] = [([], []) for _ in ways]
        wrong = [0] * len(ways)
        for number, is_cached in order:
            way = ways[number]
            if is_cached:
                way.fresh[...] = 0
                self._device.settle()
                times[number][1].extend(map(_ns, self._lane.burst(cached[1] + cached[2], way.run)[cached[2] :]))
                continue
            calls = [self._lane.sample(memory.pristine, way.fresh, way.run)[1] for _ in range(fresh[1] + fresh[2])]
            times[number][0].extend(map(_ns, calls[fresh[2] :]))
            wrong[number] += way.wrong()
        return {"fresh": [t[0] for t in times], "cached": [t[1] for t in times], "wrong": wrong}

    def _prepared(self, size_bytes: int, seed: int) -> tuple[Buffers, list[_Way]]:
        """Memory and ways of a size, kept for its visits."""
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
        self._ready[size_bytes] = memory, self._ways(memory, source, size_bytes)
        return self._ready[size_bytes]

    def _ways(self, memory: Buffers, source: DeviceArray, size_bytes: int) -> list[_Way]:
        make = functools.partial(prepared, slots=self._slots, mode=self._mode)
        ways = [
            _Way(
                algorithm=SCALING,
                in_place=True,
                repeat=0,
                fresh=memory.whole,
                run=self._scaling(memory.whole),
                wrong=functools.partial(self._not_scaled, memory),
            )
        ]
        for known in versions("cuda"):
            if known.name not in self._algorithms or size_bytes > (known.most_bytes or size_bytes):
                continue
            run = make(known, memory.ranks)
            inside = functools.partial(memory.wrong, self._device.xp)
            outside = functools.partial(self._wrong_outside, memory, source)
            after_copy = functools.partial(self._after_copy, source, memory.whole, run)
            ways.append(
                _Way(
                    algorithm=known.name,
                    in_place=True,
                    repeat=0,
                    fresh=memory.whole,
                    run=run,
                    wrong=inside,
                )
            )
            ways.append(
                _Way(
                    algorithm=known.name,
                    in_place=False,
                    repeat=0,
                    fresh=source,
                    run=after_copy,
                    wrong=outside,
                )
            )
            if known.name == DEFAULT:
                again = make(known, memory.ranks)
                ways.append(
                    _Way(
                        algorithm=DEFAULT,
                        in_place=True,
                        repeat=1,
                        fresh=memory.whole,
                        run=again,
                        wrong=inside,
                    )
                )
        return ways

    def _scaling(self, whole: DeviceArray) -> Timed:
        """x = x * s in place: what two-shot does for one device, in the same 16-byte accesses."""
        alone = next(known for known in versions("cuda") if known.name == "two-shot")
        return prepared(alone, [whole.view(kind(self._dtype))], slots([0, 1]), self._mode, SCALE)

    def _after_copy(self, source: DeviceArray, target: DeviceArray, run: Timed, stream: Any) -> None:
        """Out of place: the kernels add in place, so a copy goes before. ``stream`` is the lane's."""
        self._device.copy(self._lane.stream, source, target)
        run(stream)

    def _wrong_outside(self, memory: Buffers, source: DeviceArray) -> int:
        """Wrong elements of the sum, and of the source, which must be what it was."""
        changed = int(self._device.xp.count_nonzero(source != memory.pristine))
        return memory.wrong(self._device.xp) + changed

    def _not_scaled(self, memory: Buffers) -> int:
        """Elements that are not the given ones times SCALE. bfloat16 is compared in float32: halving it is exact."""
        wrong = 0
        for arrays in zip(memory.given, memory.ranks, strict=True):
            before, after = map(from_bfloat16, arrays) if self._dtype == "bfloat16" else arrays
            wrong += int(self._device.xp.count_nonzero(after != before * before.dtype.type(SCALE)))
        return wrong


def _ns(seconds: float) -> int:
    """Whole nanoseconds, at least one: events may be closer than their clock tells."""
    return max(1, round(seconds * 1e9))
