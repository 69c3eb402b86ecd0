"""Every fusion rule against its published statement, on fixed and on random tensors."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim import workload as workloads
from dpsim.errors import ConfigError
from dpsim.experiments.bench_predict import resnet50
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering import fusion
from dpsim.lowering.ddp import DDP_FIRST_BUCKET_BYTES
from dpsim.lowering.fusion import fuse
from dpsim.lowering.horovod import HorovodCycle
from dpsim.nn import build_model
from dpsim.units import format_size
from dpsim.validation.published import FOLDER

MIB = 2**20
STATIC = [name for name, rule in FUSION_RULES.items() if not (rule.needs_costs or rule.while_running)]
QUICK = settings(max_examples=150)
SIZES = st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=40)
THRESHOLDS = st.one_of(st.sampled_from([0.0, 1.0, 4096.0, float(MIB), math.inf]), st.integers(0, 4 * MIB).map(float))


def buckets_of(sizes: list[int], rule: str, threshold: float | None = None, **options: object) -> list[list[int]]:
    start = fuse(np.array(sizes, np.int64), rule, threshold, **options)  # type: ignore[arg-type]
    return [sizes[a:b] for a, b in pairwise(start)]


@QUICK
@given(SIZES, THRESHOLDS, st.sampled_from(STATIC), st.integers(0, 2**32 - 1))
def test_every_tensor_is_in_exactly_one_bucket_of_one_dtype(
    sizes: list[int], threshold: float, rule: str, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 2, len(sizes))
    start = fuse(np.array(sizes, np.int64), rule, threshold, dtype_code=codes)
    assert start[0] == 0 and start[-1] == len(sizes) and np.all(np.diff(start) > 0)
    assert all(len(set(codes[a:b])) == 1 for a, b in pairwise(start))


@QUICK
@given(SIZES, THRESHOLDS)
def test_tarantella_closes_a_bucket_as_soon_as_it_holds_the_threshold(sizes: list[int], threshold: float) -> None:
    buckets = buckets_of(sizes, "tarantella", threshold)
    assert all(sum(bucket) >= threshold for bucket in buckets[:-1])
    assert all(sum(bucket[:-1]) < threshold or len(bucket) == 1 for bucket in buckets)


@QUICK
@given(SIZES, st.one_of(st.none(), THRESHOLDS))
def test_ddp_is_its_reference_implementation(sizes: list[int], threshold: float | None) -> None:
    """A threshold that is set holds for the first bucket too; by default, the first one closes at 1 MiB."""
    limits = [DDP_FIRST_BUCKET_BYTES, 25.0 * MIB] if threshold is None else [threshold]
    assert buckets_of(sizes, "ddp", threshold) == assigned_by_size(sizes, limits)


def assigned_by_size(sizes: list[int], limits: list[float]) -> list[list[int]]:
    """PyTorch's compute_bucket_assignment_by_size of one dtype: the last limit holds for all buckets that follow."""
    buckets, bucket = [], list[int]()
    for size in sizes:
        bucket.append(size)
        if sum(bucket) >= limits[0]:
            buckets.append(bucket)
            bucket, limits = [], limits[1:] or limits
    return buckets + ([bucket] if bucket else [])


@QUICK
@given(SIZES, st.one_of(st.none(), THRESHOLDS))
def test_earlier_versions_of_ddp_have_a_first_bucket_of_1_mib_at_any_cap(
    sizes: list[int], threshold: float | None
) -> None:
    """Up to PyTorch 1.5 the list is made in the order of the parameters, and sent from its end."""
    limits = [DDP_FIRST_BUCKET_BYTES, 25.0 * MIB if threshold is None else threshold]
    assert buckets_of(sizes, "ddp-2.3", threshold) == assigned_by_size(sizes, limits)
    forward = [bucket[::-1] for bucket in assigned_by_size(sizes[::-1], limits)]
    assert buckets_of(sizes, "ddp-1.5", threshold) == forward[::-1]
    if threshold is None:
        assert buckets_of(sizes, "ddp") == buckets_of(sizes, "ddp-2.3")


@QUICK
@given(SIZES, THRESHOLDS)
def test_a_capped_bucket_is_never_overfilled_and_takes_what_fits(sizes: list[int], threshold: float) -> None:
    """That the next tensor would overfill each bucket, whichever end they are filled from, makes the buckets unique."""
    for rule, order in (("capped", 1), ("capped-forward", -1)):
        buckets = [bucket[::order] for bucket in buckets_of(sizes, rule, threshold)][::order]
        assert all(sum(bucket) <= threshold or len(bucket) == 1 for bucket in buckets)
        for bucket, following in pairwise(buckets):
            assert threshold == 0 or sum(bucket) + following[0] > threshold
    assert buckets_of(sizes, "capped") == buckets_of(sizes, "capped", 25.0 * MIB)


def test_the_documentation_has_every_rule_with_its_default_threshold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^ *\| (`[^|]+) \|[^|]+\| ([^|]+) \|$", text, re.MULTILINE)
    told = {name: threshold for names, threshold in rows for name in re.findall(r"`([^`]+)`", names)}
    default = {name: rule.default_threshold_bytes for name, rule in FUSION_RULES.items()}
    assert told == {name: "none" if size is None else format_size(size) for name, size in default.items()}


def test_capped_buckets_are_told_by_hand() -> None:
    sizes = [3, 9, 4, 5, 1, 6]  # in the order in which backward makes them final: the first layer's is the last
    assert buckets_of(sizes, "capped", 10.0) == [[3], [9], [4, 5, 1], [6]]
    assert buckets_of(sizes, "capped-forward", 10.0) == [[3], [9], [4, 5], [1, 6]]
    assert buckets_of(sizes, "capped", 8.0) == [[3], [9], [4], [5, 1], [6]]
    assert fuse(np.array(sizes, np.int64), "capped-forward", 10.0).flags["C_CONTIGUOUS"]


def test_capped_buckets_are_as_many_as_a_published_training_counted() -> None:
    """GPT-2 XL in buckets of 1, 10, 100 and 1000 MiB (damek/cs336-assignment2-systems @ 749e968)."""
    tensors = workloads.read(FOLDER / "workloads" / "gpt2_xl.toml").ready_order
    counts = [len(fuse(tensors.size_bytes, "capped", mib * MIB)) - 1 for mib in (1, 10, 100, 1000)]
    assert counts == [435, 339, 98, 8]


def test_the_extremes_of_the_threshold() -> None:
    sizes = [10, 0, 2 * MIB, 5, 7]
    for rule in ("tarantella", "ddp", "capped", "capped-forward"):
        assert buckets_of(sizes, rule, 0.0) == [[size] for size in sizes]
        assert buckets_of(sizes, rule, math.inf) == [sizes]
        assert buckets_of([], rule, 1.0) == []
    assert buckets_of(sizes, "ddp") == [[10, 0, 2 * MIB], [5, 7]]
    assert buckets_of(sizes, "one") == [sizes]
    assert buckets_of(sizes, "per-tensor") == [[size] for size in sizes]
    assert buckets_of([], "one") == []


def test_ddp_buckets_of_resnet50() -> None:
    """The dense layer alone overshoots the first bucket's 1 MiB, then each bucket overshoots 25 MiB."""
    sizes = resnet50().ready_order.size_bytes
    assert len(sizes) == 161 and sizes.sum() == 4 * 25_557_032
    start = fuse(sizes, "ddp")
    buckets = np.add.reduceat(sizes, start[:-1])
    assert buckets[0] == 4 * (1000 + 1000 * 2048)
    assert len(buckets) == 5
    assert np.all(buckets[1:-1] >= 25 * MIB)
    assert np.all(buckets[1:-1] - sizes[start[2:-1] - 1] < 25 * MIB)


def fuse_responses(sizes: list[int], codes: list[int], threshold: float) -> list[tuple[int, ...]]:
    """The allreduces of ``FuseResponses`` in Horovod's ``controller.cc`` (v0.28), restated line by line for CUDA."""
    responses = deque(range(len(sizes)))
    size = [16 * ((each + 15) // 16) for each in sizes]
    response_list = []
    while responses:
        response = [responses.popleft()]
        tensor_size = size[response[0]]
        skipped_responses: deque[int] = deque()
        skipped_size = 0
        while responses:
            new_response = responses[0]
            new_tensor_size = size[new_response]
            if codes[response[0]] == codes[new_response] and tensor_size + new_tensor_size <= threshold:
                tensor_size += new_tensor_size
                response.append(responses.popleft())
            else:
                skipped_size += new_tensor_size
                if tensor_size + skipped_size <= threshold:
                    skipped_responses.append(responses.popleft())
                else:
                    break
        while skipped_responses:
            responses.appendleft(skipped_responses.pop())
        response_list.append(tuple(response))
    return response_list


def test_horovod_packs_in_ready_order_and_looks_ahead_within_the_threshold() -> None:
    cycle = HorovodCycle(threshold_bytes=64.0, cycle_s=1e-3)
    # padded sizes: 32, 48, 16, 112, 16
    assert cycle.pack([30, 40, 8, 100, 16]) == ((0,), (1, 2), (3,), (4,))
    assert cycle.pack([30, 30, 4]) == ((0, 1), (2,))  # 32 + 32 + 16 padded, 64 as they are
    assert cycle.pack([16, 16, 16], [0, 1, 0]) == ((0, 2), (1,))
    assert cycle.pack([16, 32, 32, 16], [0, 1, 1, 0]) == ((0,), (1, 2), (3,))  # 16 + 32 + 32 are beyond 64
    assert cycle.pack([]) == ()
    assert HorovodCycle(threshold_bytes=0.0, cycle_s=1e-3).pack([0, 0, 5]) == ((0,), (1,), (2,))
    assert HorovodCycle(threshold_bytes=math.inf, cycle_s=1e-3).pack([1, 2, 3]) == ((0, 1, 2),)


@QUICK
@given(SIZES, THRESHOLDS, st.integers(0, 2**32 - 1))
def test_horovod_buckets_are_those_of_its_own_code(sizes: list[int], threshold: float, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2, len(sizes)).tolist()
    buckets = HorovodCycle(threshold_bytes=threshold, cycle_s=1e-3).pack(sizes, codes)
    if threshold:
        assert list(buckets) == fuse_responses(sizes, codes, threshold)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ([0, 3, 2], "begins with 0 and ends with 2"),
        ([1, 4], "begins with 1 and ends with 4"),
        ([0, 3, 2, 4], "bucket 1 would begin at tensor 3 and end before tensor 2"),
        ([0, 0, 4], "bucket 0 would begin at tensor 0 and end before tensor 0"),
        ([0.0, 4.0], "no array of whole numbers"),
        (4, "no array of whole numbers"),
        ([0, 1, 4], "bucket 1 would mix data types"),
    ],
)
def test_a_wrong_rule_of_a_program_is_refused_by_name(
    returned: object, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = replace(FUSION_RULES["one"], name="mine", buckets=lambda tensors, threshold_bytes: returned)
    monkeypatch.setitem(FUSION_RULES._items, "mine", rule)
    with pytest.raises(ConfigError, match=rf"fusion rule 'mine' returned .* for 4 gradient tensors: .*{fault}"):
        fuse(np.array([4, 4, 4, 4], np.int64), "mine", dtype_code=np.array([0, 0, 1, 1], np.int64))


def test_horovod_makes_18_buckets_of_resnet20_at_64_kib() -> None:
    layers = build_model("resnet20", (32, 32, 3), 10).layers
    sizes = [tensor.size_bytes for layer in reversed(layers) for tensor in reversed(layer.tensors)]
    assert len(HorovodCycle(threshold_bytes=64 * 1024, cycle_s=1e-3).pack(sizes)) == 18


def merge_as_published(sizes: list[float], ready: list[float], alpha: float, beta: float) -> list[int]:
    """The O(L^2) loop of MG-WFBP's optimizer, restated: layers 0..L-1 forward, tau computed anew after each merge."""
    p, r, count = sizes[::-1], ready[::-1], len(sizes)
    tc = [alpha + beta * size for size in p]

    def begins() -> list[float]:
        tau = [0.0] * count
        tau[count - 1] = r[count - 1]
        for layer in range(count - 2, -1, -1):
            tau[layer] = max(tau[layer + 1] + tc[layer + 1], r[layer])
        return tau

    tau, starts = begins(), [0]
    for layer in range(count - 1, 0, -1):
        before = r[layer - 1]
        if before < tau[layer] + tc[layer] and (tau[layer] > before or before - tau[layer] < alpha):
            p[layer - 1] += p[layer]
            tc[layer], tc[layer - 1] = 0.0, alpha + beta * p[layer - 1]
            tau = begins()
        else:
            starts.append(count - layer)
    return [*starts, count]


def end_of(sizes: list[int], ready: list[float], start: list[int], alpha: float, beta: float) -> float:
    end = 0.0
    for a, b in pairwise(start):
        end = max(end, ready[b - 1]) + alpha + beta * sum(sizes[a:b])
    return end


INSTANCES = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 200)), min_size=1, max_size=25)


@QUICK
@given(INSTANCES, st.integers(1, 256), st.sampled_from([0.0, 0.015625, 0.125]))
def test_mg_wfbp_merges_exactly_as_published(instance: list[tuple[int, int]], alpha: int, beta: float) -> None:
    """Whole numbers of seconds and powers of two keep every sum exact, so that ties fall alike."""
    sizes = [size for size, _ in instance]
    ready = np.cumsum([wait for _, wait in instance]).astype(float)
    start = fuse(np.array(sizes, np.int64), "mg-wfbp", 0.0, ready_s=ready, alpha_s=float(alpha), beta_s_per_byte=beta)
    assert start.tolist() == merge_as_published([float(s) for s in sizes], ready.tolist(), float(alpha), beta)


@QUICK
@given(INSTANCES, st.integers(1, 256), st.sampled_from([0.0, 0.015625, 0.125]))
def test_mg_wfbp_is_never_slower_than_one_bucket_a_tensor_in_its_own_model(
    instance: list[tuple[int, int]], alpha: int, beta: float
) -> None:
    sizes = [size for size, _ in instance]
    ready = np.cumsum([wait for _, wait in instance]).astype(float).tolist()
    start = fuse(
        np.array(sizes, np.int64),
        "mg-wfbp",
        0.0,
        ready_s=np.array(ready),
        alpha_s=float(alpha),
        beta_s_per_byte=beta,
    ).tolist()
    merged = end_of(sizes, ready, start, alpha, beta)
    count = len(sizes)
    assert merged <= end_of(sizes, ready, list(range(count + 1)), alpha, beta) + 1e-9
    assert merged <= end_of(sizes, ready, [0, count], alpha, beta) + 1e-9


def test_mistakes_say_what_is_allowed() -> None:
    sizes = np.array([4, 8], np.int64)
    with pytest.raises(ConfigError, match="did you mean 'tarantella'"):
        fuse(sizes, "tarantela", 0.0)
    with pytest.raises(ConfigError, match="HorovodCycle"):
        fuse(sizes, "horovod", 0.0)
    with pytest.raises(ConfigError, match="ready_s"):
        fuse(sizes, "mg-wfbp", 0.0)
    with pytest.raises(ConfigError, match="threshold"):
        fuse(sizes, "ddp", math.nan)
    with pytest.raises(ConfigError, match="one for each tensor"):
        fuse(sizes, "mg-wfbp", 0.0, ready_s=np.zeros(3), alpha_s=1.0, beta_s_per_byte=0.0)
    with pytest.raises(ConfigError, match="cycle_s"):
        HorovodCycle(threshold_bytes=1.0, cycle_s=0.0)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1)), max_size=30), st.floats(0, 1e4))
def test_the_compiled_loops_and_the_plain_ones_fuse_alike(tensors: list[tuple[int, int]], threshold: float) -> None:
    sizes = np.array([size for size, _ in tensors], np.int64)
    codes = np.array([code for _, code in tensors], np.int64)
    ready = np.arange(len(tensors)) * 1e-4
    calls = (
        (fusion._close_at, (sizes, np.array([threshold]), codes)),
        (fusion._close_before, (sizes, threshold, codes)),
        (
            fusion._merge_mg_wfbp,
            (sizes, ready, 1e-4, 1e-7, codes),
        ),
    )
    for loop, arguments in calls:
        assert np.array_equal(loop(*arguments), loop.py_func(*arguments))
