"""The bucket lists of PyTorch's DDP, on small lists whose buckets can be told by hand, and against the fusion rule.

``tests/torch_script/test_bucket_lists.py`` compares them with DDP itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.lowering.ddp import Buckets, DdpOptions, DdpParameter, final_buckets, initial_buckets
from dpsim.lowering.fusion import fuse

MIB = 2**20


def parameters(*sizes: int, **options: str) -> list[DdpParameter]:
    return [DdpParameter(size_bytes=size, **options) for size in sizes]  # type: ignore[arg-type]


def final(given: list[DdpParameter], **options: object) -> Buckets:
    return final_buckets(given, range(len(given))[::-1], DdpOptions(**options))  # type: ignore[arg-type]


def test_by_default_the_first_bucket_closes_at_1_mib_and_the_others_at_25() -> None:
    model = parameters(30 * MIB, 10 * MIB, 20 * MIB, MIB // 2, MIB // 2)
    assert final(model) == ((4, 3), (2, 1), (0,))


@pytest.mark.parametrize(
    ("version", "expected"), [((2, 13), ((3, 2, 1), (0,))), ((2, 0), ((3,), (2, 1, 0)))], ids=["new", "old"]
)
def test_a_cap_that_is_set_holds_for_the_first_bucket_in_new_versions(
    version: tuple[int, int], expected: Buckets
) -> None:
    model = parameters(3 * MIB, 2 * MIB, 2 * MIB, MIB)
    assert final(model, bucket_cap_bytes=5.0 * MIB, torch_version=version) == expected


def test_a_list_of_caps_holds_for_both_lists() -> None:
    model, options = parameters(8, 8, 8, 8, 8), DdpOptions(bucket_caps_bytes=(8.0, 16.0))
    assert initial_buckets(model, options) == ((3, 4), (1, 2), (0,))
    assert final(model, bucket_caps_bytes=(8.0, 16.0)) == ((4,), (3, 2), (1, 0))


def test_the_first_step_has_one_bucket_for_each_dtype_and_device() -> None:
    model = [*parameters(9 * MIB, 9 * MIB), DdpParameter(size_bytes=8, dtype="float16"), *parameters(50 * MIB)]
    assert initial_buckets(model, DdpOptions()) == ((2,), (0, 1, 3))
    assert initial_buckets(model, DdpOptions(static_graph=True, find_unused_parameters=True)) == ((2,), (0, 1, 3))
    far = [*parameters(8), DdpParameter(size_bytes=8, device="cuda:1")]
    assert initial_buckets(far, DdpOptions()) == ((1,), (0,))


def test_find_unused_parameters_fills_buckets_from_the_first_layer_on_and_never_rebuilds() -> None:
    model = parameters(MIB, 20 * MIB, 6 * MIB, 3 * MIB)
    options = DdpOptions(find_unused_parameters=True)
    assert initial_buckets(model, options) == ((3,), (1, 2), (0,))
    assert final_buckets(model, [3, 1], options) == initial_buckets(model, options)


def test_each_dtype_has_a_small_first_bucket_and_rests_follow_the_latest_dtype_first() -> None:
    half = DdpParameter(size_bytes=MIB, dtype="float16")
    rest = DdpParameter(size_bytes=8, dtype="float16")
    model = [*parameters(8), rest, *parameters(MIB), half]
    assert final(model) == ((3,), (2,), (0,), (1,))
    assert final([*parameters(8), rest]) == ((0,), (1,))


def test_a_sparse_gradient_is_a_bucket_of_its_own() -> None:
    model = [*parameters(8), DdpParameter(size_bytes=8, sparse=True), *parameters(8)]
    assert final(model) == ((1,), (2, 0))
    assert initial_buckets(model, DdpOptions()) == ((1,), (0, 2))


def test_parameters_without_a_gradient_come_last_in_a_static_graph_and_are_refused_otherwise() -> None:
    model = parameters(8, 8, 8)
    assert final_buckets(model, [2, 0], DdpOptions(static_graph=True)) == ((2, 0, 1),)
    with pytest.raises(ConfigError, match="get no gradient"):
        final_buckets(model, [2, 0], DdpOptions())
    with pytest.raises(ConfigError, match="at most once"):
        final_buckets(model, [2, 2, 0], DdpOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"torch_version": (1, 13)}, "PyTorch 1.13"), ({"bucket_cap_bytes": -1.0}, "bucket cap is -1.0")],
)
def test_what_ddp_does_not_have_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DdpOptions(**options)  # type: ignore[arg-type]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 12 * MIB), min_size=1, max_size=30), st.one_of(st.none(), st.integers(0, 30 * MIB)))
def test_the_fusion_rule_ddp_is_the_final_list_of_one_dtype(sizes: list[int], cap: int | None) -> None:
    order = range(len(sizes))
    buckets = final_buckets(parameters(*sizes), order, DdpOptions(bucket_cap_bytes=cap))
    start = fuse(np.array(sizes, np.int64), "ddp", cap)
    assert buckets == tuple(tuple(order[a:b]) for a, b in pairwise(start.tolist()))


class Counted(list[DdpParameter]):
    """Parameters, and how often one of them was asked for."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        return super().__getitem__(index)


def test_a_large_bucket_is_not_added_up_again_for_each_of_its_parameters() -> None:
    model = Counted(parameters(*[1] * 1000))
    assert [len(bucket) for bucket in final_buckets(model, range(1000), DdpOptions())] == [1000]
    assert model.asked <= 3 * len(model)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3 * MIB), st.sampled_from(["float32", "float16"])), min_size=1, max_size=30))
def test_the_rule_finds_the_buckets_again_in_the_order_in_which_ddp_sends_them(tensors: list[tuple[int, str]]) -> None:
    """So a workload whose gradients stand in that order gets DDP's own buckets, for mixed dtypes too."""
    model = [DdpParameter(size_bytes=size, dtype=dtype) for size, dtype in tensors]
    buckets = final_buckets(model, range(len(model)), DdpOptions())
    sent = [index for bucket in buckets for index in bucket]
    codes = np.array([model[index].dtype == "float16" for index in sent], np.int64)
    start = fuse(np.array([model[index].size_bytes for index in sent], np.int64), "ddp", dtype_code=codes)
    assert buckets == tuple(tuple(sent[a:b]) for a, b in pairwise(start.tolist()))
