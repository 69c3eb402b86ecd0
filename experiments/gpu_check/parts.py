"""The parts of gpu_check in the order in which they run, each bounded in time and in a process that can be killed.

First what the targets are about: the kernels on logical devices of one GPU, and training on one; then between
processes; the tests take the time that is left. Every figure of an allreduce is checked against the reference where it
is taken, before and after its timing, and layers that kernels compute against NumPy before a training by them is timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpsim.comm.cuda.driver import Driver
from dpsim.comm.cuda.reproducible import REQUIRED
from dpsim.errors import CommunicationError, DpsimError
from dpsim.experiments.command import tell
from dpsim.experiments.gpu_check import logical
from dpsim.experiments.gpu_check.journal import Journal
from dpsim.experiments.gpu_check.libraries import NUMBA_STEPS
from dpsim.experiments.gpu_check.probes import alone, error_line, why_no_pytorch, without_folders
from dpsim.experiments.gpu_check.record import BESIDE_PYTORCH, REPRODUCIBLE, TARGETS, Tests
from dpsim.launch import child_process, jobs, rank_info, rank_process, scratch
from dpsim.study.environment import cores

TOTAL_S, LOGICAL_S, TRAINING_S, BETWEEN_END_S = 510.0, 120.0, 180.0, 390.0
"""In seconds: all of a run; the logical devices; training on one GPU; and the moment of the run by which everything
between processes is to be done. With what a run needs to start and to end it stays below nine minutes. A run that was
given less time takes as much less for each (``Journal.share``)."""
LEAST_S = 240.0
"""A run that was given less would measure almost nothing."""

_LEAST_JOB_S, _START_S, _POLL_S = 30.0, 25.0, 1.0
_FIGURE_S = 75.0
"""How long a figure of training may take: most of it is the start of Python, CUDA and PyTorch, compilers and NumPy."""
_STALL_S = 45.0
"""How long the logical devices may do nothing: longer than it takes to start, to compile a kernel or to check one."""
_MOST_GPUS, _MOST_TEST_PROCESSES = 8, 4
_BETWEEN_BYTES = tuple(4**power for power in (13, 8, 1, 14, 5, 10, 12))
_TESTS = Path(__file__).resolve().parents[2] / "tests"
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


class Ended(NamedTuple):
    """How a process ended, and what it printed; ``code`` is None for one that was killed here."""

    code: int | None
    out: str
    err: str

    @property
    def ending(self) -> str:
        return f"killed by signal {-(self.code or 0)}" if (self.code or 0) < 0 else f"ended with exit code {self.code}"


def run_logical(journal: Journal, seconds: float, command: Sequence[str] = (), stall_s: float = _STALL_S) -> None:
    """Measure all versions on logical devices of one GPU, for ``seconds``.

    A version that fails, or that does nothing for ``stall_s``, is left out from then on, and the others go on.
    ``command`` runs in place of ``logical``.
    """
    path = journal.parts / "1-logical.jsonl"
    note = logical.note_file(path)
    command = command or (sys.executable, "-m", logical.__name__)
    deadline_s = time.monotonic() + seconds

    def stalls() -> bool:
        journal.write()
        return time.time() - note.stat().st_mtime > stall_s

    with journal.part("logical devices"):
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            note.write_text("")
            words = [*command, str(path), str(left_s), *journal.wrong_versions]
            ended = run_alone(journal, words, path, left_s + stall_s, gives_up=stalls)
            journal.left_out.extend(ended.out.splitlines())
            if ended.code == 0:
                break
            version = note.read_text()
            ending = f"nothing happened for {stall_s:.0f} s" if ended.code is None else ended.ending
            journal.failed.append(f"logical devices: {version or 'before the first version'}: {ending}")
            if version in ("", *journal.wrong_versions) or time.monotonic() > deadline_s:
                break
            journal.wrong_versions.append(version)


def run_training(journal: Journal, seconds: float, command: Sequence[str] = (), figure_s: float = _FIGURE_S) -> None:
    """Measure training on one GPU, for ``seconds``: each figure in a process of its own, which ``figure_s`` bounds.

    ``command`` runs in place of ``training``, with the figure's file and its name. Figures beside a PyTorch that is not
    there start no process. What a figure prints is a reason why it is left out.
    """
    missing = "" if command else why_no_pytorch(simulated=journal.gpus.simulated)
    command = command or (sys.executable, "-m", f"{__package__}.training")
    deadline_s = time.monotonic() + seconds
    with journal.part("training"):
        for number, name in enumerate(TARGETS):
            left_s = deadline_s - time.monotonic()
            reason = missing if name in BESIDE_PYTORCH else ""
            if reason or left_s <= 0:
                journal.left_out.append(f"{name}: {reason or 'no time left'}")
                continue
            journal.progress(f"training: {name}")
            path, limit_s = journal.parts / f"3-training-{number}.trainings", min(left_s, figure_s)
            required = REQUIRED if name == REPRODUCIBLE else {}
            words = [*command, str(path), name]
            ended = run_alone(journal, words, path, limit_s, variables=required, errors=True)
            journal.left_out.extend(f"{name}: {line}" for line in ended.out.splitlines())
            print(ended.err, end="", file=sys.stderr, flush=True)
            if ended.code is None:
                journal.failed.append(f"{name}: not done after {limit_s:.0f} s")
            elif ended.code:
                reason = without_folders(error_line(ended.err)) if ended.code > 0 else ""
                journal.failed.append(f"{name}: {reason or ended.ending}")


def run_between(journal: Journal, driver: Driver) -> None:
    """Measure all versions that work between processes, largest number first; NCCL where every process has a GPU."""
    counts = device_counts(len(driver.gpus), rank_info.job())
    nccl_missing = next((probe.text for probe in journal.probes if probe.name == "NCCL" and not probe.works), "")
    for number, devices in enumerate(counts):
        if driver.exclusive and rank_info.job() is None and devices > len(driver.gpus):
            journal.left_out.append(f"{devices} processes on one GPU: it is in the compute mode EXCLUSIVE_PROCESS")
            continue
        if journal.elapsed_s > journal.share * BETWEEN_END_S:
            journal.left_out.append(f"{devices} processes: no time left")
            continue
        jobs_left = 2 * (len(counts) - number)
        result = _on_ranks(journal, "kernels", devices, jobs_left)
        if result.get("gpus") != devices:  # NCCL takes one rank a GPU
            continue
        if nccl_missing:
            journal.left_out.append(f"NCCL between {devices} processes: {nccl_missing}")
        else:
            _on_ranks(journal, "nccl", devices, jobs_left - 1)


def device_counts(gpus: int, job: rank_info.MpiJob | None) -> list[int]:
    """Return how many processes to measure: those of the job; else one a GPU, and 4 and 2, or 2 on a single GPU."""
    if job is not None and job.size is not None:
        return [job.size] if job.size > 1 else []
    most = min(max(gpus, 2), _MOST_GPUS)
    return sorted({count for count in (most, 4, 2) if count <= most}, reverse=True)


def _on_ranks(journal: Journal, task: str, devices: int, jobs_left: int) -> dict[str, Any]:
    """Run a task of ``between`` in processes of its own; its result, empty if it failed."""
    seconds = max(_LEAST_JOB_S, (journal.share * BETWEEN_END_S - journal.elapsed_s) / jobs_left - _START_S)
    simulated = journal.gpus.simulated
    argument = {
        "sizes_bytes": list(logical.SIMULATOR.sizes_bytes if simulated else _BETWEEN_BYTES),
        "samples": 2 if simulated else 20,
        "seconds": seconds,
        "results": str(journal.parts / f"2-between-{devices}-{task}.jsonl"),
        "without": journal.wrong_versions,
    }
    name, limit_s = f"{devices} processes, {task}", seconds + _START_S
    task = f"dpsim.experiments.gpu_check.between:{task}"
    result: dict[str, Any] = {}
    with journal.part(name), _bounded(journal, name, limit_s):
        try:
            result = jobs.on_ranks(task, argument, devices=devices, progress=journal.progress, timeout_s=limit_s)
            journal.left_out.extend(result["left_out"])
        except DpsimError as error:
            journal.failed.append(f"{name}: {error.given}")
    return result


@contextlib.contextmanager
def _bounded(journal: Journal, name: str, seconds: float) -> Iterator[None]:
    """End the job that this process is a rank of after ``seconds``: its ranks cannot be killed one by one.

    Outside such a job ``jobs.on_ranks`` keeps the time limit.
    """
    if rank_info.job() is None:
        yield
        return

    def give_up() -> None:
        journal.failed.append(f"{name}: not done after {seconds:.0f} s; the job was ended")
        journal.write()
        tell(f"gpu-check: {journal.failed[-1]}; what was measured is in {journal.path}")
        rank_process.abort(CommunicationError(journal.failed[-1]))

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_tests(journal: Journal, driver: Driver) -> None:
    """Run the tests marked ``gpu`` that are not slow in the time that is left; those that start ranks on demand."""
    if journal.gpus.simulated:
        journal.tests = Tests(passed=True, line="not run in the simulator")
        return
    job = rank_info.job()
    if job is not None and driver.exclusive:
        journal.left_out.append(
            "tests: a GPU is in the compute mode EXCLUSIVE_PROCESS, and the ranks of this job use it"
        )
        return
    files = [path for path in sorted(_TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    if not files:
        journal.tests = Tests(passed=False, line="not run: there are no tests beside this package; use a checkout")
        return
    starts_ranks = job is None and not journal.fails("MPI")
    if not starts_ranks:
        journal.left_out.append("tests that start ranks: there is no working mpiexec, or this is a job of a launcher")
    marked = "gpu and not slow" if starts_ranks else "gpu and not slow and not ranks"
    command = [sys.executable, "-m", "pytest", "-m", marked, "-vv"]
    command += ["-W", "default", "-p", "no:cacheprovider"]  # a library's warning is not what is tested here
    if importlib.util.find_spec("xdist") is not None and not driver.exclusive:
        processes = max(1, min(_MOST_TEST_PROCESSES, cores() // 2))
        command += ["-n", str(processes), "--dist", "loadgroup"]  # kernels compile on one core each
    with journal.part("tests"):
        seconds = max(_LEAST_JOB_S, journal.share * TOTAL_S - journal.elapsed_s)
        journal.tests = tested(journal, [*command, *map(str, files)], seconds)


def tested(journal: Journal, command: Sequence[str], seconds: float) -> Tests:
    """Return the outcome of pytest, which is killed after ``seconds``; what ended counts."""
    tell(f"tests, at most {seconds:.0f} s")
    ended = run_alone(journal, command, journal.parts / "tests", seconds, errors=True, cwd=_TESTS.parent)
    lines = (ended.err + ended.out).splitlines() or ["pytest printed nothing"]
    if ended.code is None:
        outcomes = [match[1].lower() for line in lines if (match := _OUTCOME.search(line))]
        counted = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(outcomes)) or "no test ended"
        lines.append(f"stopped after {seconds:.0f} s: {counted}")
    if ended.code != 0:
        tell("\n".join(lines))
    return Tests(passed=ended.code == 0, line=lines[-1].strip("= "), failed=tuple(dict.fromkeys(_failed(lines))))


def _failed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the names of tests that failed, from lines like ``NAME FAILED [ 1%]`` and ``[gw0] [ 1%] FAILED NAME``."""
    for line in lines:
        match = _OUTCOME.search(line)
        if match and match[1] in ("FAILED", "ERROR"):
            sides = (line[: match.start()], line[match.end() :].partition(" - ")[0])
            yield from (side.strip() for side in sides if ".py::" in side)


def run_alone(
    journal: Journal,
    command: Sequence[str],
    path: Path,
    seconds: float,
    *,
    gives_up: Callable[[], bool] = lambda: False,
    variables: Mapping[str, str] | None = None,
    errors: bool = False,
    cwd: Path | None = None,
) -> Ended:
    """Run a command alone, which with all that it starts ends when this run ends, however that happens.

    It is killed after ``seconds``, or if ``gives_up``, asked every second. It prints into files beside ``path``, its
    errors to the terminal unless ``errors`` are wanted.
    """
    printed = [path.with_suffix(suffix) for suffix in (".txt", ".err")]
    environment = alone(os.environ) | scratch.environment(journal.parts) | dict(variables or {})
    with (
        printed[0].open("w", encoding="utf-8") as out,
        printed[1].open("w", encoding="utf-8") as err,
        child_process.child(command, cwd=cwd, env=environment, stdout=out, stderr=err if errors else None) as process,
    ):
        deadline_s = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                break
            if gives_up():
                break
        code = process.poll()
    return Ended(code, *(file.read_text(encoding="utf-8", errors="replace") for file in printed))


class Part(NamedTuple):
    """A part of the check: its name, the libraries that must work, and what runs it and tells the journal."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[Journal, Driver], None]


_DEVICES = (*NUMBA_STEPS, "CuPy")
PARTS = (
    Part("logical devices", _DEVICES, lambda journal, driver: run_logical(journal, journal.share * LOGICAL_S)),
    Part("training", (*_DEVICES, "cuBLAS"), lambda journal, driver: run_training(journal, journal.share * TRAINING_S)),
    Part("between processes", (*_DEVICES, "MPI"), run_between),
    Part("tests", (*NUMBA_STEPS, "pytest"), run_tests),
)


def run_all(journal: Journal, driver: Driver) -> None:
    """Run every part whose libraries work by the journal's probes."""
    for part in PARTS:
        if failing := [name for name in part.needs if journal.fails(name)]:
            journal.failed.append(f"{part.name}: not run, because {', '.join(failing)} fails")
        else:
            part.run(journal, driver)
