"""Rounds of allreduce on GPUs, with numbers that differ from round to round and are checked on the GPU.

``python cuda_rounds.py ROUNDS``: ranks are processes, two or one a GPU, that share memory by CUDA IPC and wait for each
other by flags; prints how many numbers were wrong, by version, as JSON. A rank ends with the process that started it: a
kernel whose peer has ended would wait for its flag forever.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import signal
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.cuda.launch import Watch, flag_words
from dpsim.kernels.allreduce.tree import slots
from dpsim.launch import child_process

LENGTH = 70_001
WAIT_LIMIT_S = 20.0


@cuda.jit
def _fill_and_check(number, rank, ranks, array, wrong):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < array.size:
        if number > 0:
            expected = 0
            for other in range(ranks):
                expected += ((number - 1) * 7 + other * 13 + i) % 1000
            if array[i] != expected:
                cuda.atomic.add(wrong, 0, 1)
        array[i] = (number * 7 + rank * 13 + i) % 1000


def fill_and_check(number: int, rank: int, ranks: int, array: Any, wrong: Any) -> None:
    """Count where ``array`` is not the sum of round ``number`` - 1, then write a rank's numbers of round ``number``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba's advice to start more blocks
        configured = _fill_and_check[-(-array.size // 256), 256]
    configured(number, rank, ranks, array, wrong)


def opened_directly(handle: Any) -> Any:
    """Another process's array itself. ``handle.open()`` would return a copy where the GPUs have no peer access."""
    pointer = handle._ipc_handle.open_direct(cuda.current_context())
    return cuda.cudadrv.devicearray.DeviceNDArray(gpu_data=pointer, **handle._array_desc)


def run_rank(rank: int, ranks: int, rounds: int, pipe: Connection, barrier: Any) -> None:
    """One rank: shares its memory with the others, does its rounds of each version, sends what was wrong."""
    if (end_with_parent := child_process.end_with_parent(signal.SIGKILL)) is not None:
        end_with_parent()
    cuda.select_device(rank % len(cuda.gpus))
    own = [cuda.to_device(np.zeros(LENGTH, np.float32)), cuda.to_device(np.zeros(flag_words(ranks), np.uint32))]
    cuda.synchronize()
    pipe.send([array.get_ipc_handle() for array in own])
    opened = {peer: handles for peer, handles in enumerate(pipe.recv()) if peer != rank}
    memory = {peer: [opened_directly(handle) for handle in handles] for peer, handles in opened.items()} | {rank: own}
    arrays, flags = ([memory[peer][which] for peer in range(ranks)] for which in (0, 1))
    report = cuda.pinned_array(1, np.uint32)
    report[0] = 0
    watch = Watch(limit_s=WAIT_LIMIT_S, report=report)
    actual = {}
    for version in registry.versions("cuda"):
        launch = version.make(arrays, slots(range(ranks + 1)), rank=rank, mode="flags", flags=flags, watch=watch)
        wrong = cuda.to_device(np.zeros(1, np.int32))
        barrier.wait()  # compiled everywhere: the kernels' waiting is for kernels alone
        for number in range(rounds):
            fill_and_check(number, rank, ranks, own[0], wrong)
            for stage in launch.stages:
                stage(0)
        fill_and_check(rounds, rank, ranks, own[0], wrong)
        actual[version.name] = int(wrong.copy_to_host()[0])
        watch.check(ranks)
        barrier.wait()
    for handles in opened.values():
        for handle in handles:
            handle.close()
    barrier.wait()  # all are closed: now memory may go
    pipe.send(actual)


def received(pipe: Connection, process: Any) -> Any:
    """What a rank sends. Ends this process, and with it the other ranks, if the rank has ended instead."""
    if pipe not in multiprocessing.connection.wait([pipe, process.sentinel]):
        raise SystemExit(f"a rank ended with exit code {process.exitcode}")
    return pipe.recv()


def main() -> None:
    ranks, rounds = max(2, len(cuda.gpus)), int(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks, timeout=60)
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, rounds, pipes[rank][1], barrier), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    handles = [received(pipe, process) for (pipe, _), process in zip(pipes, processes, strict=True)]
    for pipe, _ in pipes:
        pipe.send(handles)
    actual = [received(pipe, process) for (pipe, _), process in zip(pipes, processes, strict=True)]
    for process in processes:
        process.join()
    wrong = {f"{name} rank {rank}": count for rank, each in enumerate(actual) for name, count in each.items()}
    print(json.dumps({"wrong": wrong}))


if __name__ == "__main__":
    main()
