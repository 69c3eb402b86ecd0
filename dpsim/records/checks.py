"""Checks that several configurations and records share. Each raises ``ConfigError``."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from dpsim.errors import ConfigError

Value = TypeVar("Value", bound=Hashable)


def check_distinct(name: str, values: Sequence[Value], key: Callable[[Value], Hashable] | None = None) -> None:
    """Check that there is at least one value, and no value (or ``key`` of a value) twice."""
    keys = values if key is None else [key(value) for value in values]
    if not values or len(set(keys)) != len(values):
        raise ConfigError(f"{name} is {list(values)}", allowed="one or more different values")


def check_steps(steps: int, name: str = "steps") -> None:
    """Check that at least one step, or epoch, is trained."""
    if steps < 1:
        raise ConfigError(f"{name} is {steps}", allowed="1 or more")


def check_stall_after(stall_after_s: float) -> None:
    """Raises ``ConfigError`` unless the time is a number of seconds >= 0, or infinity; 0 and infinity mean never."""
    if math.isnan(stall_after_s) or stall_after_s < 0:
        raise ConfigError(
            f"stall-after is {stall_after_s:g} s", allowed="seconds, 0 or more; 0 and inf: stalls are not reported"
        )


def check_label_smoothing(value: float) -> None:
    """Raises ``ConfigError`` for a label smoothing outside [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"label smoothing is {value}", allowed="0 (none) or more, and less than 1; often 0.1")
