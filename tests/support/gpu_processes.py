"""Whether several processes can use the GPUs of this machine as the tests between processes need it."""

from __future__ import annotations

from dpsim.comm.cuda.driver import Driver, ask


def why_processes_cannot_share_gpus(driver: Driver | None = None) -> str:
    """Why other processes cannot use the GPUs beside the tests' own process; empty if they can."""
    driver = ask() if driver is None else driver
    if driver.exclusive:
        return "a GPU is in the compute mode EXCLUSIVE_PROCESS, and this process uses it (nvidia-smi -c DEFAULT)"
    return ""


def why_memory_is_not_shared(driver: Driver | None = None) -> str:
    """Why processes cannot open each other's device memory by CUDA IPC; empty if they can."""
    driver = ask() if driver is None else driver
    if not driver.peer_access:
        return "these GPUs do not reach each other's memory (nvidia-smi topo -p2p r)"
    return ""
