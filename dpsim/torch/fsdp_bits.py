"""The order in which FSDP (``fully_shard``) over gloo adds the gradients of a unit.

The unit's gradients are sent as one array of a part for each rank: of every parameter, padded to rows that divide
evenly, the rank's rows. Gloo reduce-scatters it by an allreduce, and each rank divides its part of the sum by the number
of ranks. It holds for processors with PyTorch 2.13.

Source: PyTorch ``_fsdp_collectives.py`` (foreach_reduce), ``ProcessGroupGloo.cpp`` (reduce_scatter_tensor_coalesced).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsim.torch.gloo_order import Ranges, gloo_expressions, part


def unit_expressions(shapes: Sequence[tuple[int, ...]], ranks: int, element_bytes: int = 4) -> list[Ranges]:
    """Return for each parameter of a unit the orders in which gloo adds the elements of its gradient.

    ``shapes`` are those of the whole parameters, in the order in which the unit has them; none is a scalar.
    ``element_bytes`` is that of the type that gradients are reduced in.
    """
    shard_rows = [-(-shape[0] // ranks) for shape in shapes]
    row_elements = [math.prod(shape[1:]) for shape in shapes]
    shards = [rows * elements for rows, elements in zip(shard_rows, row_elements, strict=True)]
    of_unit = gloo_expressions(sum(shards) * ranks, ranks, element_bytes)
    expressions: list[Ranges] = [[] for _ in shapes]
    for rank in range(ranks):
        start = rank * sum(shards)
        for index, shard in enumerate(shards):
            before = rank * shard
            kept = min(shard, max(0, shapes[index][0] * row_elements[index] - before))
            own = part(of_unit, start, start + kept)
            expressions[index] += [(before + end, expression) for end, expression in own]
            start += shard
    return expressions
