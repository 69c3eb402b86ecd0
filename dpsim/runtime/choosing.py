"""Chooses by measurement which code computes a replica's operations: once a processor type, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from mpi4py import MPI

from dpsim import processor
from dpsim.choices import Choice, Choices, Problem
from dpsim.comm.group import compile_among, quiet_barrier
from dpsim.comm.mpi import shares_memory
from dpsim.comm.selection import select
from dpsim.errors import ConfigError
from dpsim.machine import Selection
from dpsim.replica import CodeTable, Timing, TunableReplica
from dpsim.runtime import choice_file

BUDGET_S = 1.5
"""Seconds for measuring all problems together, without compiling and filling arrays."""


def problems_of(replica: TunableReplica, training_rows: Iterable[int], evaluation_rows: Iterable[int]) -> list[Problem]:
    """Return the problems of a run, from the numbers of samples in its batches and evaluations."""
    every = [p for rows in sorted(set(training_rows)) if rows for p in replica.problems(rows, training=True)]
    every += [p for rows in sorted(set(evaluation_rows)) if rows for p in replica.problems(rows, training=False)]
    return list(dict.fromkeys(every))


def choose(
    problems: Sequence[Problem], timing: Callable[[Problem], Timing], comm: MPI.Intracomm, *, again: bool = False
) -> Choices:
    """Return the fastest implementation of each class of problems, known or measured now. Collective.

    All ranks measure at the same time. Rank 0 reads the known choices from its file and adds the new ones; with
    ``again`` everything is measured anew.
    """
    if comm.rank == 0 and again:
        choice_file.forget()
    choices: Choices = comm.bcast(choice_file.load() if comm.rank == 0 else None)
    classes = dict.fromkeys(problem.shape_class for problem in problems)
    missing = [problem for problem in classes if choices.choice(problem) is None]
    if not missing:
        return choices
    measured = tuple(_measure(missing, timing, comm))
    merged = choice_file.add(choices, measured) if comm.rank == 0 else None
    result: Choices = comm.bcast(merged)
    return result


def _measure(problems: Sequence[Problem], timing: Callable[[Problem], Timing], comm: MPI.Intracomm) -> Iterable[Choice]:
    for problem in problems:
        times = timing(problem)
        compile_among(times.warm_ups(), comm)
        comm.Barrier()
        times.run(BUDGET_S / len(problems))
        ratios_by_rank = comm.allgather(times.ratios())
        slowest = {name: max(ratios[name] for ratios in ratios_by_rank) for name in ratios_by_rank[0]}
        fastest = min(slowest, key=lambda name: slowest[name])
        ratios = {name: round(ratio / slowest[fastest], 3) for name, ratio in slowest.items()}
        yield Choice(problem=problem, candidate=fastest, time_ratios=ratios)
        quiet_barrier(comm)


def choose_selection(comm: MPI.Intracomm) -> Selection:
    """Return the fastest allreduce of each size on the ranks of ``comm``. Collective.

    On ranks that share memory it is known, or measured now and known from then on. Elsewhere it depends on the network
    too, and is measured each time.
    """
    if not shares_memory(comm):
        return select(comm)
    choices: Choices = comm.bcast(choice_file.load() if comm.rank == 0 else None)
    if (known := choices.selection(comm.size)) is not None:
        return known
    if (measured := select(comm)).by_messages:  # memory is too short to be shared
        return measured
    merged = choice_file.add(choices, (), (measured,)) if comm.rank == 0 else None
    result: Choices = comm.bcast(merged)
    return result.selection(comm.size) or measured


def agree_on_table(table: Callable[[], CodeTable], comm: MPI.Intracomm) -> CodeTable:
    """Rank 0's ``table()``, for reproducible training on all ranks. Collective.

    Raises ``ConfigError`` where ranks differ in processor, BLAS or rounding: their bits would differ.
    """
    agreed: CodeTable = comm.bcast(table() if comm.rank == 0 else None)
    types = comm.allgather((processor.model(), processor.blas(), np.__version__, f"rounding {processor.rounding()}"))
    first_rank = {kind: rank for rank, kind in reversed(list(enumerate(types)))}
    if len(first_rank) > 1:
        named = [f"{', '.join(kind)} on rank {rank}" for kind, rank in sorted(first_rank.items(), key=lambda p: p[1])]
        raise ConfigError(
            f"reproducible training on different types of machines: {'; '.join(named)}",
            allowed="one type of processor, BLAS, NumPy and rounding on all ranks: others give other bits",
            remedy="choose hosts of one type, or train without --reproducible",
        )
    return agreed
