"""Preparing an allreduce on a GPU: arguments become addresses and tables, a kernel is compiled and bound to them.

``prepare`` does all that needs no GPU; tests compile what it returns for GPUs that are not there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.typing.typeof import typeof

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.algorithms import halving_doubling, ring
from dpsim.kernels.allreduce.cuda import moves_kernel, one_shot, two_shot
from dpsim.kernels.allreduce.cuda.arguments import Given, address_of
from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, SIZE, THREADS, lanes_of
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS, Codes, Launch, Mode, Momentum
from dpsim.kernels.allreduce.cuda.moves import Schedule, schedule
from dpsim.kernels.allreduce.cuda.moves_kernel import COPY, FINAL, MOVE_WORDS, PARTIAL

Elements = tuple[int, int, int]
"""(single elements before the packs, packs, all single elements)."""


@dataclass(frozen=True)
class Work:
    """A kernel and all that it is started with, but for how many blocks there are and where flags lie.

    ``parts``: a rank does at most one of so many equal parts of the elements in a step. ``waits``: whether it waits
    inside. ``marks``: whether stages that do nothing stand before and after the others.
    ``held``: what must live as long as the kernel may run.
    """

    kernel: Any
    elements: Elements
    args: tuple[Any, ...]
    steps: int
    parts: int
    waits: bool
    marks: bool
    held: tuple[Any, ...]


def make(
    name: str,
    arrays: Sequence[Any],
    slots: Any,
    *,
    rank: int | None = None,
    mode: Mode = "one-launch",
    flags: Sequence[Any] | None = None,
    scale: float = 1.0,
    compression: Codes | None = None,
    sgd: Momentum | None = None,
) -> Launch:
    """``version.make`` of the version ``name``; see ``cuda.py``."""
    given = Given(name, tuple(arrays), slots, rank, mode, flags, scale, compression, sgd)
    return launch(given, prepare(given))


def prepare(given: Given) -> Work:
    """What to run for what was given."""
    given.check()
    if given.compression is not None:
        return _encoded(given, given.compression)
    if given.sgd is not None:
        return _momentum(given, given.sgd)
    if given.name == "one-shot":
        return _one_shot(given)
    if given.name == "two-shot":
        return _two_shot(given)
    algorithm = {"ring": ring, "halving-doubling": halving_doubling}[given.name]
    return _scheduled(given, schedule(algorithm, given.slots))


def _two_shot(given: Given) -> Work:
    # one launch needs no waiting: on one stream inputs are ready before it and results after it
    scope = "sys" if given.mode == "flags" else None
    kernel = two_shot.two_shot(given.dtype, given.slots.tree, given.ranks, scope)
    args = (given.addresses, given.results, given.number(given.scale))
    return Work(kernel, given.elements(), args, 1, given.ranks, scope is not None, given.apart, given.arrays)


def _momentum(given: Given, sgd: Momentum) -> Work:
    scope = "sys" if given.mode == "flags" else None
    kernel = two_shot.momentum(given.dtype, given.slots.tree, given.ranks, scope)
    w, v = (tuple(map(address_of, arrays)) for arrays in (sgd.w, sgd.v))
    own = given.rank or 0
    numbers = map(given.number, (given.scale, sgd.momentum, -sgd.rate))
    args = (given.addresses, w, v, w[own], v[own], *numbers)
    elements = given.elements(*((address, SIZE[given.dtype]) for address in (*w, *v)))
    held = (*given.arrays, *sgd.w, *sgd.v)
    return Work(kernel, elements, args, 1, given.ranks, scope is not None, given.apart, held)


def _encoded(given: Given, compression: Codes) -> Work:
    scope = given.scope
    kernel = two_shot.encoded(compression.dtype, given.slots.tree, given.ranks, scope)
    codes = tuple(map(address_of, compression.arrays))
    owned = [given.slots.of(rank) for rank in range(given.ranks)]
    words, begin = [], 2 * given.ranks
    for own in owned:
        words += [begin, begin + 2 * len(own)]
        begin += 2 * len(own)
    words += [address for own in owned for slot in own for address in (given.addresses[slot], codes[slot])]
    table = on_device(words)
    results = tuple(codes[own[0]] for own in owned)
    numbers = (np.float32(compression.scale), np.float32(1 / compression.scale), np.float32(given.scale))
    args = (address_of(table), codes, results, *numbers)
    elements = given.elements(*((address, 2) for address in codes), lanes=lanes_of(compression.dtype))
    return Work(kernel, elements, args, 3, 1, scope is not None, False, (*given.arrays, *compression.arrays, table))


def _one_shot(given: Given) -> Work:
    scope = given.scope
    results = on_device(given.results)
    held = [*given.arrays, results]
    own = [0] * given.ranks
    if scope is None:
        kernel = one_shot.one_shot(given.dtype, given.slots.tree, given.ranks)
        for rank in range(given.ranks) if given.rank is None else (given.rank,):
            size_bytes = given.length * SIZE[given.dtype]
            held.append(on_device(np.zeros(size_bytes // 8 + 4, np.int64)))
            start = address_of(held[-1])
            own[rank] = start + (given.addresses[0] - start) % 16  # aligned as the slots are
    else:
        kernel = one_shot.one_shot_waiting(given.dtype, given.slots.tree, given.ranks, scope, given.mode == "flags")
    table = on_device(own)
    args = (given.addresses, address_of(table), address_of(results), given.number(given.scale))
    steps = 2 if scope is None else 1
    return Work(kernel, given.elements(), args, steps, 1, scope is not None, given.apart, (*held, table))


def _scheduled(given: Given, schedule: Schedule) -> Work:
    scope = given.scope
    elements = given.elements()
    table = on_device(_words(given, schedule, elements))
    kernel = moves_kernel.scheduled(given.dtype, given.ranks, scope, given.mode == "flags")
    args = (address_of(table), given.number(given.scale))
    parts = int(1 / max(move.high - move.low for step in schedule for move in step))
    held = (*given.arrays, table)
    return Work(kernel, elements, args, len(schedule), parts, scope is not None, given.apart, held)


def _words(given: Given, schedule: Schedule, elements: Elements) -> list[int]:
    """The table of ``moves_kernel``."""
    moves = [[move for move in step if move.rank == rank] for step in schedule for rank in range(given.ranks)]
    count = sum(map(len, moves))
    begin = len(moves) + 1
    source = begin + MOVE_WORDS * count
    starts, rows, sources = [begin], list[int](), list[int]()
    for group in moves:
        starts.append(starts[-1] + MOVE_WORDS * len(group))
        for move in group:
            bounds = [math.floor(part * total) for total in elements[1:] for part in (move.low, move.high)]
            leaves = FINAL if move.final else PARTIAL if len(move.sources) > 1 else COPY
            target = _pair(given, move.target)
            rows += [*bounds, source + len(sources), len(move.sources), *target, leaves]
            sources += [word for partial in move.sources for word in _pair(given, partial)]
    return [*starts, *rows, *sources]


def _pair(given: Given, partial: Any) -> tuple[int, int]:
    lower = given.addresses[partial.spare] if partial.spare is not None and SIZE[given.dtype] == 2 else 0
    return given.addresses[partial.keeper], lower


def on_device(words: Any) -> Any:
    """int64 words in device memory."""
    host = np.array(words, np.int64)
    return host if SIMULATED else cuda.to_device(host)


def arguments(given: Given, work: Work, first: int, stop: int, table: int) -> tuple[Any, ...]:
    """What the kernel is called with; ``table``: the address of the table of flags, 0 for none."""
    return first, stop, given.rank or 0, table, work.elements, work.args


def signature(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types of a kernel's arguments."""
    return tuple(map(typeof, call))


def launch(given: Given, work: Work) -> Launch:
    """``work``, compiled for this process's GPU and bound to it."""
    ranks = given.ranks if given.rank is None else 1
    blocks = _blocks(given, work, ranks)
    held, table = _flags(given, work, blocks)
    parts = [(0, work.steps)] if work.waits else [(step, step + 1) for step in range(work.steps)]
    if given.mode == "one-launch" and not work.waits:
        parts = [(0, work.steps)]
    stages = [_stage(work, (blocks, ranks), arguments(given, work, *part, table), held) for part in parts]
    if work.marks:
        stages = [_nothing, *stages, _nothing]
    return Launch(stages=tuple(stages))


def _blocks(given: Given, work: Work, ranks: int) -> int:
    """Blocks a rank: enough for all elements, no more than run at once, the same on every rank that waits."""
    _, packs, singles = work.elements
    wanted = max(1, -(-max(packs, singles) // (THREADS * work.parts)))
    if SIMULATED:
        return min(wanted, 2)
    compiled = work.kernel.compile(signature(arguments(given, work, 0, 1, 0)))
    at_once = int(compiled.max_cooperative_grid_blocks(THREADS)) // ranks
    if given.mode == "flags":
        wanted = min(wanted, MOST_BLOCKS)
        if wanted > at_once:
            raise ConfigError(
                f"flags between GPUs of which this one runs {at_once} blocks at once",
                allowed=f"{wanted} and more",
                remedy='prepare with mode="split"',
            )
    if at_once == 0:
        raise ConfigError(f"{ranks} logical devices on a GPU that runs fewer blocks at once", remedy="use fewer")
    return min(wanted, at_once)


def _flags(given: Given, work: Work, blocks: int) -> tuple[tuple[Any, ...], int]:
    """What holds the flags, and the address of their table."""
    if not work.waits:
        return (), 0
    if given.mode == "flags" and given.flags is not None:
        table = on_device([address_of(own) for own in given.flags])
        return (*given.flags, table), address_of(table)
    words = blocks * (given.ranks + 1)
    own = on_device(np.zeros(-(-given.ranks * words // 2), np.int64))
    table = on_device([address_of(own) + 4 * words * rank for rank in range(given.ranks)])
    return (own, table), address_of(table)


def _nothing(stream: Any) -> None:
    """A stage that only marks a point: what was put on the stream before must have ended when the next stage begins."""


def _stage(work: Work, grid: tuple[int, int], call: tuple[Any, ...], held: tuple[Any, ...]) -> Callable[[Any], None]:
    def configured(stream: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numba's advice to start more blocks
            return work.kernel[grid, THREADS, stream]

    last: list[Any] = [None, None]

    def stage(stream: Any, kept: Any = (work, held)) -> None:
        # the simulator keeps one configuration for all launches of a kernel
        if SIMULATED or last[1] is None or last[0] is not stream:
            last[:] = stream, configured(stream)
        last[1](*call)

    return stage
