"""How an allreduce benchmark measures, in the words of its report."""

from __future__ import annotations

SIMULATOR = "numba's CUDA simulator"
_NOISE = "The default algorithm runs twice (A/A): the difference is the noise."
_CPU = (
    "Every algorithm was checked at every size before it was timed, with whole numbers in random places against the "
    "exact sum, and again after each burst of calls. An algorithm with any wrong element has no times.",
    "Every system runs in processes of its own, and the same code times all of them. They take turns in random order, "
    "size by size, in rounds; waiting processes sleep.",
    "All ranks begin a call at the same moment of a common clock, and a time is that of the slowest rank. Before each "
    "call every rank rewrites its whole buffer, as backward does; this is not timed. Rows marked cached reuse an "
    "unmodified buffer.",
    "The bound of every allreduce is 2 n S bytes over W, and W is the bandwidth of x = x * s in place (one read, one "
    "write) in the same memory by the same processes, timed in turns with the allreduces in random order, call by "
    "call. Calls of up to 64 KiB come in bursts of 16 after two that do not count.",
    "Out of place costs dpsim a copy into the memory that ranks share. Peers are compared with the faster of the two "
    "placements.",
    _NOISE,
)
_CUDA = (
    "Every algorithm was checked at every size before it was timed, and again after each burst of calls: all elements "
    "of all devices, on random numbers, against the sum in the fixed order, to the bit. An algorithm with any wrong "
    "element has no times.",
    "dpsim's devices are logical devices of one GPU: arrays in its memory, added in one cooperative launch. A time is "
    "between two events of the GPU. The host enqueues what is timed while a long copy runs, so that launching is not "
    "included.",
    "Algorithms take turns in random order, size by size, in rounds. Before each call all buffers are rewritten, as "
    "backward does; this is not timed. Rows marked cached reuse an unmodified buffer.",
    "The bound of every allreduce in one memory is 2 n S bytes over W, and W is the bandwidth of x = x * s in place "
    "(one read, one write) in the same memory, timed in turns with the allreduces. Beside it stands the bandwidth of "
    "the GPU's own copy (memcpy) of as many bytes: where that is much higher, W is no bound.",
    "Out of place costs dpsim a copy within the GPU, since its kernels add in place.",
    "Between GPUs (dpsim-gpus, nccl) each GPU has one process. All begin a call together, and a time is that of the "
    "slowest process by the host's clock, until its stream has ended. No bound of one memory applies: compare these "
    "two with each other.",
    _NOISE,
)
RULES = {"cpu": _CPU, "cuda": _CUDA}
"""The rules of each backend."""
