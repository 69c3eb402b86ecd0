"""All versions with several logical devices on one GPU, in one process, against copies in the same memory.

Samples are taken as ``dpsim bench allreduce --backend cuda`` takes them (``dpsim.harness.bench.logical``); the bound
is here the copy that rewrites the buffers.
"""

from __future__ import annotations

import importlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsim import codec
from dpsim.comm.cuda.available import open_device
from dpsim.comm.cuda.device import Device
from dpsim.experiments.gpu_check.record import Samples, kept
from dpsim.harness.bench.logical import HEAD_START_BYTES, Lane, Timed, buffers, lane, prepared
from dpsim.kernels.allreduce import registry, tree
from dpsim.kernels.allreduce.cuda.launch import Mode
from dpsim.progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI

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


SIMULATOR = Effort(devices=(2, 3), sizes_bytes=(4, 60, 256), samples=2, least=2, mode="split", head_start_bytes=4)


def alone(comm: MPI.Intracomm, argument: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """``measure`` as the task of one rank, for ``seconds`` at most."""
    device = open_device(0)
    device.use()
    effort = SIMULATOR if argument["simulated"] else Effort()
    samples, left_out = measure(device, effort, tell, time.monotonic() + argument["seconds"])
    return {"samples": codec.to_builtins(samples), "left_out": left_out}


def measure(device: Device, effort: Effort, tell: Progress, deadline_s: float) -> tuple[list[Samples], list[str]]:
    """Every version at every number of devices and size; and what was left out, with the reason.

    ``deadline_s``: when to stop, on ``time.monotonic``.
    """
    on, empty = lane(device, effort.head_start_bytes), empty_launch(device)
    samples: list[Samples] = []
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
                samples += _at_size(on, empty, effort, devices, size_bytes)
    return samples, left_out


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


def _at_size(on: Lane, empty: Timed, effort: Effort, devices: int, size_bytes: int) -> list[Samples]:
    slots = tree.slots(range(devices + 1))
    memory = buffers(on.device, on.stream, slots, size_bytes)
    ready = [version for version in registry.versions("cuda") if size_bytes <= (version.most_bytes or size_bytes)]
    run = {version.name: prepared(version, memory.ranks, slots, effort.mode) for version in ready}
    wrong = {name: on.wrong_after(memory, timed) for name, timed in run.items()}
    timed = run | {_EMPTY: empty}
    times: dict[str, list[float]] = {name: [] for name in timed}
    copies: dict[str, list[float]] = {name: [] for name in timed}
    begin_s = time.monotonic()
    for sample in range(-1, effort.samples):  # the first one warms up
        if sample >= effort.least and time.monotonic() - begin_s > effort.size_s:
            break
        for name in random.Random(sample).sample(sorted(timed), len(timed)):
            copy_s, time_s = on.sample(memory.pristine, memory.whole, timed[name])
            if sample >= 0:
                copies[name].append(copy_s)
                times[name].append(time_s)
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
            samples_s=kept(times[name]),
            copy_s=kept(copies[name]),
            empty_s=kept(times[_EMPTY]),
        )
        for name in run
    ]
