"""Batch norm's modes against plain definitions: statistics of each leaf, and of all ranks' samples together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import Mailbox

from dpsim.comm.ordered_sum import ordered_sum
from dpsim.kernels.allreduce.tree import slots
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.layer import tree_sum
from dpsim.replica import Array

SHAPE = (3, 2, 5)
Found = dict[str, Array]


def layer(mode: str) -> BatchNorm:
    """A layer with parameters that are not the initial ones, and its gradients bound."""
    norm = BatchNorm("bn", CpuOps(), SHAPE, np.float64)
    random = np.random.default_rng(1)
    parameters = {tensor.name: random.normal(size=tensor.shape) for tensor in norm.tensors}
    norm.bind(parameters, {name: np.full_like(value, np.nan) for name, value in parameters.items()})
    norm.mode = mode
    return norm


def passed(norm: BatchNorm, x: Array, grad: Array, leaves: tuple[int, ...]) -> Found:
    y = norm.forward(x, leaves, training=True).copy()
    norm.write_gradients(grad.copy(), leaves)
    gradients = {role: value.copy() for role, value in norm.gradients.items()}
    return {"y": y, "dx": norm.input_gradient(grad.copy(), leaves).copy(), **gradients}


def data(samples: int) -> tuple[Array, Array]:
    random = np.random.default_rng(2)
    return 3 + random.normal(size=(samples, *SHAPE)), random.normal(size=(samples, *SHAPE))


def assert_near(one: Found, other: Found) -> None:
    for name, value in other.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 17), min_size=1, max_size=5))
def test_statistics_of_all_samples_are_those_of_one_batch_however_it_is_cut(cuts: list[int]) -> None:
    leaves = (0, *sorted(cuts), 17)
    x, grad = data(17)
    whole, parts = layer("local"), layer("global")
    assert_near(passed(parts, x, grad, leaves), passed(whole, x, grad, (0, 17)))
    assert_near(parts.state(), whole.state())


def test_statistics_of_leaves_are_those_of_batches_of_their_own() -> None:
    leaves = (0, 6, 6, 7, 17)
    x, grad = data(17)
    norm = layer("leaf")
    actual = passed(norm, x, grad, leaves)
    samples: list[int] = []
    running: list[Array] = []
    gradients: dict[str, list[Array]] = {"gamma": [], "beta": []}
    for start, stop in itertools.pairwise(leaves):
        if stop > start:
            alone = layer("local")
            expected = passed(alone, x[start:stop], grad[start:stop], (0, stop - start))
            assert_near({name: actual[name][start:stop] for name in ("y", "dx")}, {n: expected[n] for n in ("y", "dx")})
            gradients["gamma"].append(expected["gamma"])
            gradients["beta"].append(expected["beta"])
            samples.append(stop - start)
            running.append(np.stack([alone.running_mean, alone.running_var]))
    assert_near(actual, {role: np.sum(some, axis=0) for role, some in gradients.items()})
    assert np.array_equal(norm.running_var, np.ones(5))
    norm.update_statistics(tree_sum(list(norm.leaf_statistics())))
    mean, var = np.average(running, axis=0, weights=samples)
    assert_near(norm.state(), {"bn.running_mean": mean, "bn.running_var": var})


def test_ranks_together_have_the_statistics_and_input_gradients_of_the_whole_batch() -> None:
    x, grad = data(12)
    whole = passed(layer("local"), x, grad, (0, 12))
    mailbox, edges = Mailbox(3, eager=True), (0, 5, 5, 12)

    def rank(number: int) -> Found:
        norm, (start, stop) = layer("global"), edges[number : number + 2]
        norm.ordered_sum = ordered_sum(mailbox.ranks[number], slots(range(4)))
        return passed(norm, x[start:stop], grad[start:stop], (0, stop - start)) | norm.state()

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(rank, range(3)))
    for name in ("y", "dx"):
        np.testing.assert_allclose(
            np.concatenate([actual[name] for actual in ranks]), whole[name], rtol=1e-9, atol=1e-9
        )
    for name in ("gamma", "beta"):
        np.testing.assert_allclose(
            np.sum([actual[name] for actual in ranks], axis=0), whole[name], rtol=1e-9, atol=1e-9
        )
    for name in ("bn.running_mean", "bn.running_var"):
        assert len({actual[name].tobytes() for actual in ranks}) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_no_samples_take_part_with_zeros(count: int) -> None:
    norm = layer("global")
    asked: list[Array] = []

    def add(arrays: Sequence[Array]) -> Array:
        asked.append(tree_sum(arrays))
        return np.ones_like(asked[-1])

    norm.ordered_sum = add
    nothing = np.zeros((0, *SHAPE))
    actual = passed(norm, nothing, nothing, (0,) * (count + 1))
    assert [len(sums) for sums in asked] == [11, 10] and not any(sums.any() for sums in asked)
    assert not actual["gamma"].any() and not actual["beta"].any()
