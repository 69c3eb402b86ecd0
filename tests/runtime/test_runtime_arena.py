"""Memory of a run: tensors are views of their bucket, buckets start at 64 bytes, padding belongs to no tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_cases import workloads

from dpsim.comm.transport import aligned_bytes
from dpsim.lowering import lower
from dpsim.plan import Plan
from dpsim.runtime.arena import Arena
from dpsim.workload import Workload


@settings(max_examples=60)
@given(
    workload=workloads(),
    rule=st.sampled_from(["per-tensor", "tarantella", "one"]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_every_tensor_is_a_view_of_its_bucket_and_of_the_arena(workload: Workload, rule: str, dtype: str) -> None:
    schedule = lower(workload, Plan(devices=2, global_batch=4, fusion_rule=rule))  # type: ignore[arg-type]
    arena = Arena(schedule, np.dtype(dtype), aligned_bytes)
    gradients, parameters = arena.views(arena.gradients), arena.views(arena.parameters)
    shapes = {tensor.name: tensor.shape for tensor in workload.tensors}
    assert {name: view.shape for name, view in gradients.items()} == shapes
    for flat in (arena.gradients, arena.parameters, *arena.optimizer_state.values()):
        assert flat.ctypes.data % 64 == 0 and flat.dtype == dtype and not flat.any()
        assert len(flat) == len(arena.gradients)
    for number in range(schedule.buckets):
        bucket = arena.buckets(number, number + 1)
        names = schedule.bucket_tensors(number)
        assert bucket.size == sum(gradients[name].size for name in names)
        assert bucket.size == 0 or bucket.ctypes.data % 64 == 0
        bucket[...] = 1 + np.arange(bucket.size) + 1000 * number
        together = np.concatenate([gradients[name].ravel() for name in names])
        np.testing.assert_array_equal(together, bucket)  # without gaps, in the order backward makes them final
        for name in names:
            if gradients[name].size:
                assert np.shares_memory(gradients[name], bucket) and np.shares_memory(gradients[name], arena.gradients)
                assert gradients[name].flags.c_contiguous
                offset = gradients[name].ctypes.data - arena.gradients.ctypes.data
                assert parameters[name].ctypes.data - arena.parameters.ctypes.data == offset
    filled = sum(view.size for view in gradients.values())
    assert np.count_nonzero(arena.gradients) == filled


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 1000])
def test_aligned_memory_is_zero_and_starts_at_64_bytes(size_bytes: int) -> None:
    memory = aligned_bytes(size_bytes)
    assert memory.nbytes == size_bytes and not memory.any()
    assert size_bytes == 0 or memory.ctypes.data % 64 == 0
