"""Cases of a study on ranks: each is run by a runner of ``dpsim.study.runners``.

``digest`` trains cases one after another, each on the first ranks of its job; ``fit`` trains and measures them side by
side, each on one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from dpsim import codec
from dpsim.codec import Noun
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress
from dpsim.study.environment import cores

T = TypeVar("T")


def run_cases(runner: str, cases: Sequence[Noun], devices: int, progress: Progress, **given: Any) -> Any:
    """Return what rank 0 returns of ``runner`` (``module:function``), which is given the cases and ``given``."""
    argument = codec.to_builtins({"cases": cases} | given)
    return on_ranks(f"dpsim.study.runners.{runner}", argument, devices=devices, pin=True, progress=progress)


def run_side_by_side(runner: str, cases: Sequence[Noun], progress: Progress, **given: Any) -> Any:
    """Return the same of a runner that shares cases out to at most two ranks, each on its own core."""
    return run_cases(runner, cases, max(1, min(2, cores(), len(cases))), progress, **given) if cases else []


def share(every: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """Return what is done by one of the ranks that work side by side."""
    return every[rank::ranks]
