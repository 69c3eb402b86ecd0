"""Runs what needs a GPU on a machine that has one or more, in under 9 minutes and without a network.

It probes what it needs, then takes every CUDA allreduce with 2, 4 and 8 logical devices on one GPU; then training on
one, beside PyTorch where it is installed; then allreduces between processes, one a GPU, with NCCL beside them where
there are two GPUs or more; then the tests marked ``gpu`` that are not slow. One JSON file is written at once, and again
with all that is known by then; one table is printed. Alone it starts its ranks itself; under ``mpiexec -n 4`` or
``srun -n 4`` it uses those that it was given. Exit codes: 0 all ran, whatever the times; 1 a test or a part failed or
could not run, or a result was wrong; 2 there is no GPU, or the file cannot be written.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from dpsim.comm.cuda.available import simulating
from dpsim.comm.cuda.driver import Driver, ask
from dpsim.dates import stamp
from dpsim.experiments.command import ended, parser, tell
from dpsim.experiments.gpu_check import parts
from dpsim.experiments.gpu_check.journal import Journal
from dpsim.experiments.gpu_check.probes import gpus, kernel_driver, probe_all
from dpsim.experiments.gpu_check.record import table
from dpsim.launch import rank_info, rank_process, scratch
from dpsim.records.sweep import Environment
from dpsim.study.environment import environment


def main() -> int:
    options = parser("gpu_check", __doc__)
    options.add_argument(
        "--output", type=Path, default=Path(), metavar="FOLDER", help="where the JSON file goes [here]"
    )
    most_s = int(parts.TOTAL_S)
    options.add_argument(
        "--seconds",
        type=int,
        default=most_s,
        metavar="N",
        help=f"how long it may take, {parts.LEAST_S:.0f} to {most_s} [{most_s}]: less time measures fewer sizes",
    )
    given = options.parse_args()
    if not parts.LEAST_S <= given.seconds <= most_s:
        options.error(f"--seconds {given.seconds}: {parts.LEAST_S:.0f} to {most_s} are allowed")
    folder: Path = given.output
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # small launches are meant
    job = rank_info.job()
    if job is not None and job.rank != 0:
        rank_process.serve()
    try:
        driver = Driver() if simulating() else ask()
        if driver.problem:
            tell(f"gpu-check: there is no GPU to check here: {driver.problem}")
            return 2
        return ended("gpu-check", lambda: _check(folder, driver, given.seconds / parts.TOTAL_S))
    finally:
        if job is not None:
            rank_process.release()


def _check(folder: Path, driver: Driver, share: float) -> int:
    begin_s, taken_at = time.monotonic(), stamp()
    with scratch.scratch("gpucheck") as parts_folder:
        journal = Journal(
            folder=folder,
            parts=parts_folder,
            taken_at=taken_at,
            begin_s=begin_s,
            environment=without_paths(environment()),
            gpus=gpus(driver),
            share=share,
        )
        with journal.part("probes"):
            tell(f"kernel driver {kernel_driver()}; the record is written to {journal.path} from now on")
            if not simulating():
                probe_all(driver, journal.probed, tell)
        parts.run_all(journal, driver)
        record, path = journal.write(), journal.path
    print(f"{table(record)}\n\nwritten: {path}")
    if record.points and not record.gpus.simulated:
        print("reports/contributed/README.md says how to send it in.")
    return 0 if record.tests.passed and not record.summary.wrong and not record.summary.failed else 1


def without_paths(environment_: Environment) -> Environment:
    """Return the environment for others to see: without the values that are paths, which may name a user."""
    kept = {name: value for name, value in environment_.variables.items() if "/" not in value}
    return msgspec.structs.replace(environment_, variables=kept)


if __name__ == "__main__":
    sys.exit(main())
