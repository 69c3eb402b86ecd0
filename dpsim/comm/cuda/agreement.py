"""Ranks that fail together: a mistake that one of them has met is raised by all, before any waits for another."""

from __future__ import annotations

from mpi4py import MPI

from dpsim.errors import ConfigError, DpsimError


def raise_on_all(comm: MPI.Intracomm, error: DpsimError | None) -> None:
    """Raise ``ConfigError`` on every rank if one has an ``error``; it names the first such rank. Collective."""
    own = None if error is None else (error.given, error.allowed, error.remedy)
    for rank, met in enumerate(comm.allgather(own)):
        if met is not None:
            given, allowed, remedy = met
            raise ConfigError(f"rank {rank}: {given}", allowed=allowed, remedy=remedy) from error
