"""Profiles and calibrates in one job of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.harness.profile import Profile
from dpsim.harness.ranks.calibrate import calibrate_on_ranks
from dpsim.harness.ranks.profile import profile_on_ranks

Progress = Callable[[str], None]


def prepare_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Profile, then calibrate each network up to the model's size; rank 0 returns what both found (plain values)."""
    profile = profile_on_ranks(comm, argument["profile"], report)
    size = comm.bcast(_gradient_bytes(profile))
    machines = {
        network: calibrate_on_ranks(comm, config | {"max_bytes": max(size, 1024)}, report)
        for network, config in argument["calibrations"].items()
    }
    return {"profile": profile, "machines": machines} if comm.rank == 0 else None


def _gradient_bytes(profile: dict[str, Any] | None) -> int:
    return codec.decode(profile, Profile, "profile").workload.gradient_bytes if profile is not None else 0
