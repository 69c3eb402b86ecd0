"""Profiles and calibrates in one job of ranks, interleaved, so that a disturbance does not spoil one table alone."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.harness.calibrate.calibrate import CalibrateConfig
from dpsim.harness.calibrate.on_ranks import NetworkCalibrator, until_settled
from dpsim.harness.measurement.loop import rounds
from dpsim.harness.profile.on_ranks import ModelProfiler
from dpsim.harness.profile.profile import ProfileConfig
from dpsim.progress import Progress

_PROFILE_VISITS = 3
"""Visits a round to each case of the profile, for one to each table: every prediction rests on these layer times."""


def prepare_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The profiles and the calibrations that ``argument`` asks for, measured for ``argument["seconds"]``.

    The measuring takes up to twice as long where a compute slowdown is not known to 3 %. Rank 0 returns the results
    (plain values).
    """
    configs = [codec.decode(plain, ProfileConfig, "profile") for plain in argument["profiles"]]
    networks = [codec.decode(plain, CalibrateConfig, "calibration") for plain in argument["calibrations"]]
    profilers = [ModelProfiler(comm, config) for config in configs]
    calibrators = [NetworkCalibrator(comm, network) for network in networks]
    models, links = dict.fromkeys(each.model for each in configs), dict.fromkeys(each.network for each in networks)
    what = {"profiling": models, "calibrating": links}
    report(" and ".join(f"{verb} {' and '.join(names)}" for verb, names in what.items() if names))

    def settled() -> bool:
        return all(profiler.settled() for profiler in profilers)

    for current in rounds(until_settled(argument["seconds"]), suffice=settled, comm=comm):
        for turn in range(_PROFILE_VISITS):
            for profiler in profilers:
                profiler.visit(current, turn)
        for calibrator in calibrators:
            calibrator.visit(current)
    profiles = [profiler.result() for profiler in profilers]
    machines = [calibrator.result() for calibrator in calibrators]
    return {"profiles": codec.to_builtins(profiles), "machines": machines} if comm.rank == 0 else None
