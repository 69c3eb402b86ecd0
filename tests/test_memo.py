"""``remember`` computes once for each noun and arguments."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from dpsim.codec import Noun
from dpsim.memo import remember

calls: list[tuple[int, int]] = []


class Number(Noun, frozen=True, dict=True):
    value: int

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        return {}

    @remember
    def doubled(self) -> int:
        return 2 * self.value


@remember
def power(number: Number, exponent: int, offset: int = 0) -> int | None:
    calls.append((number.value, exponent))
    return number.value**exponent + offset if exponent >= 0 else None


def test_each_result_is_computed_once_even_if_it_is_none() -> None:
    calls.clear()
    two = Number(value=2)
    assert [power(two, 3), power(two, 3), power(two, 4), power(two, -1), power(two, -1)] == [8, 8, 16, None, None]
    assert calls == [(2, 3), (2, 4), (2, -1)]
    assert (power(two, 3, offset=1), power(two, 3, offset=2)) == (9, 10)
    assert two.doubled() == two.doubled() == 4


def test_another_noun_and_a_copy_have_results_of_their_own() -> None:
    two = Number(value=2)
    assert (power(two, 2), power(Number(value=3), 2)) == (4, 9)
    changed = msgspec.structs.replace(two, value=5)
    assert (power(changed, 2), changed.doubled()) == (25, 10)


def test_what_is_remembered_is_neither_compared_nor_stored() -> None:
    two = Number(value=2)
    power(two, 3)
    assert two == Number(value=2)
    assert msgspec.to_builtins(two) == {"value": 2}
