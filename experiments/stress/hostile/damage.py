"""Damages texts and bytes as an attacker would: cuts, exchanges and inflates parts of them."""

from __future__ import annotations

import random
import re

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_NUMBERS = (
    b"-1",
    b"0",
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"1e308",
    b"1e-320",
    b"18446744073709551616",
    b"9" * 5000,
    b"0." + b"1" * 5000,
    b"99999999999",
    b"2147483648",
    b"null",
    b'"inf"',
    b'"x"',
    b"[]",
    b"{}",
    b"true",
)
_PIECES = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b'"\\ud800"',
    "é\u2028".encode(),
    b"\x1b[31m",
    b"\r",
    b" " * 100_000,
    b"#" * 1000,
    b"../" * 100,
    b"A" * 10_000,
    b"'\"`$(id)",
    b"=",
    b",",
    b":",
    b"%s%n",
    b"\\",
)
_DEEP = (1_000, 20_000)


def damaged(data: bytes, moments: random.Random) -> bytes:
    """``data`` damaged in one to four places, half of them in its first 400 bytes."""
    for _ in range(moments.choice((1, 1, 1, 2, 4))):
        head = min(len(data), 400) if moments.random() < 0.5 else len(data)
        at = moments.randint(0, head)
        data = moments.choice((_cut, _overwritten, _inserted, _deleted, _renumbered, _deepened, _doubled))(
            data, at, moments
        )
    return data


def _cut(data: bytes, at: int, moments: random.Random) -> bytes:
    return data[:at]


def _overwritten(data: bytes, at: int, moments: random.Random) -> bytes:
    new = moments.randbytes(moments.randint(1, 9))
    return data[:at] + new + data[at + len(new) :]


def _inserted(data: bytes, at: int, moments: random.Random) -> bytes:
    return data[:at] + moments.choice(_PIECES) + data[at:]


def _deleted(data: bytes, at: int, moments: random.Random) -> bytes:
    return data[:at] + data[at + moments.randint(1, 12) :]


def _renumbered(data: bytes, at: int, moments: random.Random) -> bytes:
    """The first number from ``at`` on is replaced by another."""
    match = _NUMBER.search(data, at)
    return data if match is None else data[: match.start()] + moments.choice(_NUMBERS) + data[match.end() :]


def _deepened(data: bytes, at: int, moments: random.Random) -> bytes:
    """A number is replaced by a deep nesting, open or closed."""
    match, depth = _NUMBER.search(data, at), moments.choice(_DEEP)
    start, end = (at, at) if match is None else match.span()
    close = moments.choice((b"", b"]" * depth))
    return data[:start] + moments.choice((b"[", b'{"a":')) * depth + b"1" + close + data[end:]


def _doubled(data: bytes, at: int, moments: random.Random) -> bytes:
    length = moments.choice((10, 100, 1000))
    return data[:at] + data[at : at + length] * moments.choice((2, 50)) + data[at + length :]
