"""Chooses, by measuring, which code computes a network's operations; once a processor type, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mpi4py import MPI

from dpsim import processor
from dpsim.choices import Choice, Choices, Problem
from dpsim.comm.compiled import compile_among
from dpsim.comm.group import quiet_barrier
from dpsim.comm.selection import select
from dpsim.errors import ConfigError
from dpsim.nn import Network
from dpsim.nn.kernel_table import KernelTable, committed
from dpsim.nn.network import EVALUATE_AT_ONCE
from dpsim.nn.timing import Timing
from dpsim.runtime import choice_file

BUDGET_S = 1.5
"""Seconds of measuring for all problems of a network together; compiling and filling arrays come on top."""


def problems_of(network: Network, training_rows: Iterable[int], evaluation_rows: Iterable[int]) -> list[Problem]:
    """The problems of a run: of its batches, and of its evaluation, which goes some samples at a time."""
    chunks = {EVALUATE_AT_ONCE if rows >= EVALUATE_AT_ONCE else rows for rows in evaluation_rows}
    chunks |= {rows % EVALUATE_AT_ONCE for rows in evaluation_rows}
    every = [p for rows in sorted(set(training_rows)) if rows for p in network.problems(rows, training=True)]
    every += [p for rows in sorted(chunks) if rows for p in network.problems(rows, training=False)]
    return list(dict.fromkeys(every))


def choose(problems: Sequence[Problem], comm: MPI.Intracomm, *, again: bool = False) -> Choices:
    """What is the fastest for each class of these problems: as measured before, else measured now. Collective.

    All ranks measure at once. Rank 0's file of choices is asked first, and gets what is new; with ``again`` everything
    is measured anew.
    """
    if comm.rank == 0 and again:
        choice_file.forget()
    known: Choices = comm.bcast(choice_file.load() if comm.rank == 0 else None)
    classes = dict.fromkeys(problem.shape_class for problem in problems)
    missing = [problem for problem in classes if known.choice(problem) is None]
    if not missing:
        return known
    measured = tuple(_measure(missing, comm))
    merged = choice_file.add(known, measured) if comm.rank == 0 else None
    result: Choices = comm.bcast(merged)
    return result


def _measure(problems: Sequence[Problem], comm: MPI.Intracomm) -> Iterable[Choice]:
    for problem in problems:
        timing = Timing(problem)
        compile_among(timing.warm_ups(), comm)
        comm.Barrier()
        timing.run(BUDGET_S / len(problems))
        everyones = comm.allgather(timing.ratios())
        slowest = {name: max(ratios[name] for ratios in everyones) for name in everyones[0]}
        fastest = min(slowest, key=lambda name: slowest[name])
        ratios = {name: round(ratio / slowest[fastest], 3) for name, ratio in slowest.items()}
        yield Choice(problem=problem, candidate=fastest, time_ratios=ratios)
        quiet_barrier(comm)


def choose_selection(comm: MPI.Intracomm) -> Choices:
    """The choices with the fastest allreduces by size on as many ranks as ``comm`` has, if they share memory.

    As measured before, else measured now. Collective.
    """
    known: Choices = comm.bcast(choice_file.load() if comm.rank == 0 else None)
    if known.selection(comm.size) is not None:
        return known
    if (measured := select(comm)) is None:
        return known
    merged = choice_file.add(known, (), (measured,)) if comm.rank == 0 else None
    result: Choices = comm.bcast(merged)
    return result


def agree_on_table(comm: MPI.Intracomm) -> KernelTable:
    """Rank 0's kernel table, for reproducible training on all ranks. Collective.

    Raises ``ConfigError`` where ranks have different processors or BLAS: their bits would differ.
    """
    table: KernelTable = comm.bcast(committed() if comm.rank == 0 else None)
    types = comm.allgather((processor.model(), processor.blas(), np.__version__))
    others = {kind: rank for rank, kind in reversed(list(enumerate(types))) if kind != types[0]}
    if others:
        named = [f"{', '.join(types[0])} on rank 0"]
        named += [
            f"{', '.join(kind)} on rank {rank}" for kind, rank in sorted(others.items(), key=lambda pair: pair[1])
        ]
        raise ConfigError(
            f"reproducible training on different types of machines: {'; '.join(named)}",
            allowed="one type of processor, BLAS and NumPy on all ranks: others give other bits",
            remedy="choose hosts of one type, or train without --reproducible",
        )
    return table
