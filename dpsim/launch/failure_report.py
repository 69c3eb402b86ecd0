"""Why a job of ranks failed: what is known of each rank, and the one error to raise."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dpsim import errors
from dpsim.errors import CommunicationError, DpsimError

_FAULTS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Floating": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""How Python's faulthandler names the signals."""

_OUTSIDE = "another process ended it"
_FORWARDED = f"{_OUTSIDE}, or mpiexec did: it forwards this signal to its ranks"
_REMEDIES: dict[int, str] = {
    signal.SIGTERM: _FORWARDED,
    signal.SIGINT: _FORWARDED,
    signal.SIGKILL: f"{_OUTSIDE}; if memory ran out, use a smaller batch or fewer devices",
    signal.SIGSEGV: "if /dev/shm is small, shared memory may be the cause: dpsim doctor shows its size",
    signal.SIGBUS: "shared memory may be too small: dpsim doctor shows the size of /dev/shm",
}

_FAULT_REMEDY = (
    "look at dmesg (Xid) and nvidia-smi; run again with CUDA_LAUNCH_BLOCKING=1, which names the operation,"
    " or on 1 device under compute-sanitizer"
)
_CUDA = ("cupy", "cupy_backends", "numba", "numba_cuda", "cuda", "torch")
_CUDA_REMEDIES = {
    **dict.fromkeys(("CUDARuntimeError", "CUDADriverError", "CUBLASError", "CUDAError"), _FAULT_REMEDY),
    **dict.fromkeys(("CudaAPIError", "CudaDriverError", "AcceleratorError"), _FAULT_REMEDY),
    "OutOfMemoryError": "use a smaller batch or model, or end what else uses the GPU (nvidia-smi)",
}
"""What to do, by the exceptions with which the packages of ``_CUDA`` tell of a GPU or a library of CUDA that fails."""

_INTERRUPTED = signal.SIGINT | signal.SIGKILL
"""What MPICH reports when SIGINT ends a rank: joined with the SIGKILL of the others, 2 | 9 is SIGSEGV, 11."""


class JobFailed(CommunicationError):
    """A rank crashed or was killed.

    ``rank`` is None where it is unknown, and ``traceback`` is the rank's, or empty. A command that fails with this
    error exits with ``exit_code``: a script's own, if the rank ran a script. ``lost`` counts the ranks that SIGKILL
    ended, if that ended the job: exactly in a watched job, otherwise at least one.
    """

    def __init__(
        self,
        given: str,
        *,
        remedy: str = "",
        rank: int | None = None,
        traceback: str = "",
        exit_code: int = 1,
        lost: int = 0,
    ) -> None:
        super().__init__(given, remedy=remedy)
        self.rank, self.traceback, self.exit_code, self.lost = rank, traceback, exit_code, lost


@dataclass
class JobState:
    """What the starting process knows of a job's ranks.

    ``pids``: host and process id of each rank. ``errors``: the failures, as ``describe`` returns them. ``faults``: what
    Python wrote when a rank crashed, in the order of the crashes. ``result``: rank 0's result, in a list of length 1.
    ``done``: the ranks that have finished their task. ``first_ended``: the rank whose process ended first.

    ``killed``: the signals of watched ranks, in the order in which they were killed. ``reported_rank`` and
    ``reported_signal``: the killed rank according to mpiexec; ``reported_status``: what it calls the exit code, which
    is the signal of a killed rank; mpiexec itself ends with another code then, and may name no signal.
    ``launcher_signal``: the signal that killed mpiexec, or SIGINT if it got that. ``orphaned``: by rank, the process of
    mpiexec that started it and ended before it. ``proxy_lost``: mpiexec has lost such a process, though the ranks may
    not know. ``outlives``: the job goes on when ranks are killed; ``lost``: the signals that killed them;
    ``independent``: the ranks that await no others any more. ``hosts_ended``: how the hosts of a shaped network ended
    before their ranks; empty where they did not.
    """

    pids: dict[int, tuple[str, int]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    result: list[Any] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    first_ended: int | None = None
    killed: dict[int, int] = field(default_factory=dict)
    reported_rank: int | None = None
    reported_signal: int | None = None
    reported_status: int | None = None
    launcher_signal: int | None = None
    orphaned: dict[int, str] = field(default_factory=dict)
    proxy_lost: bool = False
    outlives: bool = False
    lost: dict[int, int] = field(default_factory=dict)
    independent: set[int] = field(default_factory=set)
    hosts_ended: str = ""


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """Return a rank's failure as plain values; ``kind`` is the class of a ``DpsimError``, None for other exceptions."""
    kind = next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), None)
    by_cuda = type(error).__module__.partition(".")[0] in _CUDA
    return {
        "rank": rank,
        "time": time.time(),
        "kind": kind if isinstance(error, DpsimError) else None,
        "given": getattr(error, "given", ""),
        "allowed": getattr(error, "allowed", ""),
        "remedy": getattr(error, "remedy", "") or (_CUDA_REMEDIES.get(type(error).__name__, "") if by_cuda else ""),
        "exit_code": script_exit_code(error),
        "line": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "consequence": type(error).__module__.startswith("mpi4py")
        or isinstance(error, KeyboardInterrupt | BrokenPipeError),
    }


def script_exit_code(error: BaseException) -> int | None:
    """Return the exit code of a process that calls ``sys.exit``; None for any exception but ``SystemExit``."""
    if not isinstance(error, SystemExit):
        return None
    return error.code & 0xFF if isinstance(error.code, int) else 1


def failure(code: int, state: JobState, devices: int) -> DpsimError:
    """Return the error for a failed job: its first failure, no consequence of that. ``code`` is mpiexec's exit code."""
    if state.hosts_ended:
        return JobFailed(state.hosts_ended, remedy=_OUTSIDE)
    records = sorted(state.errors, key=lambda record: (record["consequence"], record["time"]))
    ended_from_outside = (
        state.reported_signal or state.killed or state.launcher_signal or state.orphaned or state.proxy_lost
    )
    if records and not (records[0]["consequence"] and ended_from_outside):
        return _raised(records[0], devices)
    if state.launcher_signal is not None:
        return JobFailed(f"mpiexec was killed by {_name(state.launcher_signal)}", remedy=_OUTSIDE)
    if state.orphaned:
        orphan, process = next(iter(state.orphaned.items()))
        return JobFailed(f"{process}, which started rank {orphan} of {devices}, ended before it", remedy=_OUTSIDE)
    if state.proxy_lost:
        return JobFailed(
            "hydra_pmi_proxy, by which mpiexec starts the ranks, ended before them",
            remedy=f"see what it printed above; if that is nothing, {_OUTSIDE}",
        )
    killed_before = state.reported_signal == signal.SIGKILL and state.first_ended not in (None, *state.faults)
    faults = {} if killed_before else state.faults  # of ranks that talked to the killed one
    for crashed, text in faults.items():
        for words, signal_number in _FAULTS.items():
            if text.startswith(f"Fatal Python error: {words}"):
                return _killed([crashed], signal_number, devices, text)
    if state.killed:
        first = next(iter(state.killed.values()))
        return _killed(sorted(rank for rank, number in state.killed.items() if number == first), first, devices)
    rank = state.reported_rank
    if rank is None and len(state.pids) in (0, devices):  # otherwise a rank that never connected may have ended first
        rank = state.first_ended
    if state.reported_signal == _INTERRUPTED and len(state.pids) == devices:  # until then ranks ignore SIGINT
        return _killed([rank], signal.SIGINT, devices)  # of SIGSEGV a connected rank's faulthandler sends a report
    if state.reported_signal:
        return _killed([rank], state.reported_signal, devices)
    if code != state.reported_status and state.reported_status in (signal.SIGKILL, signal.SIGTERM):
        return _killed([rank], state.reported_status, devices)
    if code == 0:
        return JobFailed(f"the job of {devices} ranks ended without a result", rank=rank)
    subject = f"rank {rank} of {devices}" if rank is not None else f"one of {devices} ranks"
    return JobFailed(f"{subject} ended with exit code {code}", rank=rank, remedy="see what it printed above")


def _killed(ranks: Sequence[int | None], number: int, devices: int, traceback: str = "") -> JobFailed:
    """Return the error for ranks that a signal killed; ``[None]`` where the rank is unknown."""
    subject = f"rank {ranks[0]} of {devices} was" if ranks[0] is not None else f"one of {devices} ranks was"
    if len(ranks) > 1:
        subject = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {devices} were"
    failure, remedy = f"{subject} killed by {_name(number)}", _REMEDIES.get(number, "")
    lost = len(ranks) if number == signal.SIGKILL else 0
    return JobFailed(failure, remedy=remedy, rank=ranks[0], traceback=traceback, lost=lost)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def _raised(record: dict[str, Any], devices: int) -> DpsimError:
    """Return the error for an exception that a rank raised, from ``describe``'s record of it."""
    if record["kind"] is not None:
        error_class: type[DpsimError] = getattr(errors, record["kind"], DpsimError)
        return error_class(record["given"], allowed=record["allowed"], remedy=record["remedy"])
    rank, line = record["rank"], record["line"]
    failure = f"rank {rank} of {devices} failed: {line}"
    if record["exit_code"] is not None:
        return JobFailed(failure, rank=rank, exit_code=record["exit_code"])
    if record["remedy"]:
        failure = f"rank {rank} of {devices}: the GPU fails: {line.partition(': ')[2]}"
        return JobFailed(failure, rank=rank, remedy=record["remedy"])
    return JobFailed(failure, rank=rank, traceback=record["traceback"])
