"""Where a script's exception was raised. Needs no torch."""

from __future__ import annotations

import sys
import traceback

import pytest

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.script_error import calls_to, place_in, remedy_of, what_happened


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


def test_another_number_of_ranks_in_lightning_is_no_failure_of_the_script() -> None:
    lightning = ValueError("... the product (2 * 1) does not match the world size (1).")
    assert "WORLD_SIZE" in remedy_of(lightning) and "--devices" in remedy_of(lightning)
    assert remedy_of(ValueError("no data"), "start it by hand") == "start it by hand; it has to work on this machine"


@pytest.mark.parametrize("text", ["Invalid scalar type", "\"addmm_impl_cpu_\" not implemented for 'Half'"])
def test_a_type_that_pytorch_or_gloo_lacks_has_one_message(text: str) -> None:
    with pytest.raises(ConfigError, match="train in float32"):
        what_happened(__name__, "train.py", RuntimeError(text))
    assert what_happened(__name__, "train.py", RuntimeError("no data")).endswith("RuntimeError: no data")
