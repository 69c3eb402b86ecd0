"""Profiles and calibrates in one job of ranks, all interleaved, so that a busy moment spoils no table alone."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.harness.calibrate.calibrate import CalibrateConfig
from dpsim.harness.calibrate.on_ranks import LEAST_ROUNDS, Calibrating
from dpsim.harness.measurement.reference import SpeedLog, unfinished
from dpsim.harness.profile.on_ranks import Profiling
from dpsim.harness.profile.profile import ProfileConfig
from dpsim.progress import Progress

_PROFILES_A_ROUND = 3
"""Visits to each case of the profile for one to each table: every prediction rests on the same few layer times."""


def prepare_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """A profile, and a calibration of each network, for ``argument["seconds"]``.

    For up to twice as long where the machine's speed changes or a compute slowdown is not known to 3 %. Rank 0
    returns what they found (plain values).
    """
    config = codec.decode(argument["profile"], ProfileConfig, "profile")
    speeds = SpeedLog()
    profiling = Profiling(comm, config, speeds)
    networks = {
        name: codec.decode(plain, CalibrateConfig, "calibration") for name, plain in argument["calibrations"].items()
    }
    calibrating = {name: Calibrating(comm, network, speeds) for name, network in networks.items()}
    report(f"profiling {config.model} and calibrating {' and '.join(networks) or 'nothing'}")
    start_s, rounds = now(), 0
    while rounds < LEAST_ROUNDS or unfinished(comm, start_s, argument["seconds"], profiling.settled):
        for _ in range(_PROFILES_A_ROUND):
            profiling.round()
        for one in calibrating.values():
            one.round()
        rounds += 1
    profile = profiling.result()
    machines = {name: one.result() for name, one in calibrating.items()}
    return {"profile": codec.to_builtins(profile), "machines": machines} if comm.rank == 0 else None
