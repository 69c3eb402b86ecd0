"""Which version of the kernels ``auto`` takes for an array in peer memory: by its size, the same on every rank.

Both versions add in the fixed order, so the choice changes no bits.
"""

from __future__ import annotations

from dpsim.comm.cuda.access import Mode
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS

SAVED_BYTES = 256 << 10
"""What a link moves while ``two-shot`` waits for its writes into other GPUs, which ``one-shot`` does without: about
1 us, at the 300 GB/s of NVLink. By data sheets, not measured; ``make gpu-check`` times both versions at every size."""

ONE_WAVE_BYTES = MOST_BLOCKS * 512 * 16
"""What the threads of a rank hold in registers at once; beyond it ``one-shot`` waits again for every such piece."""


def one_shot_bytes(ranks: int) -> int:
    """Up to which size one-shot is taken: where what it reads more takes no longer than what it saves.

    With n ranks and S bytes, a rank reads (n - 1) S of others in one-shot; in two-shot it reads (n - 1) / n of S and
    writes as much to others.
    """
    more = (ranks - 1) * (1 - 2 / ranks)
    return min(ONE_WAVE_BYTES, int(SAVED_BYTES / more)) if more else ONE_WAVE_BYTES


def version_of_auto(ranks: int, size_bytes: int, mode: Mode, *, sixteen_bits: bool) -> str:
    """The version for an array of ``size_bytes``: two-shot wherever one-shot is no faster, or cannot do it.

    In ``split`` kernels end where ranks wait, and one-shot has one more such place. Only two-shot sends 16 bits.
    """
    if mode == "split" or sixteen_bits or size_bytes > one_shot_bytes(ranks):
        return "two-shot"
    return "one-shot"
