"""Processes looked at while they may end: one that has gone meanwhile is left out, never an error."""

from __future__ import annotations

import contextlib

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def named(processes: list[psutil.Process], beginning: str) -> list[psutil.Process]:
    """Return those of these processes whose names begin so."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(beginning):
                found.append(process)
    return found
