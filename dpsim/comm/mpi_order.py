"""The order in which the MPI library's own allreduce adds, as seen of one library and version."""

from __future__ import annotations

from dpsim.kernels.allreduce.expression import Expression


def native_order(elements: int, itemsize: int, ranks: int, *, blocking: bool) -> list[tuple[int, Expression]]:
    """Return the ends of ranges of elements, and the order in which the numbers of each are added."""
    p=1<<(ranks.bit_length()-1); rem=ranks-p
    parts=[(2*i,2*i+1) for i in range(rem)]+list(range(2*rem,ranks))
    while len(parts)>1: parts=[(parts[i],parts[i+1]) for i in range(0,len(parts),2)]
    return [(elements, parts[0])]
