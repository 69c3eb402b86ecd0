"""What a study runs: a task on ranks that have a core each, or cases side by side by the workers of an executor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.launch.jobs import on_ranks
from dpsim.launch.rank_process import one_thread
from dpsim.launch.workers import in_order
from dpsim.progress import Progress
from dpsim.registry import load


def run(task: str, given: Noun | dict[str, Any], devices: int, progress: Progress, networks: Iterable[str] = ()) -> Any:
    """Return rank 0's result of ``task`` (``module:function``), as plain values, on ranks that have a core each.

    They are on hosts of their own where ``networks`` are shaped.
    """
    argument = codec.to_builtins(given)
    return on_ranks(task, argument, devices=devices, pin=True, progress=progress, networks=networks)


def run_each(executor: Executor | None, task: str, cases: Iterable[Any]) -> Iterator[Any]:
    """Yield what ``task`` (``module:function``) returns for each case, from the workers of an executor in turn.

    Each computes with one thread. The module is imported there alone: a runner loads MPI.
    """
    return in_order(executor, functools.partial(_run_case, task), cases, chunk=1)


def _run_case(task: str, case: Any) -> Any:
    with one_thread():
        return load(task)(case)
