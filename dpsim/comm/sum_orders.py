"""The order in which a collective of this room adds each element of an array, known before anything runs."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import by_messages
from dpsim.comm.message_steps import step_list, unit_bounds
from dpsim.comm.mpi_order import native_order
from dpsim.kernels.allreduce.algorithms import node_by_node
from dpsim.kernels.allreduce.expression import normal_form
from dpsim.kernels.allreduce.orders import Order, unit_orders


class Summation(NamedTuple):
    """How arrays are added over ``ranks``, one partial sum a rank: the arguments of ``dpsim.comm.allreduce.prepare``.

    ``shares_memory``: all ranks are on one machine, whose kernels add what is ``place`` shared memory. ``compressed``:
    numbers travel as 16 bits. The gradients of several ``replicas`` are added in each, and then over them.
    """

    algorithm: str
    ranks: int
    devices_a_node: int = 1
    kind: CollectiveKind = "allreduce"
    replicas: int = 1
    compressed: bool = False
    shares_memory: bool = True


def element_orders(how: Summation, elements: int) -> list[tuple[int, Order]] | None:
    """Return the ends of ranges of elements, and the order of each; None where nobody knows it beforehand.

    That is so of a user's own algorithm, of a library on GPUs, of an MPI library whose order was not seen, and of
    ``auto`` by messages, which is chosen by measurement.
    """
    orders, bounds = _orders_and_bounds(how, elements)
    if orders is None:
        return None
    if not how.compressed or (how.algorithm == "hierarchical" and how.ranks <= how.devices_a_node):
        orders = [Order(order.expression, ()) for order in orders]  # nothing is rounded to 16 bits
    ranges: list[tuple[int, Order]] = []
    for order, (start, stop) in zip(orders, itertools.pairwise(bounds), strict=True):
        if ranges and ranges[-1][1] == order:
            ranges[-1] = (stop, order)
        elif start < stop:
            ranges.append((stop, order))
    return ranges


def _orders_and_bounds(how: Summation, elements: int) -> tuple[list[Order] | None, list[int]]:
    """Return the order of each unit of the array, and the elements between which the units lie."""
    whole = [0, elements]
    if how.ranks == 1:
        return [Order(0, ())], whole
    if how.ranks == 2 and not how.compressed:
        return [Order((0, 1), ())], whole  # a sum of two has one order
    algorithm, divided = how.algorithm, how.kind != "allreduce" or how.replicas > 1
    in_memory = how.shares_memory and ALGORITHMS.find(algorithm).place == "shared memory"
    if in_memory and not divided:  # every version of the kernels adds along this tree
        tree = normal_form(node_by_node(how.ranks, how.ranks).tree)
        return [Order(tree, tuple(range(how.ranks)))], whole
    if algorithm == "auto" and not (in_memory or divided or how.compressed):
        return None, whole
    if not (in_memory or divided):
        algorithm = by_messages(algorithm, compressed=how.compressed)
    if algorithm == "mpi":
        order = native_order(how.ranks)
        return (None if order is None else [order]), whole
    if ALGORITHMS.find(algorithm).steps is not None or ALGORITHMS.find(algorithm).place == "elsewhere":
        return None, whole
    orders = _steps_orders(how.kind, algorithm, how.ranks, how.devices_a_node, how.replicas)
    return orders, unit_bounds(how.kind, algorithm, how.replicas, elements, len(orders))


@functools.lru_cache(maxsize=256)
def _steps_orders(kind: CollectiveKind, algorithm: str, ranks: int, devices_a_node: int, replicas: int) -> list[Order]:
    """Return the order of each unit of an algorithm's steps; with replicas of what each has, then over them."""
    kinds: list[CollectiveKind] = [kind, "allreduce"] if replicas > 1 and kind != "allreduce" else [kind]
    return unit_orders([step_list(each, algorithm, None, ranks, devices_a_node, replicas) for each in kinds])


def unseen_library(algorithm: str, ranks: int) -> bool:
    """Return whether an algorithm is the MPI library's own, of which nobody has seen in which order it adds."""
    return algorithm == "mpi" and ranks > 2 and native_order(ranks) is None
