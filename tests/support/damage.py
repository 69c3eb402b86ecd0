"""Damaged data as hypothesis strategies, and what is asked of whoever reads it: ``make attacks`` draws thousands."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st

from dpsim.errors import DpsimError
from dpsim.experiments.stress.tally import CASES_VARIABLE

HANG_S = 20
"""Seconds of computing after which a case hangs, however busy the machine is."""
MEMORY_BYTES = 10**9

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
_NESTED = tuple(
    opening * depth + b"1" + closing
    for opening in (b"[", b'{"a":')
    for depth in (1_000, 20_000)
    for closing in (b"", b"]" * depth)
)
_KINDS = ("cut", "overwrite", "insert", "delete", "renumber", "nest", "double")


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw ``data`` damaged in one to four places, half of them in its first 400 bytes."""
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        at = draw(st.integers(0, min(len(data), 400)) | st.integers(0, len(data)))
        start, end, new = at, at, b""
        number = _NUMBER.search(data, at)
        match draw(st.sampled_from(_KINDS)):
            case "cut":
                end = len(data)
            case "overwrite":
                new = draw(st.binary(min_size=1, max_size=9))
                end = at + len(new)
            case "insert":
                new = draw(st.sampled_from(_PIECES))
            case "delete":
                end = at + draw(st.integers(1, 12))
            case "renumber" if number:
                (start, end), new = number.span(), draw(st.sampled_from(_NUMBERS))
            case "nest":
                (start, end), new = number.span() if number else (at, at), draw(st.sampled_from(_NESTED))
            case "double":
                end = at + draw(st.sampled_from((10, 100, 1000)))
                new = data[at:end] * draw(st.sampled_from((2, 50)))
        data = data[:start] + new + data[end:]
    return data


def attacked(few: int, tests: int = 1) -> settings:
    """Return settings with ``few`` examples; under attack, with the share of all cases that falls to one of ``tests``.

    Under attack pytest's ``--hypothesis-seed`` decides which they are.
    """
    cases = int(os.environ.get(CASES_VARIABLE, "0"))
    return settings(
        max_examples=math.ceil(cases / tests) or few,
        derandomize=not cases,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fail where this block computes for too long, or takes too much memory."""

    def stop(*_: object) -> None:
        pytest.fail(f"no answer after {HANG_S} s of computing")

    before = signal.signal(signal.SIGVTALRM, stop)
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start) * 1024
    assert taken < MEMORY_BYTES, f"it took {taken / 1e9:.1f} GB"


def check_read_or_refused(read: Callable[[], object]) -> None:
    """Read; an error of dpsim's own, in words, is an answer. Any other one is the traceback that a user would see."""
    with limited():
        try:
            read()
        except DpsimError as error:
            assert error.given.strip(), "an error without words"
            event("refused")
        else:
            event("read")
