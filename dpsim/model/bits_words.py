"""Why two plans have the same bits, or other ones, in words: what decides them is in ``dpsim.model.bits``."""

from __future__ import annotations

from dpsim.kernels.allreduce.orders import Order
from dpsim.model.bits import Bits, Ranges, Work, order_text

_NORMALISED = {"local": "a device's samples", "global": "the whole batch", "leaf": "each leaf's samples"}


def why_same(here: Bits, there: Bits) -> str:
    """Say why the law gives two plans the same bits."""
    if here.work.leaves:
        leaves = here.work.leaves
        return f"{leaves} leaves are computed one by one and added along one tree, whatever the devices and buckets"
    if here.work.devices == 1:
        return "one rank computes the same, and nothing is added over ranks"
    computed = "every rank computes the same samples, and "
    if here.work.devices == 2:
        return computed + "0+1 is the one order of a sum of two"
    orders = {order for ranges in (here.orders or {}).values() for _, order in ranges}
    if len(orders) == 1:
        return f"{computed}every sum over ranks is {order_text(orders.pop())} in both"
    if here.orders is not None and here.scheme != there.scheme:
        return f"{computed}each element's sum over ranks has the same one of {len(orders)} orders in both"
    return f"{computed}the same buckets are added by the same algorithm"


def why_by_values(here: Bits, there: Bits, steps: int) -> str:
    """Say that the law does not give two plans the same bits, and that those of so many steps are."""
    return f"by values: in {steps} steps all sums round alike, though {why_different(here, there, '')}"


def why_different(here: Bits, there: Bits, tensor: str) -> str:
    """Say why two plans have other bits, which show first in ``tensor`` (empty, the loss, or batch norm's state)."""
    name = tensor.rpartition("/")[2]
    statistics = tensor.startswith("state/")
    work = _other_work(here.work, there.work, statistics=statistics)
    orders = "" if work and statistics else _other_order(here, there, name)
    return "; and ".join(part for part in (work, orders) if part)


def _other_work(here: Work, there: Work, *, statistics: bool) -> str:
    """Say what ranks compute otherwise alone; empty if they do not."""
    if (here.training, here.global_batch) != (there.training, there.global_batch):
        return "it is another training"
    if here.leaves != there.leaves:
        return f"it is trained in {_leaves(here)} here, and in {_leaves(there)} there"
    if here.batch_norm != there.batch_norm:
        return f"batch norm normalises {_NORMALISED[here.batch_norm]} here, and {_NORMALISED[there.batch_norm]} there"
    if here.divided != there.divided:
        return f"devices compute {_division(here)} here, and {_division(there)} there"
    if here == there:
        return ""
    sizes = f"{here.local_batch:.4g} samples at once here, and {there.local_batch:.4g} there"
    if here.local_batch == there.local_batch:
        return (
            f"a rank adds {_micro_batches(here)} of {here.local_batch:.4g} samples here, and "
            f"{_micro_batches(there)} there"
        )
    if statistics and here.batch_norm == "local":
        return f"batch norm normalises {sizes}"
    return f"a rank computes {sizes}: other shapes, and another sum over samples"


def _leaves(work: Work) -> str:
    return f"{work.leaves} leaves" if work.leaves else "none"


def _division(work: Work) -> str:
    return f"parts of the model ({work.divided})" if work.divided else "all layers"


def _micro_batches(work: Work) -> str:
    return "1 micro-batch" if work.accumulate == 1 else f"{work.accumulate} micro-batches"


def _other_order(here: Bits, there: Bits, tensor: str) -> str:
    """Say in which other order a tensor, or the first that has one, is added over the ranks; empty if none is."""
    if here.orders is None or there.orders is None:
        same = here.scheme == there.scheme and here.repeatable
        return "" if same else "the sum over ranks is by an algorithm or buckets whose order nobody knows beforehand"
    if here.work.leaves or there.work.leaves:
        return ""
    differing = [name for name in here.orders if here.orders[name] != there.orders.get(name)]
    if not differing:
        return ""
    name = tensor if tensor in differing else differing[0]
    whose = "its" if name == tensor else f"the {name} gradient's" if tensor in here.orders else f"{name}'s"
    start, pair = _first_other(here.orders[name], there.orders[name])
    of_element = f" (element {start})" if start else ""
    a, b = (_over_ranks(order) for order in pair)
    return f"{whose} sum over ranks{of_element} is {a} here, and {b} there"


def _over_ranks(order: Order) -> str:
    return "that of one rank" if order.expression == 0 else order_text(order)


def _first_other(here: Ranges, there: Ranges) -> tuple[int, tuple[Order, Order]]:
    """Return the first element that is added in another order, and its two orders."""
    start, left, right = 0, list(here), list(there)
    while left[0][1] == right[0][1]:
        start = min(left[0][0], right[0][0])
        for ranges in (left, right):
            if ranges[0][0] == start:
                ranges.pop(0)
    return start, (left[0][1], right[0][1])
