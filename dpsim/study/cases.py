"""What a study runs on ranks, each on a core of its own: a task, or cases that the ranks share, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from dpsim import codec
from dpsim.codec import Noun
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress
from dpsim.study.environment import cores

T = TypeVar("T")


def run(task: str, given: Noun | dict[str, Any], devices: int, progress: Progress, networks: Iterable[str] = ()) -> Any:
    """Return rank 0's result of ``task`` (``module:function``), as plain values, on ranks that have a core each.

    They are on hosts of their own where ``networks`` are shaped.
    """
    argument = codec.to_builtins(given)
    return on_ranks(task, argument, devices=devices, pin=True, progress=progress, networks=networks)


def run_side_by_side(task: str, cases: Sequence[Noun], progress: Progress, **given: Any) -> Any:
    """Return the result of a task that shares cases out to at most two ranks; without cases an empty list."""
    return run(task, {"cases": cases} | given, min(2, cores(), len(cases)), progress) if cases else []


def share(every: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """Return what is done by one of the ranks that work side by side."""
    return every[rank::ranks]
