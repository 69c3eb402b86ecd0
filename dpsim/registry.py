"""``Registry``: items of one kind by name, also of plug-ins, and functions that are imported when they are first used.

A plug-in is an installed package with an entry point in the registry's group, such as ``dpsim.fusion_rules``, that
leads to an item of the same name. Packages are searched when a name is asked for that is none of the built-in ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dpsim.errors import ConfigError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Named(Protocol):
    """An item of a registry."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T]):
    """Name -> item, in the order of registration. ``what`` names the items of this ``kind`` in messages.

    ``group`` is that of the entry points of plug-ins; plug-ins are among the items once they were asked for.
    """

    def __init__(self, what: str, kind: type[Any], *, group: str = "") -> None:
        self._what, self._kind, self._group = what, kind, group
        self._items: dict[str, T] = {}
        self._plugged: set[str] = set()
        self._built_in: frozenset[str] = frozenset()

    def close(self) -> None:
        """Take the items so far as dpsim's own: later ones are those of a program or a plug-in."""
        self._built_in = frozenset(self._items)

    def of_program(self) -> list[str]:
        """Return the names that the running program registered: neither dpsim's own nor a plug-in's."""
        return [name for name in self._items if name not in self._built_in | self._plugged]

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
        """Return the item of a name, of a plug-in where it is none of those here.

        Raises ``ConfigError``, which suggests the nearest name, or says what is wrong with a plug-in.
        """
        if name not in self._items:
            points = self._plug_ins()
            if name not in points:
                names = [*self._items, *(other for other in points if other not in self._items)]
                raise unknown(self._what, name, names, remedy=self._remedy(name))
            self._items[name] = self._loaded(points[name])
        return self._items[name]

    def _remedy(self, name: str) -> str:
        """Return what to do for a function of the user's in a file, which has no name here."""
        if ".py" not in name or not self._group:
            return ""
        return f"register it in a program that calls dpsim.sweep, or as the entry point {self._group} of a package"

    def _plug_ins(self) -> dict[str, EntryPoint]:
        """Return the entry points of installed packages, by name. Raises ``ConfigError`` for a name that is taken."""
        from importlib.metadata import entry_points

        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group) if self._group else ():
            if point.name in points or (point.name in self._items and point.name not in self._plugged):
                other = f"the package {_package(points[point.name])}" if point.name in points else "dpsim"
                raise ConfigError(
                    f"the package {_package(point)} claims the {self._what} {point.name!r}, which {other} has",
                    allowed=f"another name than {', '.join([*self._items, *points])}",
                    remedy=f"uninstall one of the two: pip uninstall {_package(point)}",
                )
            points[point.name] = point
        return points

    def _loaded(self, point: EntryPoint) -> T:
        try:
            item: T = point.load()
        except Exception as error:
            raise ConfigError(
                f"the {self._what} {point.name!r} of the package {_package(point)} cannot be imported: "
                f"{type(error).__name__}: {error}",
                allowed=f"{point.value}, a {self._kind.__name__}",
                remedy=f"mend the package, or uninstall it: pip uninstall {_package(point)}",
            ) from error
        if not isinstance(item, self._kind) or item.name != point.name:
            what = f"the {self._what} {item.name!r}" if isinstance(item, self._kind) else f"a {type(item).__name__}"
            raise ConfigError(
                f"the {self._what} {point.name!r} of the package {_package(point)} is {what}",
                allowed=f"a {self._kind.__name__} with the name of its entry point",
                remedy=f"mend the package, or uninstall it: pip uninstall {_package(point)}",
            )
        self._plugged.add(point.name)
        return item

    def __getitem__(self, name: str) -> T:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "of no name"


@functools.cache
def load(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the function itself, or the function that ``module:name`` names, which is imported now."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def listed(names: Iterable[str]) -> str:
    """Return names as a help text lists them: ``ring, direct or hierarchical``."""
    *others, last = names
    return f"{', '.join(others)} or {last}"
