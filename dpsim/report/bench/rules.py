"""How an allreduce benchmark measures, in the words of its report."""

from __future__ import annotations

SIMULATOR = "numba's CUDA simulator"
_CPU = (
    "Every way to reduce was checked at every size before it was timed, with whole numbers in random places against "
    "the exact sum, and again after each burst of calls. What is wrong anywhere has no times.",
    "Every system runs in processes of its own, all timed by the same code. They take turns in random order, size by "
    "size, in rounds; who waits sleeps.",
    "All ranks begin a call at one moment of their common clock; a time is the slowest rank's. Before each call every "
    "rank rewrites its whole buffer, as backward does, outside the time. Rows marked cached reuse an unmodified one.",
    "The bound of every allreduce is 2 n S bytes over W, and W is the bandwidth of x = x * s in place (one read, one "
    "write) in the same memory by the same processes, timed in turns with the allreduces in random order, call by "
    "call. Calls of up to 64 KiB come in bursts of 16 after two that do not count.",
    "Out of place costs dpsim a copy into the memory that ranks share; peers get whichever of both is faster where "
    "they are compared.",
    "The default algorithm runs twice (A/A): the difference is the noise.",
)
_CUDA = (
    "Every way to reduce was checked at every size before it was timed, and again after each burst of calls: all "
    "devices' elements, on random numbers, against the sum in the fixed order, to the bit. What is wrong anywhere has "
    "no times.",
    "dpsim's devices are logical devices of one GPU: arrays in its memory, added in one cooperative launch. A time is "
    "between two of the GPU's events; the host hands in what is timed while a long copy runs, so that launching is not "
    "in it.",
    "Ways take turns in random order, size by size, in rounds. Before each call all buffers are rewritten, as backward "
    "does, outside the time. Rows marked cached reuse an unmodified one.",
    "The bound of every allreduce in one memory is 2 n S bytes over W, and W is the bandwidth of x = x * s in place "
    "(one read, one write) in the same memory, timed in turns with the allreduces.",
    "Out of place costs dpsim a copy within the GPU, since its kernels add in place.",
    "Between GPUs (dpsim-gpus, nccl) each has one process. All begin a call together; a time is the slowest one's, by "
    "the host's clock until the stream has ended. There is no bound of one memory: compare these two with each other.",
    "The default algorithm runs twice (A/A): the difference is the noise.",
)
RULES = {"cpu": _CPU, "cuda": _CUDA}
"""By backend."""
