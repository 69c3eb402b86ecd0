"""One clock for all ranks of a machine, and a sleep that ends at an absolute time.

``time.perf_counter`` reads CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import ctypes
import time

now = time.perf_counter
_CLOCK_MONOTONIC, _TIMER_ABSTIME, _PR_SET_TIMERSLACK = 1, 1, 29
SLEEP_LEAD_S = 20e-6
"""A sleep ends about this late while another thread computes (measured: 14 us), so it is asked to end earlier."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


def sharpen_sleep() -> None:
    """Ask the kernel to end this thread's sleeps without grouping them (50 us of slack by default)."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(deadline_s: float) -> None:
    """Give up the core until about ``deadline_s`` on the shared clock; it may end ``SLEEP_LEAD_S`` and more late."""
    nanoseconds = int(deadline_s * 1e9)
    moment = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
    _libc.clock_nanosleep(_CLOCK_MONOTONIC, _TIMER_ABSTIME, ctypes.byref(moment), None)
