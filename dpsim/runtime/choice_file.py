"""The file of measured choices: one for each processor type and set of libraries, next to the compiled kernels."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import threadpoolctl

from dpsim import codec, processor
from dpsim.choices import SCHEMA, Choice, Choices
from dpsim.errors import DpsimError
from dpsim.kernels import cache
from dpsim.machine import Selection

_in_memory: dict[Path | None, Choices] = {}
"""What this process measured where no file can be written."""


def path(blas_threads: int | None = None) -> Path | None:
    """Return the file for this processor, NumPy, kernel sources, and BLAS with so many threads (None: as it is).

    None for a user without a folder for such files.
    """
    if (folder := cache.folder()) is None:
        return None
    threads = _blas_threads() if blas_threads is None else blas_threads
    libraries = (processor.model(), processor.blas(), np.__version__, str(threads))
    key = hashlib.sha256(cache.circumstances() + "\0".join(libraries).encode()).hexdigest()[:32]
    return folder / f"choices-{key}.json"


def _blas_threads() -> int:
    counts = [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    return max(counts, default=1)


def load(blas_threads: int | None = None) -> Choices:
    """Load what was measured on this machine before. A file that cannot be read counts as empty."""
    file = path(blas_threads)
    nothing = _in_memory.get(file, Choices(measured_on=f"{processor.model()}, {processor.blas()}"))
    if file is None:
        return nothing
    try:
        choices = codec.read(file, Choices, "choices", SCHEMA)
    except (DpsimError, OSError):
        return nothing
    with contextlib.suppress(OSError):
        os.utime(file)
    return choices


def add(choices: Choices, kernels: tuple[Choice, ...], selections: tuple[Selection, ...] = ()) -> Choices:
    """Return ``choices`` with those in the file and the newly measured ones; write them if that is possible.

    What is in the file stays: of two processes that measure the same at the same time, one takes the other's choice.
    """
    with _locked() as file:
        merged_before = choices if file is None else load().with_more(choices.kernels, choices.selections)
        merged = merged_before.with_more(kernels, selections)
        if file is None:
            _in_memory[path()] = merged
            return merged
        with contextlib.suppress(DpsimError, OSError):
            codec.write(file, merged)
    return merged


def forget() -> None:
    """Remove the file, so that everything is measured again."""
    _in_memory.clear()
    with _locked() as file:
        if file is not None:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked() -> Iterator[Path | None]:
    """Open the file under a lock, or yield None where nothing can be written."""
    file = path()
    if file is None:
        yield None
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(lock)
