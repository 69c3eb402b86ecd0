"""``Results``: what is held stays as it was, what nobody holds serves others, and a name keeps its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpsim.nn.results import Results


def lies_at(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    held=st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_steps_that_hold_the_same_results_as_long_have_them_in_the_same_memory(
    sizes: list[int], held: list[int]
) -> None:
    """Result i is written when it is lent, and held until ``held[i]`` more have been lent, or until the next step."""
    results = Results(np.zeros)
    places, kept = [], {}
    for step in range(4):
        own = {}
        for number, size in enumerate(sizes):
            array = results.lend(number, (size,), np.float32)
            array[...] = 100 * step + number
            own[number] = array
            for other in [other for other in own if held[other] < 5 and other + held[other] <= number]:
                del own[other]
            assert all((values == 100 * step + other).all() for other, values in own.items())
            del array
        kept = own
        places.append({number: lies_at(results.lend(number, (size,), np.float32)) for number, size in kept_sizes(kept)})
    assert places[2] == places[3]


def kept_sizes(kept: dict[int, Any]) -> list[tuple[int, int]]:
    return [(number, len(values)) for number, values in kept.items()]


def test_memory_that_nobody_holds_serves_the_next_and_the_smallest_that_is_enough_is_taken() -> None:
    results = Results(np.zeros)
    large, small = results.lend("large", (4, 8), np.float64), results.lend("small", (3,), np.float32)
    assert results.size_bytes == 4 * 8 * 8 + 3 * 4
    at_large, at_small = lies_at(large), lies_at(small)
    assert large.dtype == np.float64 and large.shape == (4, 8)
    other = results.lend("other", (3,), np.float32)
    assert lies_at(other) not in (at_large, at_small)
    del small, large
    assert lies_at(results.lend("third", (2,), np.float32)) == at_small
    assert lies_at(results.lend("fourth", (4,), np.float32)) == at_large
    view = results.lend("fourth", (4,), np.float32)[1:2]
    assert lies_at(results.lend("fifth", (1,), np.float32)) == at_small, "a view holds the memory too"
    assert lies_at(results.lend("fourth", (4,), np.float32)) + 4 == lies_at(view), "its own next request overwrites it"
    assert results.size_bytes == 4 * 8 * 8 + 2 * 3 * 4
