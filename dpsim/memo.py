"""``remember``: results that follow from a frozen noun and hashable arguments are computed once and kept with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from dpsim.codec import Noun

P = ParamSpec("P")
R = TypeVar("R")


class Remembering(Noun, frozen=True, dict=True):
    """A noun that keeps what ``remember`` computes from it. Files, comparisons and copies leave this out."""

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """Results by function and arguments."""
        return {}


N = TypeVar("N", bound=Remembering)


def remember(function: Callable[Concatenate[N, P], R]) -> Callable[Concatenate[N, P], R]:
    """Compute ``function(noun, ...)`` once for each noun and arguments, which must be hashable.

    The result must depend on nothing else, and callers must not change it.
    """

    @functools.wraps(function)
    def remembered(noun: N, /, *args: P.args, **kwargs: P.kwargs) -> R:
        memo = noun.memo
        key = (function, args, *sorted(kwargs.items())) if kwargs else (function, args)
        if key not in memo:
            memo[key] = function(noun, *args, **kwargs)
        result: R = memo[key]
        return result

    return remembered
