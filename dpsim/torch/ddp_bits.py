"""Whether two settings of DDP over gloo give gradients of the same bits: the order in which each element is added.

The place of an element in its bucket decides the order (``gloo_order``), and the bucket cap decides the buckets. It
holds for tensors on processors with PyTorch 2.13, where every step reduces gradients once and all ranks compute alike.

DDP multiplies a gradient by 1/n as it copies it into its bucket. Only where gradients are views of buckets, and kept
(``gradient_as_bucket_view``, ``zero_grad(set_to_none=False)``), it divides by n from step 2 on. That gives other bits
where n is no power of two, so both settings must have it or neither.

Source: PyTorch ``reducer.cpp`` (mark_variable_ready_dense, autograd_hook, rebuild_buckets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.kernels.allreduce.expression import Expression, normal_form, part
from dpsim.lowering.ddp import Buckets, DdpOptions, DdpParameter, final_buckets, initial_buckets
from dpsim.torch.gloo_order import Ranges, gloo_expressions

LAST_REBUILD = 3
"""From this step on no bucket changes."""


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
    gradients: Sequence[ReducedGradient],
    ready_order: Sequence[int],
    ranks: int,
    options: tuple[DdpOptions, DdpOptions],
    wire_bytes: int | None = None,
) -> OrderDifference | None:
    """Return where the orders of two settings first differ; ``None``: all gradients have the same bits in every step.

    ``gradients`` are in the order of ``named_parameters()``, ``ready_order`` has their positions as backward makes them
    final, without those that it does not reach. Two orders round to two values in most tensors, and not in each
    element. Raises ``ConfigError``.
    """
    for step in range(1, LAST_REBUILD + 1):
        buckets = [step_buckets(gradients, ready_order, each, step) for each in options]
        orders = zip(*(gradient_expressions(gradients, each, ranks, wire_bytes) for each in buckets), strict=True)
        for index, (first, second) in enumerate(orders):
            difference = _differing(first, second) if index in ready_order else None
            if difference is not None:
                element, expressions = difference
                return OrderDifference(step=step, name=gradients[index].name, element=element, expressions=expressions)
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


def gradient_expressions(
    gradients: Sequence[ReducedGradient], buckets: Buckets, ranks: int, wire_bytes: int | None = None
) -> list[Ranges]:
    """Return for each gradient the orders in which gloo adds its elements; none for sparse ones, which it gathers.

    ``wire_bytes`` are those of an element where a hook compresses, 2 under ``fp16_compress_hook``.
    """
    expressions: list[Ranges] = [[] for _ in gradients]
    for bucket in buckets:
        members = [gradients[index] for index in bucket]
        if members[0].parameter.sparse:
            continue
        elements = sum(member.elements for member in members)
        size_bytes = sum(member.parameter.size_bytes for member in members)
        of_bucket = gloo_expressions(elements, ranks, wire_bytes or size_bytes // max(elements, 1))
        start = 0
        for index in bucket:
            stop = start + gradients[index].elements
            expressions[index] = part(of_bucket, start, stop)
            start = stop
    return expressions


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
