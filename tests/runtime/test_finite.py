"""Whether the gradients of a step may be used: how often ranks agree on it, which is what their Schedule prices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpsim.runtime import finite


@pytest.mark.parametrize(
    ("world", "sums", "asked"),
    [("world", 0, ["world"]), ("world", 3, ["group", "world"]), (None, 0, ["group"]), (None, 3, ["group"])],
)
def test_ranks_of_a_sharded_hybrid_agree_once_where_the_update_need_know_no_whole_tensor(
    world: Any, sums: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transports: list[str] = []

    def sum_over(transport: Any) -> Any:
        return lambda parts: transports.append(transport) or parts[0]

    monkeypatch.setattr(finite, "_sum_over", sum_over)
    part = SimpleNamespace(name="w", gradients=0, elements=2)
    arena: Any = SimpleNamespace(kept_gradients=np.ones(2, np.float32), tensor_parts=lambda: [part], sharded=True)
    arena.of_first_replica = True
    group: Any = "group"
    check = finite.PartialGradients(arena, "w", group, world)
    assert check(1.0, np.ones(sums)) and transports == asked
    assert not check(float("nan"), np.ones(sums))
