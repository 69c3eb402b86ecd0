"""Tasks of the tests of measured choices, on ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

from mpi4py import MPI

from dpsim import processor
from dpsim.choices import Problem
from dpsim.errors import ConfigError
from dpsim.nn.implementations import Timing, committed
from dpsim.progress import Progress
from dpsim.runtime import choosing

PROBLEMS = [
    Problem(operation=operation, dtype="float32", rows=7, sizes=(200, 300))
    for operation in ("product", "product_with_transposed", "transposed_product")
]


def chosen(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """What each rank computes with, and how often it timed something."""
    timing = mock.Mock(wraps=Timing)
    choices = choosing.choose(PROBLEMS, timing, comm)
    if comm.size > 1:
        choices = choices.with_more((), (choosing.choose_selection(comm),))
    names = [choice.candidate for choice in choices.kernels]
    ratios = [choice.time_ratios for choice in choices.kernels]
    selections = [one.devices for one in choices.selections]
    return comm.allgather({"names": names, "ratios": ratios, "timed": timing.call_count, "selections": selections})


def agreed(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[str]:
    """What each rank is told where ``processor.NAME()`` is another one on the last rank."""
    of_rank = "another" if comm.rank == comm.size - 1 else "one"
    other = mock.patch.object(processor, argument["name"], lambda: of_rank)
    with other:
        try:
            messages = choosing.agree_on_table(committed, comm).digest
        except ConfigError as error:
            messages = str(error)
    return comm.allgather(messages)
