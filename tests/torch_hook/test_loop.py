"""A module that dpsim's runtime trains in a loop of one's own goes where PyTorch's optimizer takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
pytestmark = pytest.mark.torch

OnRanks = Callable[..., Any]


@pytest.mark.parametrize(("devices", "plan"), [(1, {}), (2, {}), (2, {"leaves": 4})])
def test_a_loop_trains_as_pytorch_on_the_batches_of_all_ranks(
    devices: int, plan: dict[str, Any], on_ranks: OnRanks
) -> None:
    difference = on_ranks("ranks_torch_loop:trained", plan, devices=devices)
    assert difference["parameters"] < 2e-5 and difference["losses"] < 1e-4
