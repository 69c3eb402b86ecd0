"""Whether two settings of DDP over gloo give gradients of the same bits: the order in which each element is added.

The place of an element in its bucket decides the order (``gloo_order``), and the bucket cap decides the buckets. It
holds for tensors on processors with PyTorch 2.13, where every step reduces gradients once and all ranks compute alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.kernels.allreduce.expression import Expression, normal_form
from dpsim.lowering.ddp import Buckets, DdpOptions, DdpParameter, final_buckets, initial_buckets
from dpsim.torch.gloo_order import gloo_expressions

LAST_REBUILD = 3
"""From this step on no bucket changes."""

Ranges = list[tuple[int, Expression]]
"""(end, expression) of ranges of elements that follow each other, as of ``gloo_expressions``."""


@dataclass(frozen=True, kw_only=True)
class ReducedGradient:
    """A gradient that DDP reduces: the name of its parameter, its elements, and what decides its bucket."""

    name: str
    elements: int
    parameter: DdpParameter


@dataclass(frozen=True, kw_only=True)
class OrderDifference:
    """The first gradient that two settings add in different orders, from ``step`` on (counted from 1).

    ``element`` is its first such element, and ``expressions`` are the two orders in which ranks' values are added.
    """

    step: int
    name: str
    element: int
    expressions: tuple[Expression, Expression]


def first_difference(
    gradients: Sequence[ReducedGradient], ready_order: Sequence[int], ranks: int, options: tuple[DdpOptions, DdpOptions]
) -> OrderDifference | None:
    """Return where the orders of two settings first differ; ``None``: all gradients have the same bits in every step.

    ``gradients`` are in the order of ``named_parameters()``, ``ready_order`` has their positions as backward makes them
    final. A difference of orders shows in most elements, and not in all. Raises ``ConfigError``.
    """
    before: tuple[Buckets, ...] = ()
    for step in range(1, LAST_REBUILD + 1):
        buckets = tuple(step_buckets(gradients, ready_order, each, step) for each in options)
        if buckets == before or buckets[0] == buckets[1]:
            continue
        before = buckets
        orders = zip(*(gradient_expressions(gradients, each, ranks) for each in buckets), strict=True)
        for gradient, (first, second) in zip(gradients, orders, strict=True):
            if element := _differing(first, second):
                return OrderDifference(step=step, name=gradient.name, element=element[0], expressions=element[1])
    return None


def step_buckets(
    gradients: Sequence[ReducedGradient], ready_order: Sequence[int], options: DdpOptions, step: int
) -> Buckets:
    """Return DDP's buckets in a step: the initial list, and from step 2 on that which is rebuilt.

    Under ``static_graph`` DDP learns the order in step 2, and rebuilds for step 3.
    """
    parameters = [gradient.parameter for gradient in gradients]
    if step < (LAST_REBUILD if options.static_graph else 2):
        return initial_buckets(parameters, options)
    return final_buckets(parameters, ready_order, options)


def gradient_expressions(gradients: Sequence[ReducedGradient], buckets: Buckets, ranks: int) -> list[Ranges]:
    """Return for each gradient the orders in which gloo adds its elements; none for sparse ones, which it gathers."""
    expressions: list[Ranges] = [[] for _ in gradients]
    for bucket in buckets:
        members = [gradients[index] for index in bucket]
        if members[0].parameter.sparse:
            continue
        elements = sum(member.elements for member in members)
        size_bytes = sum(member.parameter.size_bytes for member in members)
        of_bucket = gloo_expressions(elements, ranks, size_bytes // max(elements, 1))
        start = 0
        for index in bucket:
            stop = start + gradients[index].elements
            expressions[index] = _part(of_bucket, start, stop)
            start = stop
    return expressions


def _part(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the ranges of the elements from ``start`` to ``stop``, counted from ``start``."""
    begins = [0, *(end for end, _ in ranges)]
    return [
        (min(end, stop) - start, expression)
        for begin, (end, expression) in zip(begins, ranges, strict=False)
        if begin < stop and end > start
    ]


def _differing(first: Ranges, second: Ranges) -> tuple[int, tuple[Expression, Expression]] | None:
    """Return the first element that is added in two orders, and these; addition commutes to the bit."""
    start = 0
    for stop in sorted({end for end, _ in (*first, *second)}):
        pair = _at(first, start), _at(second, start)
        if normal_form(pair[0]) != normal_form(pair[1]):
            return start, pair
        start = stop
    return None


def _at(ranges: Ranges, element: int) -> Expression:
    return next(expression for end, expression in ranges if element < end)
