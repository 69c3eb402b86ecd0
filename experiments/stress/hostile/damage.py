"""Damages texts and bytes as an attacker would: cuts, exchanges and inflates parts of them."""

from __future__ import annotations

import random
import re

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_NUMBERS = (
    b"9" * 5000,
    b"0." + b"1" * 5000,
    *b"-1 0 1e999 -1e999 NaN Infinity 1e308 1e-320 18446744073709551616 99999999999 2147483648".split(),
    *b'null "inf" "x" [] {} true'.split(),
)
_PIECES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[31m", b"\r", "é\u2028".encode()),
    *(b" " * 100_000, b"#" * 1000, b"../" * 100, b"A" * 10_000),
    *b"""= , : %s%n \\ '"`$(id) "\\ud800" """.split(),
)
_DEEP = (1_000, 20_000)


def damaged(data: bytes, moments: random.Random) -> bytes:
    """Return ``data`` damaged in one to four places, half of them in its first 400 bytes."""
    for _ in range(moments.choice((1, 1, 1, 2, 4))):
        head = min(len(data), 400) if moments.random() < 0.5 else len(data)
        at = moments.randint(0, head)
        start, end, new = at, at, b""
        match moments.choice(("cut", "overwrite", "insert", "delete", "renumber", "deepen", "double")):
            case "cut":
                end = len(data)
            case "overwrite":
                new = moments.randbytes(moments.randint(1, 9))
                end = at + len(new)
            case "insert":
                new = moments.choice(_PIECES)
            case "delete":
                end = at + moments.randint(1, 12)
            case "renumber" if number := _NUMBER.search(data, at):
                (start, end), new = number.span(), moments.choice(_NUMBERS)
            case "deepen":
                number, depth = _NUMBER.search(data, at), moments.choice(_DEEP)
                start, end = number.span() if number else (at, at)
                close = moments.choice((b"", b"]" * depth))
                new = moments.choice((b"[", b'{"a":')) * depth + b"1" + close
            case "double":
                end = at + moments.choice((10, 100, 1000))
                new = data[at:end] * moments.choice((2, 50))
        data = data[:start] + new + data[end:]
    return data
