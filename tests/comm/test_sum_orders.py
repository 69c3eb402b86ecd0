"""The order in which every collective adds each element, against what it adds on ranks that are threads."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from dpsim.algorithms import RUNNABLE, algorithms_in
from dpsim.comm.allreduce import prepare
from dpsim.comm.compression import compression
from dpsim.comm.local import LocalComm, LocalRanks
from dpsim.comm.networks import transport
from dpsim.comm.sum_orders import Summation, element_orders
from dpsim.kernels.allreduce.expression import Expression
from dpsim.kernels.allreduce.orders import Order
from dpsim.kernels.allreduce.reference import rounded
from dpsim.kernels.allreduce.shards import shard_bounds
from dpsim.machine import Network

SIZES = (1, 5, 17, 64, 203, 1000)
SIXTEEN = ("direct", "auto", "one-shot", "two-shot", "hierarchical")


def expected(how: Summation, drawn: Any, wire: tuple[str, float] | None) -> Any:
    """The sum of the arrays [rank, element] along the orders, element range by range."""
    orders = element_orders(how, drawn.shape[1])
    assert orders is not None
    parts, first = [], 0
    for stop, order in orders:
        parts.append(added(order.expression, order, drawn[:, first:stop], wire))
        first = stop
    total = np.concatenate(parts)
    return rounded(total, *wire) if wire and orders[0][1].addends else total


def added(expression: Expression, order: Order, drawn: Any, wire: tuple[str, float] | None) -> Any:
    if isinstance(expression, int):
        total = drawn[expression]
    else:
        left, right = (added(operand, order, drawn, wire) for operand in expression)
        total = left + right
    return rounded(total, *wire) if wire and expression in order.addends else total


def run(how: Summation, wire_dtype: str | None = None) -> list[tuple[int, bool]]:
    """The sizes, and whether every rank has the bits of the orders."""
    wire = compression(wire_dtype, np.dtype("float32"), 64)

    def task(comm: LocalComm) -> Generator[tuple[int, bool]]:
        link = transport(comm, Network(), how.devices_a_node)
        for size in SIZES:
            drawn = np.random.default_rng(size).standard_normal((how.ranks, size)).astype(np.float32)
            data = link.allocate(4 * size).view(np.float32)
            data[...] = drawn[comm.rank]
            comm.Barrier()
            for kind in (how.kind, "allreduce") if how.replicas > 1 else (how.kind,):
                prepare(link, data, how.algorithm, wire, kind=kind, replicas=how.replicas).run()  # type: ignore[arg-type]
            comm.Barrier()
            sum_of_all = expected(how, drawn, (wire.dtype, wire.scale) if wire else None)
            each = how.ranks // how.replicas
            bounds = shard_bounds(size, each) if how.kind != "allreduce" else [0, size] * each
            position = comm.rank % each if how.kind != "allreduce" else 0
            own = slice(bounds[position], bounds[position + 1])
            same = data[own].tobytes() == sum_of_all[own].tobytes()
            yield size, all(comm.allgather(same))

    ranks = LocalRanks(how.ranks, task)
    results = [ranks.advance() for _ in SIZES]
    ranks.close()
    return results


EVERY_SIZE = [(size, True) for size in SIZES]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", sorted({*algorithms_in(*RUNNABLE)} - {"hierarchical"}))
def test_allreduces(algorithm: str, ranks: int) -> None:
    assert run(Summation(algorithm, ranks)) == EVERY_SIZE


@pytest.mark.parametrize(("ranks", "of_a_node"), [(4, 2), (6, 3), (6, 2), (8, 4), (4, 4), (4, 1)])
def test_hierarchical_allreduces(ranks: int, of_a_node: int) -> None:
    assert run(Summation("hierarchical", ranks, of_a_node)) == EVERY_SIZE


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", SIXTEEN)
def test_sums_in_16_bits(algorithm: str, wire_dtype: str) -> None:
    for ranks, of_a_node in ((2, 1), (3, 1), (4, 2), (4, 4), (6, 3)):
        if algorithm != "hierarchical" or of_a_node > 1:
            assert run(Summation(algorithm, ranks, of_a_node, compressed=True), wire_dtype) == EVERY_SIZE


@pytest.mark.parametrize("algorithm", ["ring", "direct", "auto"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3)])
def test_reduce_scatters(algorithm: str, ranks: int, replicas: int) -> None:
    assert run(Summation(algorithm, ranks, kind="reduce-scatter", replicas=replicas)) == EVERY_SIZE


def test_orders_cover_every_element_once() -> None:
    ranges = element_orders(Summation("ring", 4), 1001)
    assert ranges is not None
    ends = [end for end, _ in ranges]
    assert ends == sorted(set(ends)) and ends[-1] == 1001 and len({order for _, order in ranges}) == 4
    assert element_orders(Summation("ring", 3), 1) == [(1, Order(((0, 1), 2), ()))]
    assert math.isclose(ends[0], 251)


def test_nobody_knows_beforehand_in_which_order_auto_adds_by_messages() -> None:
    between = [Summation("auto", ranks, shares_memory=False) for ranks in (2, 3)]
    assert [element_orders(how, 5) for how in between] == [[(5, Order((0, 1), ()))], None]
    assert element_orders(between[1]._replace(compressed=True), 5) is not None  # by the direct exchange
