"""Records in columns: every value comes back as it was, and texts that unpack to nonsense are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim import packing
from dpsim.codec import parse_json
from dpsim.packing import columns_text, packed

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)
)
TICKS = st.lists(st.integers(-(10**7), 10**7).map(lambda tick: tick / 1e9))
REPEATED = st.lists(st.sampled_from([0, 1, 1.0, True, -0.0, 0.0, "a", None, 2.5e-07]), min_size=8)
VALUES = st.recursive(
    SCALARS | TICKS | REPEATED | st.lists(st.integers(0, 3), min_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(st.fixed_dictionaries({"a": inner, "b": inner}))
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert repr(parse_json(columns_text(value))) == repr(value)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ([{"devices": n, "layout": ""} for n in range(50)], '{"=rows":{"devices":{"=steps":{"=runs":[[0,1],[1,49]]}}'),
        ([0.000344631, 0.000325946, 0.001436729] * 2, '{"=distinct":[[0.000344631,'),
        ([n * n % 97 / 1e9 for n in range(40)], '{"=decimals":[9,[0,1,4,9,16'),
        ([[7, 1], [3], [7, 1], [3]] * 9, '{"=distinct":[[[7,1],[3]],[0,1,0,1,0'),
        ([-0.0, 1.5, 2.5], "[-0.0,1.5,2.5]"),
        ([0.1, 0.1 + 0.2, 1e300], "[0.1,0.30000000000000004,1e+300]"),
    ],
)
def test_what_is_equal_is_written_once_and_times_are_ticks(value: Any, form: str) -> None:
    assert json.dumps(packed(value), separators=(",", ":")).startswith(form)


def test_a_column_stands_on_one_line() -> None:
    lines = columns_text({"name": "x", "value": [n * n % 99_991 / 1e9 for n in range(500)]}).splitlines()
    assert len(lines) < 12 and max(map(len, lines)) > 1000


def test_a_long_record_is_read_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_VALUES", 10)
    steps = [{"batch": n, "step_s": [k * k % 997 / 1e9 for k in range(n, n + 50)]} for n in range(20)]
    record = {"points": steps, "seed": 0}
    assert parse_json(columns_text(record)) == record
    with pytest.raises(ValueError, match="stand for more than"):
        parse_json('{"=runs": [[1], [1000]]}')


@pytest.mark.parametrize(
    "text",
    [
        '{"=runs": [[1], [1000000000000]]}',
        '{"=runs": [[1, 2], [3]]}',
        '{"=rows": {"a": [1, 2], "b": [1]}}',
        '{"=lists": [[2, 2], [1, 2, 3]]}',
        '{"=lists": [[3, -1], [1, 2]]}',
        '{"=distinct": [[1], [0, 1]]}',
        '{"=steps": ["a", "b"]}',
        '{"=decimals": [9, ["1"]]}',
        '{"=decimals": 9}',
        '{"=rows": []}',
        json.dumps({"=distinct": [[{"=runs": [[0], [10**6]]}], {"=runs": [[0], [10**6]]}]}),
    ],
)
def test_columns_that_do_not_fit_together_or_have_no_end_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"fit together|stand for more"):
        parse_json(text)
