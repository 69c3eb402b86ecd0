"""The order in which the MPI library's own allreduce adds: its bits are those of the order, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpsim.comm import mpi_order
from dpsim.kernels.allreduce.expression import text

Together = Callable[..., list[Any]]
TASK = "ranks_mpi_order:native_sums"


def test_the_library_adds_in_its_order_from_4_bytes_to_16_megabytes(together: Together) -> None:
    assert together(*((TASK, {}, ranks) for ranks in (2, 3, 4))) == [[], [], []]


@pytest.mark.slow
def test_the_library_adds_in_its_order_on_more_ranks(together: Together) -> None:
    assert together(*((TASK, {}, ranks) for ranks in (5, 6, 7, 8))) == [[], [], [], []]


def test_five_ranks_are_folded_to_four() -> None:
    order = mpi_order.native_order(5)
    assert order is not None and text(order.expression) == "((0+1)+2)+(3+4)"


def test_nothing_is_claimed_of_another_library_or_of_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpi_order.native_order(9) is None
    mpi_order.native_order.cache_clear()
    monkeypatch.setattr(mpi_order, "installed_library", lambda: "openmpi 5.0")
    assert mpi_order.native_order(4) is None
    mpi_order.native_order.cache_clear()
