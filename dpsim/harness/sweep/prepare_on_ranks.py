"""Profiles and calibrates in one job of ranks, interleaved, so that a disturbance does not spoil one table alone."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.harness.calibrate.calibrate import CalibrateConfig
from dpsim.harness.calibrate.on_ranks import NetworkCalibrator, until_settled
from dpsim.harness.measurement.loop import rounds
from dpsim.harness.measurement.reference import SpeedLog
from dpsim.harness.profile.on_ranks import ModelProfiler
from dpsim.harness.profile.profile import ProfileConfig
from dpsim.progress import Progress

_PROFILE_VISITS = 3
"""Visits a round to each case of the profile, for one to each table: every prediction rests on these layer times."""


def prepare_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """A profile, and a calibration of each network, measured for ``argument["seconds"]``.

    The measuring takes up to twice as long where the machine's speed changes, or where a compute slowdown is not known
    to 3 %. Rank 0 returns the results (plain values).
    """
    config = codec.decode(argument["profile"], ProfileConfig, "profile")
    speeds = SpeedLog()
    profiler = ModelProfiler(comm, config, speeds)
    networks = {
        name: codec.decode(plain, CalibrateConfig, "calibration") for name, plain in argument["calibrations"].items()
    }
    calibrators = {name: NetworkCalibrator(comm, network, speeds) for name, network in networks.items()}
    report(f"profiling {config.model} and calibrating {' and '.join(networks) or 'nothing'}")
    for current in rounds(until_settled(argument["seconds"]), suffice=profiler.settled, comm=comm):
        for turn in range(_PROFILE_VISITS):
            profiler.visit(current, turn)
        for calibrator in calibrators.values():
            calibrator.visit(current)
    profile = profiler.result()
    machines = {name: calibrator.result() for name, calibrator in calibrators.items()}
    return {"profile": codec.to_builtins(profile), "machines": machines} if comm.rank == 0 else None
