"""DDP's reductions: gloo's sums, and means over dpsim's own transports, one after another and at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
pytestmark = pytest.mark.torch

WAYS = {
    "gloo": {"overlap": "gloo"},
    "node": {"overlap": "inline", "network": "node", "algorithm": "mpi"},
    "link": {"overlap": "thread", "network": "paced:100us,1gbit", "algorithm": "ring"},
}


DEVICES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def actual(together: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the ranks hold after reductions on each number of devices."""
    argument = {"ways": WAYS, "folder": str(tmp_path_factory.mktemp("stores"))}
    return together(*(("ranks_torch:reduced", argument, devices) for devices in DEVICES))


@pytest.mark.parametrize("devices", DEVICES)
def test_every_rank_ends_with_the_same_sum_or_mean(devices: int, actual: list[Any]) -> None:
    ranks = actual[devices - 1]
    for way in WAYS:
        for turn in range(2):
            total = sum(range(1 + turn, devices + 1 + turn))
            expected = total if way == "gloo" else total / devices
            for rank in ranks:
                values = [value for of_tensor in rank[way]["values"][turn] for value in of_tensor]
                assert values == pytest.approx([expected] * len(values)), way
        for rank in ranks:
            spans = rank[way]["spans"]
            assert len(spans) == 4 and all(start_s <= end_s for start_s, end_s in spans)
            assert all(after[0] >= before[1] for before, after in itertools.pairwise(spans)), "one after another"


def test_a_gradient_that_cannot_be_reduced_over_mpi_is_refused() -> None:
    import torch

    from dpsim.errors import ConfigError
    from dpsim.torch.script.reductions import _array

    assert _array(torch.ones(2, 3)).shape == (6,)
    with pytest.raises(ConfigError, match="gradients of bfloat16 on cpu") as refused:
        _array(torch.ones(2, dtype=torch.bfloat16))
    assert "--algorithm gloo" in refused.value.remedy
