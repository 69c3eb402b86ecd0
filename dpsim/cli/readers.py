"""Readers of the values of flags, from the text that was typed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from msgspec import Struct

    from dpsim.collective import Layout

MOST_DIGITS = 18
_LEAST_WAIT_S = 10.0
T = TypeVar("T")


def taken(values: dict[str, Any], *kinds: type[Struct]) -> dict[str, Any]:
    """Remove the values of the fields of these structs, and return them."""
    return {name: values.pop(name) for kind in kinds for name in kind.__struct_fields__ if name in values}


def listed(flag: str, text: str | None, read: Callable[[str], T]) -> tuple[T, ...] | None:
    """The comma-separated parts of ``text``, each converted by ``read``; None stays None. Raises ``ConfigError``."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} is {text!r}", allowed="values separated by single commas")
    return tuple(read(part) for part in parts)


def whole_numbers(flag: str) -> Callable[[str], int]:
    """A function that reads whole numbers of 1 or more, for ``listed``."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}", allowed="whole numbers of 1 or more")
        return int(text)

    return read


def threshold(text: str) -> float:
    """A fusion threshold in bytes; warns of a bare number that is hardly meant in bytes. Raises ``ConfigError``."""
    from dpsim.units import parse_size

    size_bytes = parse_size(text)
    if text.strip().isdecimal() and 0 < size_bytes < 1024:
        number = text.strip()
        print(
            f"warning: --fusion-threshold {number} means {number} bytes; write {number}MB or {number}MiB for more",
            file=sys.stderr,
        )
    return size_bytes


def memory(text: str) -> float:
    """The bytes of ``--memory``. Raises ``ConfigError``."""
    from dpsim.units import parse_size

    size_bytes = parse_size(text)
    if not size_bytes:
        raise ConfigError(f"--memory is {text!r}", allowed="more than 0 bytes, like 16GiB")
    return size_bytes


def budget(text: str | None) -> float | None:
    """The seconds of a budget like ``90s`` or ``2min``; a bare number is in seconds. Raises ``ConfigError``."""
    from dpsim.units import parse_duration

    if text is None:
        return None
    return parse_duration(f"{text}s" if text.strip().isdecimal() else text)


def wait(text: str | None) -> float | None:
    """The seconds of ``--wait-until-quiet``, like ``10m``; a bare number is in seconds. Raises ``ConfigError``."""
    seconds = budget(None if text is None else re.sub(r"(?<=[0-9])m$", "min", text.strip()))
    if seconds is not None and seconds < _LEAST_WAIT_S:
        raise ConfigError(f"--wait-until-quiet {text}", allowed="10s or more: for so long the cores have to be quiet")
    return seconds


def layout(text: str) -> tuple[int, Layout]:
    """(devices, layout) of a value of ``--devices``, ``8`` or ``2x4``. Raises ``ConfigError``."""
    from dpsim.collective import parse_devices

    try:
        return parse_devices(text)
    except ConfigError as error:
        raise ConfigError(f"--{error.given}", allowed=error.allowed) from error


def devices_or_layout(text: str) -> int | str:
    """A value of ``--devices`` as a number, or as a layout of several nodes; for ``listed``."""
    devices, node_layout = layout(text)
    return node_layout or devices


def counts_or_layouts(text: str) -> tuple[int | str, ...]:
    """The values of ``--devices``. Raises ``ConfigError``.

    Of these ``8..1024`` are 8, 16, 32 and so on, and 1024, and ``1x8..128x8`` as many nodes of 8 devices.
    """
    values: list[int | str] = []
    for part in listed("--devices", text, str) or ():
        first, dots, last = part.partition("..")
        if not dots:
            values.append(devices_or_layout(part))
            continue
        (first, cross, of_a_node), (last, last_cross, of_a_last) = first.partition("x"), last.partition("x")
        begin, end = map(whole_numbers(f"an end of --devices {part}"), (first, last))
        if begin > end or (cross, of_a_node) != (last_cross, of_a_last):
            allowed = "the smaller number first, as in 8..1024, or nodes of as many devices, as in 1x8..128x8"
            raise ConfigError(f"--devices is {part!r}", allowed=allowed)
        numbers = [begin << doublings for doublings in range((end // begin).bit_length())]
        numbers += [end] if numbers[-1] != end else []
        values += [devices_or_layout(f"{number}{cross}{of_a_node}") for number in numbers]
    return tuple(dict.fromkeys(values))


def networks(text: str | None) -> tuple[str, ...] | None:
    """The networks in a list like ``node,paced:50us,1gbit`` (two: the name of a paced one contains a comma)."""
    if text is None:
        return None
    parts = re.findall(r"paced:[^,]*,[^,]*|[^,]+", text)
    if not parts:
        raise ConfigError(f"--network is {text!r}", allowed="node, or paced:LATENCY,BANDWIDTH, or several of them")
    return tuple(part.strip() for part in parts)


def provided(**values: object) -> dict[str, Any]:
    """The values that are not None. A flag that the user leaves out keeps the default of the class it configures."""
    return {name: value for name, value in values.items() if value is not None}
