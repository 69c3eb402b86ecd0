"""Preparing an allreduce on a GPU: arguments become addresses and tables, a kernel is compiled and bound to them.

``work_of`` does all that needs no GPU; tests compile what it returns for GPUs that are not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.typing.typeof import typeof

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.algorithms import IN_TREE_ORDER
from dpsim.kernels.allreduce.cuda import moves_kernel, one_shot, two_shot
from dpsim.kernels.allreduce.cuda.arguments import Arguments, address_of
from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, SIZE, THREADS, lanes_of
from dpsim.kernels.allreduce.cuda.launch import Codes, Launch, flag_words
from dpsim.kernels.allreduce.cuda.moves import Schedule, schedule
from dpsim.kernels.allreduce.cuda.moves_kernel import COPY, FINAL, MOVE_WORDS, PARTIAL
from dpsim.kernels.allreduce.tree import PartialSums

SIMULATED_BLOCKS = 2
"""How many blocks a rank has in the simulator, at most: it runs one after another."""

Elements = tuple[int, int, int]
"""(single elements before the packs, packs, all single elements)."""


@dataclass(frozen=True)
class Work:
    """A kernel and all that it is started with, except the number of blocks and the place of the flags.

    ``scope``: how far the flags reach by which it waits inside; None if it does not. ``parts``: in a step a rank works
    on at most one of this many equal parts of the elements. ``marks``: whether stages that do nothing come before and
    after the others. ``held``: what must live as long as the kernel may run.
    """

    kernel: Any
    scope: str | None
    elements: Elements
    args: tuple[Any, ...]
    held: tuple[Any, ...]
    steps: int = 1
    parts: int = 1
    marks: bool = False


def make(name: str, arrays: Sequence[Any], sums: PartialSums, **options: Any) -> Launch:
    """Make ``version.make`` of the version ``name``; ``launch`` describes the arguments."""
    arguments = Arguments(name, tuple(arrays), sums, **options)
    return launch(arguments, work_of(arguments))


def work_of(arguments: Arguments) -> Work:
    """Return the kernel for these arguments, and what it is started with. Raises ``ConfigError``."""
    arguments.check()
    if arguments.compression is not None:
        return _encoded(arguments, arguments.compression)
    if arguments.name == "one-shot":
        return _one_shot(arguments)
    return _two_shot(arguments) if arguments.name == "two-shot" else _scheduled(arguments)


def _two_shot(of: Arguments) -> Work:
    # one launch needs no waiting: on one stream inputs are ready before it and results after it
    scope = "sys" if of.mode == "flags" else None
    kernel = two_shot.two_shot(of.dtype, of.sums.tree, of.ranks, scope, each_sum=of.each_sum)
    args = (of.addresses, of.results, of.number(of.scale))
    return Work(kernel, scope, of.elements(), args, of.arrays, parts=of.ranks, marks=of.apart)


def _encoded(of: Arguments, compression: Codes) -> Work:
    kernel = two_shot.encoded(compression.dtype, of.sums.tree, of.ranks, of.scope, each_sum=of.each_sum)
    codes = tuple(map(address_of, compression.arrays))
    owned = [of.sums.of(rank) for rank in range(of.ranks)]
    words, begin = [], 2 * of.ranks
    for own in owned:
        words += [begin, begin + 2 * len(own)]
        begin += 2 * len(own)
    words += [address for own in owned for slot in own for address in (of.addresses[slot], codes[slot])]
    table = on_device(words)
    results = tuple(codes[own[0]] for own in owned)
    numbers = (np.float32(compression.scale), np.float32(1 / compression.scale), np.float32(of.scale))
    elements = of.elements(*((address, 2) for address in codes), lanes=lanes_of(compression.dtype))
    held = (*of.arrays, *compression.arrays, table)
    return Work(kernel, of.scope, elements, (address_of(table), codes, results, *numbers), held, steps=3)


def _one_shot(of: Arguments) -> Work:
    results = on_device(of.results)
    held = [*of.arrays, results]
    own = [0] * of.ranks
    if of.scope is None:
        kernel = one_shot.one_shot(of.dtype, of.sums.tree, of.ranks)
        for rank in range(of.ranks) if of.rank is None else (of.rank,):
            held.append(on_device(np.zeros(of.length * SIZE[of.dtype] // 8 + 4, np.int64)))
            start = address_of(held[-1])
            own[rank] = start + (of.addresses[0] - start) % 16  # aligned as the slots are
    else:
        kernel = one_shot.one_shot_waiting(of.dtype, of.sums.tree, of.ranks, of.scope, of.mode == "flags")
    table = on_device(own)
    args = (of.addresses, address_of(table), address_of(results), of.number(of.scale))
    steps = 2 if of.scope is None else 1
    return Work(kernel, of.scope, of.elements(), args, (*held, table), steps=steps, marks=of.apart)


def _scheduled(of: Arguments) -> Work:
    moves, elements = schedule(IN_TREE_ORDER[of.name], of.sums), of.elements()
    table = on_device(_words(of, moves, elements))
    kernel = moves_kernel.scheduled(of.dtype, of.ranks, of.scope, of.mode == "flags")
    args = (address_of(table), of.number(of.scale))
    parts = int(1 / max(move.high - move.low for step in moves for move in step))
    held = (*of.arrays, table)
    return Work(kernel, of.scope, elements, args, held, steps=len(moves), parts=parts, marks=of.apart)


def _words(arguments: Arguments, schedule: Schedule, elements: Elements) -> list[int]:
    """Return the table of ``moves_kernel``."""
    moves = [[move for move in step if move.rank == rank] for step in schedule for rank in range(arguments.ranks)]
    count = sum(map(len, moves))
    begin = len(moves) + 1
    source = begin + MOVE_WORDS * count
    starts, rows, sources = [begin], list[int](), list[int]()
    for group in moves:
        starts.append(starts[-1] + MOVE_WORDS * len(group))
        for move in group:
            bounds = [math.floor(part * total) for total in elements[1:] for part in (move.low, move.high)]
            leaves = FINAL if move.final else PARTIAL if len(move.sources) > 1 else COPY
            target = _pair(arguments, move.target)
            rows += [*bounds, source + len(sources), len(move.sources), *target, leaves]
            sources += [word for partial in move.sources for word in _pair(arguments, partial)]
    return [*starts, *rows, *sources]


def _pair(arguments: Arguments, partial: Any) -> tuple[int, int]:
    lower = arguments.addresses[partial.spare] if partial.spare is not None and SIZE[arguments.dtype] == 2 else 0
    return arguments.addresses[partial.keeper], lower


def on_device(words: Any) -> Any:
    """Return int64 words in device memory.

    They are there when this returns: streams that do not block the default stream, in which numba copies, do not wait
    for it either.
    """
    host = np.array(words, np.int64)
    if SIMULATED:
        return host
    array = cuda.to_device(host)
    cuda.default_stream().synchronize()
    return array


def call(arguments: Arguments, work: Work, first: int, stop: int, table: int) -> tuple[Any, ...]:
    """Return what the kernel is called with; ``table``: the address of the table of flags, 0 for none."""
    return first, stop, arguments.rank or 0, table, work.elements, work.args


def signature(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the types of a kernel's arguments."""
    return tuple(map(typeof, values))


def launch(arguments: Arguments, work: Work) -> Launch:
    """Compile ``work`` for this process's GPU and bind it."""
    ranks = arguments.ranks if arguments.rank is None else 1
    compiled = None if SIMULATED else work.kernel.compile(signature(call(arguments, work, 0, 1, 0)))
    at_once = SIMULATED_BLOCKS if compiled is None else int(compiled.max_cooperative_grid_blocks(THREADS)) // ranks
    blocks = _blocks(arguments, work, ranks, at_once)
    held, table = _flags(arguments, work, blocks)
    parts = [(0, work.steps)] if work.scope is not None else [(step, step + 1) for step in range(work.steps)]
    if arguments.mode == "one-launch" and work.scope is None:
        parts = [(0, work.steps)]
    calls = [call(arguments, work, *part, table) for part in parts]
    held = (*work.held, *held)
    stages = [stage(work.kernel, (blocks, ranks), values, held, compiled) for values in calls]
    if work.marks:
        stages = [_nothing, *stages, _nothing]
    return Launch(stages=tuple(stages), blocks_at_once=at_once)


def _blocks(arguments: Arguments, work: Work, ranks: int, at_once: int) -> int:
    """Return blocks a rank: enough for all elements, no more than run at once, the same on every rank that waits."""
    _, packs, singles = work.elements
    wanted = max(1, -(-max(packs, singles) // (THREADS * work.parts)))
    if arguments.mode == "flags":
        wanted = min(wanted, arguments.most_blocks)
        if wanted > at_once and not SIMULATED:
            raise ConfigError(
                f"flags between GPUs of which this one runs {at_once} blocks at once",
                allowed=f"{wanted} and more",
                remedy=f'prepare on every rank with most_blocks={at_once}, or with mode="split"',
            )
    if at_once == 0:
        raise ConfigError(f"{ranks} logical devices on a GPU that runs fewer blocks at once", remedy="use fewer")
    return min(wanted, at_once)


def _flags(arguments: Arguments, work: Work, blocks: int) -> tuple[tuple[Any, ...], int]:
    """Return what holds the flags, and the address of the table that ``kernels.barrier_at`` describes."""
    if work.scope is None:
        return (), 0
    ranks, watch = arguments.ranks, arguments.watch
    if arguments.mode == "flags" and arguments.flags is not None:
        held = tuple(arguments.flags)
        headers = [address_of(own) for own in held]
    else:
        words = flag_words(ranks, blocks)
        held = (on_device(np.zeros(-(-ranks * words // 2), np.int64)),)
        headers = [address_of(held[0]) + 4 * words * rank for rank in range(ranks)]
    report, limit_ns = (0, 0) if watch is None else (watch.report.ctypes.data, round(watch.limit_s * 1e9))
    table = on_device([*headers, report, limit_ns])
    return (*held, table, watch), address_of(table)


def _nothing(stream: Any) -> None:
    """Mark a point only: what was put on the stream before must have ended when the next stage begins."""


def stage(
    kernel: Any, grid: tuple[int, int], values: tuple[Any, ...], held: tuple[Any, ...] = (), compiled: Any = None
) -> Callable[[Any], None]:
    """Return what launches a kernel on the stream that it is called with, one of numba's; ``held`` lives as long."""
    if not SIMULATED:
        from dpsim.kernels.allreduce.cuda.bound import bind  # loads the driver's bindings

        return bind(compiled or kernel.compile(signature(values)), grid, values, held)

    def simulated(stream: Any, alive: Any = held) -> None:
        kernel[grid, THREADS, stream](*values)  # the simulator keeps one configuration for all launches of a kernel

    return simulated
