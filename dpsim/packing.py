"""Records as columns: what rows have in common is written once, and times are whole ticks. Nothing is lost.

``packed`` replaces a list by an object with one key, which says how the list is made again from what it holds:

- ``=rows {name: column}``: objects with the same keys, as the columns of a table
- ``=lists [lengths, values]``: lists, one after the other
- ``=distinct [values, indices]``: the values that occur, and which of them each entry is
- ``=runs [values, counts]``: values, each repeated so many times
- ``=steps integers``: the first of some integers, then what is added to each to get the next
- ``=decimals [places, integers]``: decimal fractions as integers, 10^places times as large
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

MOST_VALUES, VALUES_PER_CHARACTER = 20_000_000, 8
"""A text is refused whose columns stand for more values than this, and so many for each of its characters.

Few columns are as short: a value that differs from those before it takes two characters or more. It counts once for
each column around it.
"""
_NESTED = (dict, list)
_MOST_PLACES, _EXACT = 15, 2**53
"""Up to these an integer and its power of ten are floats, and their quotient is the float nearest to the fraction."""
_FEW_LISTS, _FEW_VALUES = 0.95, 0.5
"""Where a smaller share of the lists, or of the values, differ, each is written once."""
_LINE = 100
"""What is as short stands on one line, as does every column of numbers."""


def columns_text(value: Any) -> str:
    """Return plain values, packed, as JSON text with one column on a line."""
    return "\n".join(_lines(packed(value), "", ""))


def _lines(value: Any, indent: str, end: str, head: str = "") -> Iterator[str]:
    text, nested = _text(value), isinstance(value, dict) or (isinstance(value, list) and any(map(_is_nested, value)))
    if len(text) < _LINE or not nested:
        yield f"{indent}{head}{text}{end}"
        return
    brackets, heads = (
        ("{}", [f"{_text(key)}:" for key in value]) if isinstance(value, dict) else ("[]", [""] * len(value))
    )
    yield f"{indent}{head}{brackets[0]}"
    inside = [*(value.values() if isinstance(value, dict) else value)]
    for number, (name, each) in enumerate(zip(heads, inside, strict=True)):
        yield from _lines(each, f"{indent} ", "," * (number < len(inside) - 1), name)
    yield f"{indent}{brackets[1]}{end}"


def packed(value: Any) -> Any:
    """Return plain values with each list in a short form."""
    if isinstance(value, dict):
        return {key: packed(each) for key, each in value.items()}
    if not isinstance(value, list) or len(value) < 2:
        return [*map(packed, value)] if isinstance(value, list) else value
    return _column(value) if any(map(_is_nested, value)) else min(value, _column(value), key=_length)


def _column(values: list[Any]) -> Any:
    kinds = {*map(type, values)}
    if kinds == {dict} and len({tuple(each) for each in values}) == 1 and values[0]:
        return {"=rows": {key: packed([each[key] for each in values]) for key in values[0]}}
    if kinds == {int}:
        return _integers(values)
    nested, names = not kinds.isdisjoint(_NESTED), [*map(repr, values)]  # 1, 1.0 and True are equal
    distinct = dict(zip(names, values, strict=True))
    if len(distinct) <= len(values) * (_FEW_LISTS if nested else _FEW_VALUES):
        numbers = {name: number for number, name in enumerate(distinct)}
        return {"=distinct": [packed([*distinct.values()]), _integers([numbers[name] for name in names])]}
    if kinds == {list}:
        joined = {"=lists": [_integers([*map(len, values)]), packed([*itertools.chain(*values)])]}
        return min(joined, [*map(packed, values)], key=_length)
    if kinds == {float} and "-0.0" not in names:
        fractions = [*map(Decimal, names)]
        places = max(-int(each.as_tuple().exponent) for each in fractions)
        integers = [int(each.scaleb(places)) for each in fractions]
        if 0 < places <= _MOST_PLACES and max(map(abs, integers)) < _EXACT:
            return {"=decimals": [places, _integers(integers)]}
    return [*map(packed, values)] if nested else values


def _integers(values: list[int]) -> Any:
    """Return integers as they are, as steps or as runs of either."""
    steps = [after - before for before, after in itertools.pairwise([0, *values])]
    return min(_runs(values), {"=steps": _runs(steps)}, key=_length)


def _runs(values: list[int]) -> Any:
    runs = [(value, sum(1 for _ in group)) for value, group in itertools.groupby(values)]
    if len(runs) > len(values) / 2:
        return values
    return {"=runs": [[value for value, _ in runs], _integers([count for _, count in runs])]}


def _is_nested(value: Any) -> bool:
    return isinstance(value, _NESTED)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _length(value: Any) -> int:
    return len(_text(value))


class Unpacking:
    """The ``object_hook`` of one JSON text, which makes the lists again: as many values in all as the text may have."""

    def __init__(self, text: str) -> None:
        self._left = self._most = MOST_VALUES + VALUES_PER_CHARACTER * len(text)

    def __call__(self, value: dict[str, Any]) -> Any:
        """Return the list that an object stands for, and an object of another kind as it is. Raises ``ValueError``."""
        if len(value) != 1 or (unpack := _UNPACK.get(form := next(iter(value)))) is None:
            return value
        try:
            result = [*itertools.islice(unpack(value[form]), self._left + 1)]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"what a {form!r} holds does not fit together: {error}") from error
        waiting: list[Any] = [result]
        while waiting and self._left >= 0:
            inner = waiting.pop()
            self._left -= len(inner)
            waiting += filter(_is_nested, inner.values() if isinstance(inner, dict) else inner)
        if self._left < 0:
            raise ValueError(f"its columns stand for more than {self._most} values")
        return result


def _lists(lengths: list[int], values: list[Any]) -> Iterator[Any]:
    ends = [0, *itertools.accumulate(lengths)]
    if min(lengths) < 0 or ends[-1] != len(values):
        raise ValueError(f"{len(values)} values in lists of {lengths[:5]}")
    return (values[begin:end] for begin, end in itertools.pairwise(ends))


def _repeated(values: list[Any], counts: list[int]) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(*run) for run in zip(values, counts, strict=True))


_UNPACK: dict[str, Callable[[Any], Iterator[Any]]] = {
    "=rows": lambda held: (dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)),
    "=lists": lambda held: _lists(*held),
    "=distinct": lambda held: (held[0][index] for index in held[1]),
    "=runs": lambda held: _repeated(*held),
    "=steps": lambda held: itertools.islice(itertools.accumulate(held, initial=0), 1, None),
    "=decimals": lambda held: (each / float(f"1e{held[0]}") for each in held[1]),
}
