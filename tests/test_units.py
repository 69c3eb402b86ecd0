"""Texts of durations: three significant digits in the largest unit that they reach when rounded."""

from __future__ import annotations

import pytest

from dpsim.units import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.234, "1.23 s"),
        (9.996e-4, "1 ms"),
        (-9.996e-4, "-1 ms"),
        (9.994e-4, "999 us"),
        (-5e-5, "-50 us"),
        (9.996e-7, "1 us"),
        (5e-9, "5 ns"),
    ],
)
def test_a_duration_has_the_unit_that_it_reaches_when_rounded(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
