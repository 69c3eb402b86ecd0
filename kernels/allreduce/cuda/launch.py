"""How a version for NVIDIA GPUs is called. Importing this loads no CUDA: making a version does.

``version.make(arrays, sums, *, rank=None, mode="one-launch", flags=None, scale=1.0, compression=None,
most_blocks=MOST_BLOCKS, watch=None, each_sum=False) -> Launch``

``arrays``: one 1-D device array for each of the partial sums ``sums``, all of one dtype and length, anything with
``__cuda_array_interface__`` (NumPy arrays in numba's CUDA simulator). A rank's result goes to its first partial sum,
``sums.of(rank)[0]``; its others are scratch afterwards. float16, bfloat16 (as uint16 codes; added in float32),
float32, float64; any length, any alignment of whole elements.

``rank``: None where all ranks are logical devices of this process, on one GPU; else this process's rank, the other
ranks' arrays being their memory, opened by CUDA IPC. ``mode``:

- ``one-launch``: all ranks in one cooperative launch; its blocks are partitioned into ranks and wait for each other
  inside it. Only with ``rank=None``.
- ``flags``: one process a device; the kernels wait for each other by flags in peer memory (``ld.acquire.sys``,
  ``st.release.sys``). ``flags``: one device array a rank, uint32 [``flag_words(ranks, most_blocks)``] or longer, all
  zero before the first call, kept from call to call; several Launches of the same ranks may share it. All ranks call
  the same Launches in the same order. ``most_blocks``: blocks a rank at most, the same on every rank; they occupy the
  GPU while they wait. ``watch``: when kernels give up waiting for a rank that does not come; without it they never do.
- ``split``: cut at the points of synchronisation, a stage each.

``scale``: the sum is multiplied by it. ``compression``: 16 bits between ranks. ``each_sum``: the sum of every two is
rounded to these 16 bits, or those of the arrays. Raises ``ConfigError`` for what a version cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpsim.errors import CommunicationError

Mode = Literal["one-launch", "flags", "split"]

MOST_BLOCKS = 64
"""Blocks a rank where ranks wait for each other by flags, unless ``make`` is given another number."""

HEADER_WORDS = 32
"""uint32 words before the flags of a rank, a cache line of 128 bytes; the first one is the abort word."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A prepared allreduce of device arrays: a call compiles, converts and allocates nothing.

    Each of ``stages`` takes the stream to run on, one of numba's: ``cuda.stream()``, ``cuda.external_stream(address)``,
    or 0. Between two stages every rank must have finished the one before; how (a host barrier after synchronising the
    stream) is up to the caller. One stage: the kernel synchronises itself. With ``mode="split"`` and a rank of its
    own some stages do nothing but mark where a rank is ready or done: what is between them is then safe whatever peers
    did before. With ``rank=None`` all stages go on one stream one after another, and nothing need be between them.

    ``blocks_at_once``: how many blocks a rank this GPU can run at once, which bounds ``most_blocks``.
    """

    stages: tuple[Callable[[Any], None], ...]
    blocks_at_once: int


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Compression to 16 bits, as ``dpsim.comm.compression`` does it: ranks read and write each other's 16-bit codes.

    ``dtype``: float16 or bfloat16. ``scale``: numbers are encoded times it; a power of two from 2^-64 to 1, and 1 for
    bfloat16. ``arrays``: one device array for the codes of each partial sum, uint16 [N], visible to the ranks as the
    arrays are.
    """

    dtype: str
    scale: float
    arrays: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A watch that ends kernels waiting for a rank that does not come; no launch on these flags is of use afterwards.

    ``limit_s``: how long a block waits for one rank; the first that gives up ends the kernels of all ranks.
    ``report``: a NumPy array uint32 [1] of zero in page-locked memory of the host, which every GPU can write. A kernel
    says there why it ended, so that looking costs the host no call of CUDA.
    """

    limit_s: float
    report: Any

    def check(self, ranks: int) -> None:
        """Raise ``CommunicationError`` if a kernel has given up; it names the ranks that waited and did not come."""
        code = int(self.report[0])
        if code:
            waiting, missing = divmod(code - 1, ranks)
            raise CommunicationError(
                f"rank {waiting} has waited {self.limit_s:g} s for rank {missing} in an allreduce on GPUs; "
                "the kernels of all ranks have ended",
                allowed=f"ranks that come to an allreduce within {self.limit_s:g} s of each other",
                remedy=f"look at what rank {missing} was doing (train --stall-after 10s says so), and at nvidia-smi",
            )


def flag_words(ranks: int, most_blocks: int = MOST_BLOCKS) -> int:
    """Return uint32 words of flags a rank: the header, and for each block one a peer and one for its progress."""
    return HEADER_WORDS + most_blocks * (ranks + 1)
