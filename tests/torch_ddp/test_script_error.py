"""Where a script's exception was raised. Needs no torch."""

from __future__ import annotations

import sys
import traceback

import pytest

from dpsim.torch_ddp.script_error import calls_to, place_in


def again(number: int) -> None:
    if number == 0:
        raise ValueError
    again(number - 1)


def test_of_a_deep_recursion_only_the_innermost_calls_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, extracted = sys.getrecursionlimit(), list[int]()
    extract = traceback.StackSummary.extract

    def counted(frames: object, **options: object) -> traceback.StackSummary:
        extracted.append(len(kept := list(frames)))  # type: ignore[call-overload]
        return extract(iter(kept), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(traceback.StackSummary, "extract", counted)
    sys.setrecursionlimit(limit + 5000)
    try:
        again(5000)
    except ValueError as error:
        place, calls = place_in(__name__, error.__traceback__, "x"), calls_to(__name__, error.__traceback__)
    finally:
        sys.setrecursionlimit(limit)
    assert place.startswith("test_script_error.py:") and calls.count(" in again: ") == 8
    assert extracted == [1000]
