"""The order in which gloo's allreduce adds the values of ranks: an expression of ranks for each range of elements.

It holds for tensors on processors, in the gloo of PyTorch 2.13.0, whose allreduce is always the ring. Its
reduce-scatter is an allreduce of which each rank keeps a part.

Source: gloo ``allreduce.cc`` (``ring``), ``allreduce.h`` (``kMaxSegmentSize``); PyTorch ``ProcessGroupGloo.cpp``.
"""

from __future__ import annotations

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.expression import Expression

Ranges = list[tuple[int, Expression]]
"""(end, expression) of ranges of elements that follow each other; gloo adds the elements of a range in one order."""
MAX_SEGMENT_BYTES = 2**20
"""No message of the ring is longer (gloo's ``kMaxSegmentSize``)."""


def gloo_expressions(elements: int, ranks: int, element_bytes: int = 4) -> Ranges:
    """Return the orders in which gloo's allreduce adds the elements of a tensor.

    The tensor is cut into as many equal chunks as there are ranks. Chunk c starts at rank c - 1 and goes down around
    the ring: each rank adds its own values, and rank c is the last. The chunks of the last ranks are shorter, or empty.
    Raises ``ConfigError``.
    """
    for name, number, least in (("elements", elements, 0), ("ranks", ranks, 1), ("element_bytes", element_bytes, 1)):
        if number < least:
            raise ConfigError(f"{name} is {number}", allowed=f"{least} or more")
    if ranks == 1:
        return [(elements, 0)] if elements else []
    chunk = _chunk_elements(elements, ranks, element_bytes)
    ends = (min((rank + 1) * chunk, elements) for rank in range(-(-elements // chunk) if chunk else 0))
    return [(end, _down_the_ring(rank, ranks)) for rank, end in enumerate(ends)]


def _chunk_elements(elements: int, ranks: int, element_bytes: int) -> int:
    """Return the elements of a full chunk: two segments or more, of whole elements, none above the maximum."""
    size_bytes = elements * element_bytes
    max_segment_bytes = element_bytes * max(1, MAX_SEGMENT_BYTES // element_bytes)
    segments = max(-(-size_bytes // max_segment_bytes), 2 * ranks)
    segments_per_rank = -(-segments // ranks)
    segment_bytes = -(-size_bytes // (segments_per_rank * ranks))
    return segments_per_rank * -(-segment_bytes // element_bytes)


def _down_the_ring(last: int, ranks: int) -> Expression:
    """Return the sum that starts at the rank before ``last`` and goes down around the ring to ``last``."""
    total: Expression = (last - 1) % ranks
    for step in range(2, ranks + 1):
        total = (total, (last - step) % ranks)
    return total
