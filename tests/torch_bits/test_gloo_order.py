"""The predicted order of gloo's sums against gloo itself, to the bit. Its ranks are threads of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rank_sums import evaluated

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.expression import text
from dpsim.torch.gloo_order import MAX_SEGMENT_BYTES, gloo_expressions

SEGMENT = MAX_SEGMENT_BYTES // 4
"""The elements of float32 in the longest segment."""
Run = Callable[[Callable[[Any, int], Any]], list[Any]]


def in_words(elements: int, ranks: int) -> list[tuple[int, str]]:
    return [(end, text(expression)) for end, expression in gloo_expressions(elements, ranks)]


def test_each_chunk_is_added_down_the_ring_and_ends_at_its_own_rank() -> None:
    assert in_words(12, 3) == [(4, "(2+1)+0"), (8, "(0+2)+1"), (12, "(1+0)+2")]
    assert in_words(8, 4) == [(2, "((3+2)+1)+0"), (4, "((0+3)+2)+1"), (6, "((1+0)+3)+2"), (8, "((2+1)+0)+3")]


def test_chunks_are_of_two_segments_so_that_the_last_ones_may_be_short_or_empty() -> None:
    assert [end for end, _ in gloo_expressions(7, 3)] == [4, 7]
    assert [end for end, _ in gloo_expressions(1, 3)] == [1]
    assert [end for end, _ in gloo_expressions(6 * SEGMENT, 3)] == [2 * SEGMENT, 4 * SEGMENT, 6 * SEGMENT]
    assert [end for end, _ in gloo_expressions(6 * SEGMENT + 1, 3)] == [524_289, 1_048_578, 1_572_865]
    assert gloo_expressions(0, 3) == [] and gloo_expressions(5, 1) == [(5, 0)]


@pytest.mark.parametrize("arguments", [(-1, 2), (3, 0), (3, 2, 0)])
def test_what_is_no_number_of_elements_ranks_or_bytes_is_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="or more"):
        gloo_expressions(*arguments)


@contextmanager
def gloo_ranks(count: int) -> Iterator[Run]:
    """Runs a function on each of so many ranks, given its process group and rank."""
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    with ThreadPoolExecutor(count) as pool:

        def everywhere(task: Callable[[int], Any]) -> list[Any]:
            return [each.result(120) for each in [pool.submit(task, rank) for rank in range(count)]]

        groups = everywhere(lambda rank: distributed.ProcessGroupGloo(store, rank, count))
        yield lambda task: everywhere(lambda rank: task(groups[rank], rank))


def allreduced(values: list[NDArray[Any]], run: Run) -> list[NDArray[Any]]:
    import torch

    def task(group: Any, rank: int) -> NDArray[Any]:
        tensor = torch.from_numpy(values[rank].copy())
        group.allreduce([tensor]).wait()
        return tensor.numpy()

    return run(task)


def random_values(ranks: int, elements: int, seed: int = 0) -> list[NDArray[np.float32]]:
    """Numbers of exponents from -12 to 12, whose sums round otherwise in another order."""
    rng = np.random.default_rng([elements, seed])
    scales = np.exp2(rng.integers(-12, 13, (ranks, elements)))
    return list((rng.standard_normal((ranks, elements)) * scales).astype(np.float32))


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_sums_are_those_of_gloo_to_the_bit(ranks: int) -> None:
    sizes = (1, 2, 3, 7, ranks - 1, ranks, ranks + 1, 100, 1000, 65_536, 300_000, 1_000_003, 6_000_000)
    with gloo_ranks(ranks) as run:
        for elements in sizes:
            values = random_values(ranks, elements)
            expected = evaluated(gloo_expressions(elements, ranks), values)
            for total in allreduced(values, run):
                assert total.tobytes() == expected.tobytes(), elements
    if ranks > 2:
        assert expected.tobytes() != functools.reduce(np.add, values).tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_chunks_end_where_those_of_gloo_end(ranks: int) -> None:
    """What one rank has survives in the sum only where it is added last: the others' numbers cancel out before."""
    sizes = [*range(1, 6 * ranks), *(SEGMENT * ranks * k + rest for k in (1, 2, 3) for rest in (-1, 0, 1))]
    with gloo_ranks(ranks) as run:
        for elements in sizes:
            last = np.full(elements, -1)
            for rank in range(ranks):
                others = iter([1.0] * (ranks - 2) + [2.0 - ranks])
                numbers = [2.0**-40 if each == rank else next(others) for each in range(ranks)]
                (total, *_) = allreduced([np.full(elements, number, np.float32) for number in numbers], run)
                last[total != 0] = rank
            ranges = gloo_expressions(elements, ranks)
            ends = [end for end, _ in ranges]
            assert [expression[1] for _, expression in ranges] == list(range(len(ranges)))  # type: ignore[index]
            assert np.array_equal(last, np.searchsorted(ends, np.arange(elements), side="right")), elements


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types_are_added_in_the_same_order_and_each_sum_is_rounded(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    with gloo_ranks(3) as run:
        for elements in (7, 1000, 3 * MAX_SEGMENT_BYTES // kind.itemsize + 1):
            values = [torch.from_numpy(each).to(kind) for each in random_values(3, elements)]

            def task(group: Any, rank: int, values: list[Any] = values) -> Any:
                tensor = values[rank].clone()
                group.allreduce([tensor]).wait()
                return tensor

            start = 0
            for end, ((a, b), c) in gloo_expressions(elements, 3, kind.itemsize):  # type: ignore[misc]
                expected = (values[a][start:end] + values[b][start:end]) + values[c][start:end]
                for total in run(task):
                    assert torch.equal(total[start:end], expected)
                start = end


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reduce_scatter_is_the_allreduce_of_which_each_rank_keeps_a_part(ranks: int) -> None:
    import torch

    with gloo_ranks(ranks) as run:
        for elements in (1, 5, 1000, 70_001):
            values = random_values(ranks, elements * ranks)

            def task(group: Any, rank: int, values: list[Any] = values, elements: int = elements) -> Any:
                shard = torch.empty(elements)
                group._reduce_scatter_base(shard, torch.from_numpy(values[rank].copy())).wait()
                return shard.numpy()

            expected = evaluated(gloo_expressions(elements * ranks, ranks), values)
            assert np.concatenate(run(task)).tobytes() == expected.tobytes()
