"""All versions with several logical devices on one GPU, in one process, against copies in the same memory.

Samples are taken as ``dpsim bench allreduce --backend cuda`` takes them, by the same ``Lane``; the bound is here the
copy that rewrites the buffers.

``python -m ...gpu_check.logical FILE SECONDS [VERSION ...]`` appends them to FILE, size by size, and prints what it had
to leave out. It needs no MPI. Sizes that FILE already has are not measured again, and VERSIONs not at all: so it can
go on after a version has failed. ``note_file(FILE)`` holds the version that runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsim.comm.cuda.available import open_device, simulating
from dpsim.comm.cuda.device import Device
from dpsim.experiments.command import ended, tell
from dpsim.experiments.gpu_check.journal import keep, kept_in
from dpsim.experiments.gpu_check.record import LARGE_BYTES, SMALL_BYTES, Samples, kept
from dpsim.kernels.allreduce import registry, tree
from dpsim.kernels.allreduce.cuda.launch import Mode
from dpsim.progress import Progress
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.runners.allreduce.logical import HEAD_START_BYTES, Lane, Timed, buffers, lane, prepared

_EMPTY = ""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure: ``samples`` of each at a size, or as many as fit into ``size_s``, but ``least``."""

    devices: tuple[int, ...] = (2, 4, 8)
    sizes_bytes: tuple[int, ...] = tuple(4**power for power in range(1, 15))
    samples: int = 25
    least: int = 5
    size_s: float = 2.0
    mode: Mode = "one-launch"
    head_start_bytes: int = HEAD_START_BYTES
    without: tuple[str, ...] = ()
    """Versions that are not measured."""


SIMULATOR = Effort(devices=(2, 3), sizes_bytes=(4, 60, 256), samples=2, least=2, mode="split", head_start_bytes=4)


def order(sizes_bytes: tuple[int, ...]) -> list[int]:
    """Return the sizes as they are measured: those of the targets first, the large ones before the small ones."""

    def rank(size_bytes: int) -> int:
        return 0 if size_bytes >= LARGE_BYTES else 1 if size_bytes <= SMALL_BYTES else 2

    return sorted(sizes_bytes, key=lambda size_bytes: (rank(size_bytes), size_bytes))


def note_file(path: Path) -> Path:
    """Return the file with the name of the version that runs; ``path`` gets the samples."""
    return path.with_suffix(".running")


def measure(device: Device, effort: Effort, tell: Progress, deadline_s: float, path: Path) -> list[str]:
    """Measure every version at every size and number of devices; returns what was left out, with the reason.

    ``deadline_s``: when to stop, on ``time.monotonic``. The file ``path`` gets the samples of a size as soon as it is
    measured.
    """
    measured = {(samples.devices, samples.size_bytes) for samples in kept_in(path, Samples)}
    on, empty = lane(device, effort.head_start_bytes), empty_launch(device)
    left_out: list[str] = []
    for size_bytes in order(effort.sizes_bytes):
        for devices in effort.devices:
            where = f"{devices} logical devices of {size_bytes} bytes"
            if (devices, size_bytes) in measured:
                continue
            if time.monotonic() > deadline_s:
                left_out.append(f"{where}: no time left")
            elif 4 * devices * size_bytes > device.free_bytes():
                left_out.append(f"{where}: not enough memory")
            else:
                tell(where)
                keep(path, _at_size(on, empty, effort, devices, size_bytes, note_file(path).write_text))
    return left_out


def empty_launch(device: Device) -> Timed:
    """Return a cooperative launch of one block a multiprocessor that does nothing."""
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


def _at_size(
    on: Lane, empty: Timed, effort: Effort, devices: int, size_bytes: int, note: Callable[[str], object]
) -> list[Samples]:
    """Take the samples of a size. ``note`` gets the name of each version before it is compiled, checked and timed."""
    slots = tree.slots(range(devices + 1))
    memory = buffers(on.device, on.stream, slots, size_bytes)
    run: dict[str, Timed] = {}
    wrong: dict[str, int] = {}
    for version in registry.versions("cuda"):
        if size_bytes <= (version.most_bytes or size_bytes) and version.name not in effort.without:
            note(version.name)
            run[version.name] = prepared(version, memory.ranks, slots, effort.mode)
            wrong[version.name] = on.wrong_after(memory, run[version.name])

    def visit(name: str, timed: Timed) -> tuple[float, float]:
        note(name)
        return on.sample(memory.pristine, memory.whole, timed)

    stop = StopRule(least_rounds=effort.least, most_rounds=effort.samples, most_s=effort.size_s)
    timed = run | {_EMPTY: empty}
    visits = {name: lambda name=name, call=call: visit(name, call) for name, call in timed.items()}
    taken_s = {
        name: [kept(column) for column in zip(*rows, strict=True)] for name, rows in in_turns(visits, stop).items()
    }
    return [
        Samples(
            algorithm=name,
            mode=effort.mode,
            devices=devices,
            processes=1,
            size_bytes=size_bytes,
            dtype="float32",
            wrong=wrong[name] + on.wrong_after(memory, run[name]),
            clock="events",
            samples_s=taken_s[name][1],
            copy_s=taken_s[name][0],
            empty_s=taken_s[_EMPTY][1],
        )
        for name in run
    ]


def main(path: Path, seconds: float, without: tuple[str, ...]) -> int:
    """Measure for at most ``seconds``, then end after the size that is being measured; the exit code."""
    deadline_s = time.monotonic() + seconds

    def run() -> None:
        device = open_device(0)
        device.use()
        effort = dataclasses.replace(SIMULATOR if simulating() else Effort(), without=without)
        for reason in measure(device, effort, tell, deadline_s, path):
            print(reason)

    return ended("gpu-check", run)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), tuple(sys.argv[3:])))
