"""Sizes, times and bandwidths as people write them: ``64KiB``, ``25MB``, ``inf``, ``50us``, ``1gbit``."""

from __future__ import annotations

import contextlib
import math
import re

from dpsim.errors import ConfigError

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number of each dtype."""
_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_LONGEST = 1000  # characters; in a longer text of spaces the search for a number would take minutes
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-zµ%]*)\s*")


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    scale = units.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        names = ", ".join(u for u in units if u)
        raise ConfigError(
            f"{what} {text!r} is not understood",
            allowed=f"a number >= 0 followed by one of {names}",
            remedy=f"write it like {example}",
        )
    return float(match.group(1)) * scale


def parse_size(text: str | float) -> float:
    """Bytes of ``0``, ``64KiB``, ``1MiB``, ``25MB``, ``1000`` or ``inf`` (KiB = 1024, kB = 1000).

    Returns a float that is a whole number, or ``math.inf``. Raises ``ConfigError``.
    """
    if isinstance(text, (int, float)):
        if not text >= 0 or (math.isfinite(text) and text != int(text)):
            raise ConfigError(f"size {text!r} is not understood", allowed="whole bytes >= 0, or inf")
        return float(text)
    if text.strip().lower() in ("inf", "infinity"):
        return math.inf
    size = _parse(text, _BYTES, "size", "64KiB, 25MB, 0 or inf")
    if not size <= 2.0**62:
        raise ConfigError(f"size {text!r} is larger than any memory", allowed="below 4 EiB, or inf")
    if abs(size - round(size)) > 1e-6:
        raise ConfigError(f"size {text!r} is not a whole number of bytes", allowed="whole bytes")
    return float(round(size))


def parse_duration(text: str) -> float:
    """Seconds of ``50us``, ``1.5ms``, ``2s`` or ``2min``. Raises ``ConfigError``."""
    seconds = _parse(text, _SECONDS, "duration", "50us or 1ms")
    if not seconds < 1e9:
        raise ConfigError(f"duration {text!r} is longer than anyone waits", allowed="below 1e9 s")
    return seconds


def parse_bandwidth(text: str) -> float:
    """Bytes a second of ``1gbit``, ``200mbit`` (bits a second). Raises ``ConfigError``."""
    bytes_per_s = _parse(text, _BITS, "bandwidth", "1gbit or 200mbit") / 8
    if bytes_per_s <= 0:
        raise ConfigError(f"bandwidth {text!r} is zero", allowed="more than 0", remedy="write it like 1gbit")
    return bytes_per_s


def parse_share(text: str) -> float:
    """A share of ``90%`` or ``0.9``, as a number that may be above 1. Raises ``ConfigError``."""
    return _parse(text, {"": 1.0, "%": 0.01}, "share", "90% or 0.9")


def parse_count(text: str, what: str, example: str) -> float:
    """How many of ``50000``, ``5e4``, ``1.28M`` or ``300B`` (k, M, B, T are powers of 1000). Raises ``ConfigError``."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)) and number >= 0:
            return number
    return _parse(text, _COUNTS, what, example)


def format_bandwidth(bytes_per_s: float) -> str:
    """``3.1 GB/s (24.8 Gbit/s)``, decimal."""
    if math.isinf(bytes_per_s):
        return "any bandwidth"
    return f"{bytes_per_s / 1e9:.3g} GB/s ({8 * bytes_per_s / 1e9:.4g} Gbit/s)"


def format_size(size_bytes: float) -> str:
    """``64 KiB`` style text that ``parse_size`` reads back exactly when the size is a round one, in either unit."""
    if math.isinf(size_bytes):
        return "inf"
    if size_bytes == 0:
        return "0"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return _round_decimal(size_bytes, scale) or f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.0f} B"


def format_rounded_size(size_bytes: float) -> str:
    """``10.3 MiB`` style text with three significant digits, always in binary units: for sizes side by side."""
    scale = next((each for each in (2**30, 2**20, 2**10) if size_bytes >= each), 1)
    unit = {1: "B", 2**10: "KiB", 2**20: "MiB", 2**30: "GiB"}[scale]
    return f"{float(f'{size_bytes / scale:.3g}'):.4g} {unit}" if size_bytes else "0"


def _round_decimal(size_bytes: float, scale: int) -> str:
    """``25 MB`` for a size that is whole in decimal units and not in the binary one; else nothing."""
    if size_bytes % scale == 0:
        return ""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    multiples = ((size_bytes // each, unit) for unit, each in units if size_bytes % each == 0)
    return next((f"{count:.0f} {unit}" for count, unit in multiples if count < 1000), "")


def format_duration(seconds: float) -> str:
    """``1.23 ms`` style text with three significant digits."""
    rounded = abs(float(f"{seconds:.3g}"))  # 999.6 us are 1 ms
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if rounded >= scale and (scale != 60.0 or rounded >= 1000.0):
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"
