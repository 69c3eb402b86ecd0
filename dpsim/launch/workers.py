"""Executors whose workers compute side by side for one command; processes of dpsim's end with it however it ends."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from typing import Any, TypeVar

from dpsim.errors import ConfigError, DpsimError, text_of
from dpsim.launch.child_process import end_with_parent
from dpsim.user_code import Expected, explained, imported

T = TypeVar("T")
R = TypeVar("R")
_FACTORY = Expected(
    noun="--executor",
    default="executor",
    signature="{}() gives a concurrent.futures.Executor",
    remedy="give a number of processes, or a factory such as concurrent.futures:ProcessPoolExecutor",
)
_OF_RANKS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_LOCAL")
"""How variables begin by which a launcher tells a process which rank it is."""
_CHUNKS, _CHUNKS_OF_ALL = (64, 512), 128
"""The least and the most items that a worker is sent at a time, and how many chunks there are between."""
_MOST_DIGITS = 4
_ALLOWED = "a number of processes, MODULE:FACTORY or FILE.py:FACTORY"


@contextlib.contextmanager
def executor(text: str) -> Iterator[Executor | None]:
    """Hold the executor that ``text`` names: a number of processes, or the factory of an executor.

    ``None`` for one process, which is this one. A factory, ``MODULE:FACTORY`` or ``FILE.py:FACTORY``, is called without
    arguments. Raises ``ConfigError`` for a text that names no executor.
    """
    with contextlib.ExitStack() as stack:
        if text.isdecimal() and len(text) <= _MOST_DIGITS:
            if int(text) < 1:
                raise ConfigError(
                    f"--executor is {text}", allowed="1 or more", remedy="give the number of cores to use"
                )
            yield None if int(text) == 1 else stack.enter_context(_pool(int(text)))
            return
        if ":" not in text:
            raise ConfigError(f"--executor is {text}", allowed=_ALLOWED, remedy=_FACTORY.remedy)
        module, name, _ = imported(text, _FACTORY)
        with explained(text, name, _FACTORY):
            made = getattr(module, name)()
            if not isinstance(made, Executor):
                allowed = "the factory of a concurrent.futures.Executor"
                raise ConfigError(f"it gives a {type(made).__name__}", allowed=allowed, remedy=_FACTORY.remedy)
            stack.enter_context(made)
        try:
            yield made
        except BaseException:
            made.shutdown(wait=False, cancel_futures=True)
            raise


def in_order(
    executor: Executor | None, function: Callable[[T], R], items: Iterable[T], *, chunk: int | None = None
) -> Iterator[R]:
    """Yield ``function(item)`` of each item, in their order, from the workers of an executor; without one, from here.

    Workers are sent ``chunk`` items at a time; without it, so many that they seldom wait for more, and end about
    together. Where the executor fails, that is said once on stderr: what its workers have finished is kept, and the
    rest is computed here. Raises what ``function`` raises.
    """
    if executor is None or executor in _FAILED:
        yield from map(function, items)
        return
    every, sent = [*items], pickle.dumps(function)
    chunk = chunk or min(max(_CHUNKS[0], len(every) // _CHUNKS_OF_ALL), _CHUNKS[1])
    chunks = [every[begin : begin + chunk] for begin in range(0, len(every), chunk)]
    futures, refused = list[Future[list[R]]](), None
    try:
        for each in chunks:
            futures.append(executor.submit(_results, sent, each))
    except Exception as error:  # an executor of anybody's: what it raises is not known
        refused = error
    for each, future in itertools.zip_longest(chunks, futures):
        failure = refused if future is None else _failure(future)
        if future is not None and failure is None:
            yield from future.result()
            continue
        if isinstance(failure, DpsimError):
            raise failure
        if executor not in _FAILED:
            _FAILED.add(executor)
            finished = sum(
                len(part) for part, of in zip(chunks, futures, strict=False) if of.done() and not _failure(of)
            )
            _say(failure, finished, len(every))
        yield from map(function, each)


_FAILED = weakref.WeakSet[Executor]()
"""Executors that have failed, which is said once; they get no other work."""


@functools.lru_cache(maxsize=1)
def _received(sent: bytes) -> Callable[[Any], Any]:
    """Return the function that a worker is sent, the same for all chunks: what it remembers is kept."""
    function: Callable[[Any], Any] = pickle.loads(sent)
    return function


def _results(sent: bytes, items: Sequence[Any]) -> list[Any]:
    """Return the results of a chunk."""
    return list(map(_received(sent), items))


def _failure(future: Future[Any]) -> BaseException | None:
    """Return why a future has no result; None where it has one."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


def _say(failure: BaseException | None, finished: int, items: int) -> None:
    """Say on stderr that the executor failed, and who computes what it has not."""
    reason = "" if failure is None else f": {type(failure).__name__}: {text_of(failure).rstrip('.')}"
    error = DpsimError(
        f"the executor failed{reason}; {finished} of {items} results are finished and kept, and this process computes"
        " the others",
        remedy="nothing, the result is the same; often there was too little memory: give fewer processes next time",
    )
    print(f"dpsim: {error}", file=sys.stderr, flush=True)


def computed(task: Callable[[], T], give_up: Callable[[], bool], nice: int = 0) -> T | BaseException | None:
    """Return what a task computes in a process of its own, or what it raises; None where ``give_up`` says so before.

    ``give_up`` waits a little at each call.
    """
    with _pool(1, nice) as executor:
        future = executor.submit(task)
        while not future.done():
            if give_up():
                _kill_workers()
                return None
        return future.exception() or future.result()


@contextlib.contextmanager
def _pool(count: int, nice: int = 0) -> Iterator[Executor]:
    """Hold processes that end with this one, also where it is killed; where it is interrupted, they are killed.

    They are started anew (``spawn``), since a fork would copy the threads of NumPy and numba in any state.
    """
    spawn = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(count, mp_context=spawn, initializer=_begin, initargs=(os.getpid(), nice))
    try:
        yield executor
    except BaseException:
        _kill_workers()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _begin(parent: int, nice: int) -> None:
    """Let this worker end when its parent does. A worker holds both ends of its queues, and so would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends its workers
    if follow := end_with_parent(signal.SIGKILL):
        follow()
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    os.nice(nice)
    for name in [name for name in os.environ if name.startswith(_OF_RANKS)]:
        del os.environ[name]  # MPI would take this process for the rank that its parent is
