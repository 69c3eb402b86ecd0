"""The versions for NVIDIA GPUs. Importing this loads no CUDA: versions do when they are made.

``version.make(arrays, slots, *, rank=None, mode="one-launch", flags=None, scale=1.0, compression=None, sgd=None) ->
Launch``

``arrays``: one 1-D device array a slot of ``tree.PartialSums``, all of one dtype and length, anything with
``__cuda_array_interface__`` (NumPy arrays in numba's CUDA simulator). A rank's result goes to its first slot,
``slots.of(rank)[0]``; its other slots are scratch afterwards. float16, bfloat16 (as uint16 codes; added in float32),
float32, float64; any length, any alignment of whole elements.

``rank``: None where all ranks are logical devices of this process, on one GPU; else this process's rank, the other
ranks' arrays being their memory, opened by CUDA IPC. ``mode``:

- ``one-launch``: all ranks in one cooperative launch; its blocks are partitioned into ranks and wait for each other
  inside it. Only with ``rank=None``.
- ``flags``: one process a device; the kernels wait for each other by flags in peer memory (``ld.acquire.sys``,
  ``st.release.sys``). ``flags``: one device array a rank, uint32 [``flag_words(ranks)``] or longer, all zero before the
  first call, kept from call to call; several Launches of the same ranks may share it. All ranks call the same Launches
  in the same order. A rank that never comes leaves the others' kernels waiting.
- ``split``: cut at the points of synchronisation, a stage each.

``scale``: the sum is multiplied by it. ``compression``: 16 bits between ranks. ``sgd``: update instead of storing the
sum. Raises ``ConfigError`` for what a version cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpsim.kernels.allreduce.algorithms import halving_doubling, ring
from dpsim.kernels.allreduce.cuda.moves import moved, schedule
from dpsim.kernels.allreduce.registry import Version, register
from dpsim.kernels.allreduce.tree import PartialSums

Mode = Literal["one-launch", "flags", "split"]

MOST_BLOCKS = 64
"""Blocks a rank where ranks wait for each other by flags."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A prepared allreduce of device arrays: a call compiles, converts and allocates nothing.

    Each of ``stages`` takes the stream to run on, one of numba's: ``cuda.stream()``, ``cuda.external_stream(address)``,
    or 0. Between two stages every rank must have finished the one before; how (a host barrier after synchronising the
    stream) is the caller's business. One stage: the kernel synchronises itself. With ``mode="split"`` and a rank of its
    own some stages do nothing but mark where a rank is ready or done: what is between them is then safe whatever peers
    did before. With ``rank=None`` all stages go on one stream one after another, and nothing need be between them.
    """

    stages: tuple[Callable[[Any], None], ...]


@dataclass(frozen=True, kw_only=True)
class Codes:
    """16 bits on the wire, as ``dpsim.comm.compression`` does it: ranks read and write each other's 16-bit codes.

    ``dtype``: float16 or bfloat16. ``scale``: numbers are encoded times it; a power of two from 2^-64 to 1, and 1 for
    bfloat16. ``arrays``: one device array a slot for the codes, uint16 [N], visible to the ranks as the arrays are.
    """

    dtype: str
    scale: float
    arrays: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """SGD with momentum in the same pass: v = momentum v + scale sum; w -= rate v (``reference.sgd``).

    ``w``, ``v``: one device array a rank each, of the gradients' dtype and length, equal on all ranks before and after.
    The gradients themselves are only read.
    """

    w: Sequence[Any]
    v: Sequence[Any]
    momentum: float
    rate: float


def flag_words(ranks: int) -> int:
    """uint32 words of flags a rank: one a block and peer, and one a block for how far it came."""
    return MOST_BLOCKS * (ranks + 1)


def _make(name: str) -> Callable[..., Launch]:
    def make(arrays: Sequence[Any], slots: PartialSums, **options: Any) -> Launch:
        from dpsim.kernels.allreduce.cuda import prepare  # loads CUDA

        return prepare.make(name, arrays, slots, **options)

    return make


DTYPES = ("float16", "bfloat16", "float32", "float64")

register(
    Version(
        name="ring",
        backend="cuda",
        summary="each chunk goes around twice; partial sums stay where they are",
        bytes_moved=lambda slots, size: float(moved(schedule(ring, slots)) * size),
        synchronisations=lambda slots: len(schedule(ring, slots)) + 1,
        make=_make("ring"),
        dtypes=DTYPES,
        variants=("scale",),
    )
)
register(
    Version(
        name="halving-doubling",
        backend="cuda",
        summary="up the tree, each rank over its share, and back",
        bytes_moved=lambda slots, size: float(moved(schedule(halving_doubling, slots)) * size),
        synchronisations=lambda slots: len(schedule(halving_doubling, slots)) + 1,
        make=_make("halving-doubling"),
        dtypes=DTYPES,
        variants=("scale",),
    )
)
register(
    Version(
        name="one-shot",
        backend="cuda",
        summary="every rank adds everything, in registers until all have read",
        bytes_moved=lambda slots, size: slots.ranks * (len(slots.owners) + 1) * size,
        synchronisations=lambda slots: 2,
        make=_make("one-shot"),
        dtypes=DTYPES,
        variants=("scale",),
    )
)
register(
    Version(
        name="two-shot",
        backend="cuda",
        summary="each rank adds its share of the elements, writes it to every rank",
        bytes_moved=lambda slots, size: (len(slots.owners) + slots.ranks) * size,
        synchronisations=lambda slots: 2,
        make=_make("two-shot"),
        dtypes=DTYPES,
        variants=("scale", "compression", "sgd"),
    )
)
