"""A module that dpsim's runtime trains in a loop of one's own goes where PyTorch's optimizer takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loop_trains_as_pytorch_on_the_batches_of_all_ranks(devices: int, together: Callable[..., list[Any]]) -> None:
    for difference in together(*(("ranks_torch_loop:trained", plan, devices) for plan in ({}, {"leaves": 4}))):
        assert difference["parameters"] < 2e-5 and difference["losses"] < 1e-4
