"""``Registry``: items of one kind by name, and functions that are imported when they are first used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from dpsim.errors import ConfigError, unknown


class Named(Protocol):
    """An item of a registry."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T]):
    """Name -> item, in the order of registration. ``what`` is the kind of item, for messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._items: dict[str, T] = {}

    def register(self, item: T) -> T:
        """Add an item under its name. Raises ``ConfigError`` where the name is taken."""
        if item.name in self._items:
            raise ConfigError(
                f"{self._what} {item.name!r} is registered already",
                allowed=f"another name than {', '.join(self._items)}",
            )
        self._items[item.name] = item
        return item

    def find(self, name: str) -> T:
        """The item of a name. Raises ``ConfigError``, which suggests the nearest name."""
        if name not in self._items:
            raise unknown(self._what, name, self._items)
        return self._items[name]

    def __getitem__(self, name: str) -> T:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@functools.cache
def load(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """The function itself, or the function that ``module:name`` names, which is imported now."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def listed(names: Iterable[str]) -> str:
    """Names as a help text lists them: ``ring, direct or hierarchical``."""
    *others, last = names
    return f"{', '.join(others)} or {last}"
