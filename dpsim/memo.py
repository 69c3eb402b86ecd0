"""``remember``: results that follow from a noun alone are kept with it, and gone when it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Remembers(Protocol):
    """A frozen noun with a dictionary that is not part of its value."""

    @property
    def memo(self) -> dict[Any, Any]: ...


N = TypeVar("N", bound=Remembers)
P = ParamSpec("P")
R = TypeVar("R")


def remember(function: Callable[Concatenate[N, P], R]) -> Callable[Concatenate[N, P], R]:
    """Call ``function(noun, ...)`` once for the same noun and arguments, which must be hashable."""

    @functools.wraps(function)
    def remembered(noun: N, /, *args: P.args, **kwargs: P.kwargs) -> R:
        memo: dict[Any, R] = noun.memo
        key = (function, args, *kwargs.items()) if kwargs else (function, args)
        try:
            return memo[key]
        except KeyError:
            result = memo[key] = function(noun, *args, **kwargs)
            return result

    return remembered
