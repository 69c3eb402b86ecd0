"""Checks that several configurations and records share. Each raises ``ConfigError``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from dpsim.errors import ConfigError

Value = TypeVar("Value", bound=Hashable)


def check_distinct(name: str, values: Sequence[Value], key: Callable[[Value], Hashable] | None = None) -> None:
    """Check that there is at least one value, and no value (or ``key`` of a value) twice."""
    keys = values if key is None else [key(value) for value in values]
    if not values or len(set(keys)) != len(values):
        raise ConfigError(f"{name} is {list(values)}", allowed="one or more different values")


def check_steps(steps: int) -> None:
    """Check that at least one step is trained."""
    if steps < 1:
        raise ConfigError(f"steps is {steps}", allowed="1 or more")
