"""Texts of durations and sizes: three significant digits in the largest unit that they reach."""

from __future__ import annotations

import pytest

from dpsim.units import format_duration, format_rounded_size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (288_000.0, "80 h"),
        (1_200.0, "20 min"),
        (999.0, "999 s"),
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


def test_sizes_that_stand_side_by_side_are_in_binary_units() -> None:
    texts = {
        10_485_760: "10 MiB",
        10_003_415: "9.54 MiB",
        64_000: "62.5 KiB",
        1_048_000: "1020 KiB",
        12: "12 B",
        0: "0",
    }
    assert {size: format_rounded_size(size) for size in texts} == texts
