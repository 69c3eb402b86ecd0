"""Measures on running ranks which code is the fastest for each operation, without use of earlier choices."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.choices import Choices
from dpsim.nn import build_model
from dpsim.nn.implementations import Timing
from dpsim.progress import Progress
from dpsim.runtime import choice_file
from dpsim.runtime.choosing import choose, choose_selection, problems_of

_BATCH = 64
_TEST_SAMPLES = 360


def tune_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Measure the operations of all earlier choices, and of ``argument["networks"]`` at a local batch of 64.

    Networks are pairs of a model and the shape of a picture. Rank 0 returns ``Choices`` (plain values).
    """
    earlier: Choices = comm.bcast(choice_file.load() if comm.rank == 0 else None)
    problems = [choice.problem for choice in earlier.kernels]
    for token, shape in argument["networks"]:
        problems += problems_of(build_model(token, tuple(shape), 10), [_BATCH], [_TEST_SAMPLES])
    problems = list(dict.fromkeys(problems))
    report(f"measuring {len(problems)} operations on {comm.size} ranks")
    choices = choose(problems, Timing, comm, again=True)
    if comm.size > 1 and not (selection := choose_selection(comm)).by_messages:
        choices = choices.with_more((), (selection,))
    return dict(codec.to_builtins(choices)) if comm.rank == 0 else None
