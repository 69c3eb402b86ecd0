"""Runs what needs a GPU on a machine that has one or more, in under 8 minutes and without a network.

The tests marked ``gpu``; every CUDA allreduce with 2, 4 and 8 logical devices on one GPU; then between processes, one a
GPU, with NCCL beside them where there are two GPUs or more. One JSON file is written and one table printed. Alone it
starts its ranks itself; under ``mpiexec -n 4`` or ``srun -n 4`` it uses those that it was given. Exit codes: 0 all ran,
whatever the times; 1 a test or the job of ranks failed, or a result was wrong; 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dpsim import codec
from dpsim.comm.cuda.available import simulating, why_no_gpu
from dpsim.errors import DpsimError
from dpsim.experiments.gpu_check import logical
from dpsim.experiments.gpu_check.record import GpuCheck, Gpus, Samples, Tests, assemble, file_name, table
from dpsim.experiments.gpu_check.versions import gpus
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.launch import jobs, rank_info
from dpsim.records.sweep import Environment

TESTS_S, LOGICAL_S, RANKS_S = 200.0, 130.0, 60.0
"""At most, in seconds: the tests, the logical devices, and each of two jobs of processes."""

_ROOT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "HYD", "MPIR_", "MPI_LOCAL")
_BETWEEN_BYTES = tuple(4**power for power in (1, 5, 8, 10, 12, 13, 14))


def main() -> int:
    """Run the check; the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER", help="where the JSON file goes [here]")
    folder: Path = parser.parse_args().output
    job = rank_info.job()
    if job is not None and job.rank != 0:
        jobs.serve()
    try:
        reason = "" if simulating() else why_no_gpu()
        if reason:
            print(f"gpu-check: there is no GPU to check here: {reason}", file=sys.stderr)
            return 2
        record = run()
        path = folder / file_name(record)
        codec.write(path, record)
    except DpsimError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    finally:
        if job is not None:
            jobs.release()
    print(f"{table(record)}\n\nwritten: {path}")
    if not record.gpus.simulated:
        print("reports/contributed/README.md says how to send it in.")
    return 0 if record.tests.passed and not record.summary.wrong and not record.summary.failed else 1


def run() -> GpuCheck:
    """Everything, in order: tests first, so that a wrong kernel is known of before it is timed."""
    begin_s, taken_at, hardware = time.monotonic(), stamp(), gpus()
    for line in (
        f"GPUs: {', '.join(hardware.names)}",
        f"driver {hardware.driver}; CUDA {hardware.cuda}",
        _packages(hardware),
    ):
        _tell(line)
    tests = Tests(passed=True, line="not run in the simulator") if hardware.simulated else run_tests()
    _tell(tests.line)
    results = _Results()
    results.add("logical:alone", {"simulated": hardware.simulated, "seconds": LOGICAL_S}, 1, LOGICAL_S + 30)
    _between(hardware, results)
    return assemble(
        results.samples,
        taken_at=taken_at,
        environment=_without_paths(environment()),
        gpus=hardware,
        tests=tests,
        seconds=time.monotonic() - begin_s,
        left_out=results.left_out,
        failed=results.failed,
    )


def run_tests() -> Tests:
    """The tests marked ``gpu``, in a process that knows nothing of the ranks that this one may be among."""
    if not (_ROOT / "tests").is_dir():
        return Tests(passed=False, line="not run: there are no tests beside this package; use a checkout")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(_ROOT / "tests")]
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TESTS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Tests(passed=False, line=f"not done after {TESTS_S:.0f} s")
    lines = done.stdout.splitlines() or ["pytest printed nothing"]
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    return Tests(passed=done.returncode == 0, line=lines[-1])


@dataclass(frozen=True)
class _Results:
    """What the jobs of ranks came to: samples, what was not there to be measured, and what failed."""

    samples: list[Samples] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, task: str, argument: dict[str, Any], devices: int, timeout_s: float) -> dict[str, Any]:
        """Run a task in processes of their own, so that one that hangs or dies costs no more than what it measures."""
        try:
            result: dict[str, Any] = jobs.on_ranks(
                f"dpsim.experiments.gpu_check.{task}", argument, devices=devices, progress=_tell, timeout_s=timeout_s
            )
        except DpsimError as error:
            self.failed.append(f"{task} on {devices} ranks: {error.given}")
            return {}
        self.samples.extend(codec.decode(one, Samples, "samples") for one in result["samples"])
        self.left_out.extend(result["left_out"])
        return result


def _between(hardware: Gpus, results: _Results) -> None:
    """Samples between processes, as many as this job's ranks, else one a GPU, else two on the one GPU."""
    job = rank_info.job()
    if job is not None and job.size is not None:
        counts = [job.size] if job.size > 1 else []
    else:
        counts = [n for n in (2, 4, 8) if n <= max(len(hardware.names), 2)]
    sizes = logical.SIMULATOR.sizes_bytes if hardware.simulated else _BETWEEN_BYTES
    argument = {"sizes_bytes": list(sizes), "samples": 2 if hardware.simulated else 20}
    for devices in counts:
        result = results.add("between:kernels", argument, devices, RANKS_S / len(counts))
        if result.get("gpus") == devices:  # NCCL takes one rank a GPU
            results.add("between:nccl", argument, devices, RANKS_S / len(counts))


def _without_paths(environment_: Environment) -> Environment:
    """For others to see: a path may name a user."""
    kept = {name: value for name, value in environment_.variables.items() if "/" not in value}
    return msgspec.structs.replace(environment_, variables=kept)


def _packages(hardware: Gpus) -> str:
    return f"numba-cuda {hardware.numba_cuda}, CuPy {hardware.cupy}, NCCL {hardware.nccl}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
