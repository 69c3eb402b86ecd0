"""What ``doctor`` tries on GPUs: copies, the memory of other ranks, NCCL, and MPI on device memory.

Each beyond the first runs in a job of ranks, because a library that does not fit may crash or hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from dpsim.comm.cuda import driver as cuda_driver
from dpsim.comm.cuda.available import cupy_version, gpu_count, nccl_missing, open_device, simulating, why_no_gpu
from dpsim.errors import DpsimError
from dpsim.installation import install
from dpsim.launch import jobs
from dpsim.progress import Progress
from dpsim.study import environment

if TYPE_CHECKING:
    from mpi4py import MPI

_JOB_S = 120.0
_MOST_RANKS = 8
_NUMBERS = 2**16
_NO_PEERS = "faster are GPUs that reach each other's memory (nvidia-smi topo -p2p w)"


def usable() -> bool:
    """Whether there is a GPU, or numba's simulator, on which to try the rest."""
    return simulating() or not why_no_gpu()


def device() -> Finding:
    """Copies an array to the GPU and back, if CuPy or numba-cuda is installed. A GPU is not needed."""
    if cupy_version() == "none" and environment.version("numba-cuda") == "none":
        return Finding("ok", "not used: neither CuPy nor numba-cuda is installed")
    driver = cuda_driver.ask()
    if driver.problem and not simulating():
        return Finding("ok", f"none to use: {driver.problem}; everything runs on the CPU")
    try:
        from numba import cuda as untyped

        cuda: Any = untyped
        sent = cuda.to_device(np.arange(8.0))
        same = bool((sent.copy_to_host() == np.arange(8.0)).all())
    except Exception as error:  # drivers fail in many ways, and none of them matters to the CPU
        return Finding(
            "warn", f"does not work: {type(error).__name__}: {error}", "see nvidia-smi; the CPU is used instead"
        )
    text = "numba's CUDA simulator" if simulating() else driver.description
    if not same:
        return Finding("warn", f"{text}; copies come back changed", "see nvidia-smi; the CPU is used instead")
    reason = "" if simulating() else why_no_gpu()
    if reason:
        return Finding("warn", f"{text}; --backend cuda cannot use it: {reason}", install(driver.extra))
    return Finding("ok", f"{text}; copies come back unchanged")


def _peers() -> Finding:
    """Ranks, one for each GPU and two at least, write into each other's memory with their kernels."""
    gpus = gpu_count()
    ranks = min(max(gpus, 2), _MOST_RANKS)
    if ranks > gpus and cuda_driver.ask().exclusive:
        return Finding("ok", "not tried: a single GPU in the compute mode EXCLUSIVE_PROCESS takes one rank")
    try:
        answer = jobs.on_ranks("dpsim.harness.doctor_gpu:reach", {}, devices=ranks, timeout_s=_JOB_S)
    except DpsimError as error:
        return Finding("warn", error.given, error.remedy or _NO_PEERS)
    on = f"{ranks} ranks on {answer['gpus']} GPU{'s' if answer['gpus'] > 1 else ''}"
    if answer["path"] != "peer memory":
        how = "NCCL moves gradients" if answer["path"] == "nccl" else "gradients go through host memory by MPI"
        return Finding("warn", f"{on}: {answer['reason']}; in training {how}, and kernels add them", _NO_PEERS)
    waits = "wait inside for each other" if answer["mode"] == "flags" else "stop where ranks wait for each other"
    return Finding("ok", f"{on} wrote into each other's {answer['way']} memory; kernels {waits}")


def reach(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """How gradients get from GPU to GPU between these ranks, tried by real writes; a task for ranks."""
    from dpsim.comm.cuda.paths import find_path

    own = open_device(comm.rank)
    path = find_path(own, comm)
    answer = {"path": path.name, "reason": path.reason, "gpus": len(set(comm.allgather(own.identity)))}
    return answer | ({"way": path.access.mapping, "mode": path.access.mode} if path.access is not None else {})


def _nccl() -> Finding:
    """Ranks, one for each GPU, make every call of NCCL that training makes."""
    if simulating():
        return Finding("ok", "not tried in the simulator")
    install = f"pip install {cuda_driver.ask().nccl_package}; without it dpsim's own kernels have no comparison"
    if reason := nccl_missing():
        return Finding("warn", reason, install)
    ranks = min(gpu_count(), _MOST_RANKS)
    try:
        answer = jobs.on_ranks("dpsim.harness.doctor_gpu:nccl_calls", {}, devices=ranks, timeout_s=_JOB_S)
    except DpsimError as error:
        return Finding("warn", error.given, error.remedy or install)
    if answer["wrong"]:
        return Finding("warn", f"{answer['version']}: wrong data from {answer['wrong']}", install)
    return Finding("ok", f"{answer['version']}: sums, gathers and messages between {ranks} GPU(s) are right")


def nccl_calls(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Which calls of NCCL give wrong data on the first rank where one does; a task for ranks with a GPU each."""
    from dpsim.comm.cuda import nccl

    wrong = comm.allgather(nccl.wrong_calls(comm, open_device(comm.rank)))
    return {"wrong": next(filter(None, wrong), ""), "version": nccl.version(nccl.load())}


def _mpi_on_device_memory() -> Finding:
    """Two ranks exchange device memory by MPI. dpsim does without: its messages go through host memory."""
    if simulating():
        return Finding("ok", "not tried in the simulator")
    if cuda_driver.ask().exclusive and gpu_count() < 2:
        return Finding("ok", "not tried: a single GPU in the compute mode EXCLUSIVE_PROCESS takes one rank")
    try:
        right = jobs.on_ranks("dpsim.harness.doctor_gpu:exchange", {}, devices=2, timeout_s=_JOB_S)
    except DpsimError as error:
        return Finding("ok", f"no ({error.given}); messages go through host memory")
    return Finding("ok", "two ranks exchanged device memory" if right else "no: numbers arrive changed")


def exchange(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> bool:
    """Whether the other rank's numbers arrive when MPI is given device memory; a task for two ranks.

    Where the MPI library does not know GPUs, this ends the rank by a signal.
    """
    own = open_device(comm.rank)
    own.use()
    sent, received = (own.memory(4 * _NUMBERS).view(np.float32) for _ in range(2))
    sent[...] = comm.rank + 1
    own.settle()
    other = 1 - comm.rank
    comm.Sendrecv(sent, other, recvbuf=received, source=other)
    own.settle()
    return all(comm.allgather(bool((received == other + 1).all())))


PROBES = (("GPU peers", _peers), ("NCCL", _nccl), ("GPU-aware MPI", _mpi_on_device_memory))
"""What is tried where there is a GPU, by name."""


class Finding(NamedTuple):
    """The result of one probe; ``found`` describes it, and ``remedy`` says what to do unless the state is ok."""

    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
    name: str = ""
