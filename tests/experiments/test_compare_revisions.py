"""The comparison of two revisions: what counts as a difference, and what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpsim.experiments.compare_revisions import (
    Comparison,
    Difference,
    allowed_values,
    compare_structures,
    compare_values,
    parse_help,
)

HELP = """Usage: dpsim bench [OPTIONS] FOLDER

╭─ Commands ───────────────────────────────────────────╮
│ allreduce    Time every allreduce, checked first, as │
│              a fraction of what memory allows.       │
│ --help (-h)  Display this message and exit.          │
╰──────────────────────────────────────────────────────╯
╭─ Parameters ─────────────────────────────────────────╮
│ *  --workload PATH   A workload file.                │
│                      [required]                      │
│    --epochs INT      Passes over the samples, unless │
│                      --steps is given.               │
│    --dtype CHOICE    Number format. [choices: a,     │
│                      b] [default: a]                 │
│    --json                                            │
╰──────────────────────────────────────────────────────╯
"""


def places(comparison: Comparison) -> list[str]:
    return [difference.place for difference in comparison.differences]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (1.0, 1.0 + 1e-13, True),
        (1.0, 1.0 + 1e-9, False),
        (0.0, 1e-300, False),
        (1, 1.0, False),
        (1, True, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        ("inf", "inf", True),
        (None, 0.0, False),
        ([1, 2], [2, 1], False),
        ([1, 2], [1, 2, 3], False),
        ([], {}, False),
    ],
)
def test_numbers_are_equal_to_rounding_and_everything_else_exactly(old: Any, new: Any, same: bool) -> None:
    assert bool(compare_values(old, new, "here").differences) != same


def test_a_difference_names_its_place() -> None:
    old = {"points": [{"step_s": 1.0, "rule": "ddp"}, {"step_s": 2.0, "rule": "ddp"}]}
    new = {"points": [{"step_s": 1.0, "rule": "ddp"}, {"step_s": 2.5, "rule": "ddp"}]}
    comparison = compare_values(old, new, "predict")
    assert comparison.compared == 4
    assert comparison.differences == (Difference("predict.points[1].step_s", "2.0", "2.5"),)


def test_a_renamed_field_is_a_difference_on_both_sides() -> None:
    for compare in (compare_values, compare_structures):
        assert places(compare({"points": [{"a": 1}]}, {"points": [{"b": 1}]}, "x"))[0].endswith(".a")
        assert len(compare({"points": [{"a": 1}]}, {"points": [{"b": 1}]}, "x").differences) == 2


def test_of_measured_fields_only_the_structure_is_compared() -> None:
    measured = frozenset({"step_s"})
    assert not compare_values({"step_s": 1.0}, {"step_s": 2.0}, "train", measured).differences
    assert compare_values({"step_s": 1.0}, {"step_s": "2 s"}, "train", measured).differences
    assert compare_values({"step_s": 1.0}, {}, "train", measured).differences


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ({"a": 1}, {"a": 2.5}, True),
        ({"a": 1}, {"a": "inf"}, True),
        ({"a": 1}, {"a": "one"}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": None}, {"a": {"b": 1}}, True),
        ({"a": []}, {"a": [{"b": 1}]}, True),
        ({"a": [{"b": 1}]}, {"a": [{"b": None}, {"b": 3}]}, True),
        ({"a": [{"b": 1}]}, {"a": [{}]}, False),
        ({"a": {"b": 1}}, {}, False),
        ({"a": [1]}, {"a": 1}, False),
    ],
)
def test_a_structure_is_field_names_and_types(old: Any, new: Any, same: bool) -> None:
    assert bool(compare_structures(old, new, "here").differences) != same


def test_help_is_read_as_commands_flags_choices_and_defaults() -> None:
    parsed = parse_help(HELP)
    assert parsed.commands == ("allreduce",)
    assert parsed.options == {
        "--help (-h)": [],
        "--workload PATH": ["[required]"],
        "--epochs INT": [],
        "--dtype CHOICE": ["[choices: a, b]", "[default: a]"],
        "--json": [],
    }
    assert parsed.descriptions["--epochs INT"] == "Passes over the samples, unless --steps is given."


def test_allowed_values_are_read_from_an_error_message() -> None:
    message = "dpsim: unknown optimizer 'x'\n  allowed: sgd, adamw\n  to do:   see dpsim train --help\n"
    assert allowed_values(message) == ["adamw", "sgd"]
    assert allowed_values("dpsim: no such file") == []
