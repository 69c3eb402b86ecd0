"""Samples of a GPU's work hold no time of the host: by a device whose clock and whose host's clock a test knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpsim.errors import CommunicationError
from dpsim.study.runners.allreduce.logical import Lane

BYTES_PER_S = 1e9
KERNEL_S = 2e-6


class Clock:
    """The host's time; every call of the device takes ``call_s`` of it."""

    def __init__(self, call_s: float) -> None:
        self.now_s, self.call_s = 0.0, call_s


class Event:
    def __init__(self, clock: Clock, at_s: float) -> None:
        self.clock, self.at_s = clock, at_s

    def done(self) -> bool:
        return self.clock.now_s >= self.at_s

    def wait(self) -> None:
        self.clock.now_s = max(self.clock.now_s, self.at_s)

    def seconds_since(self, earlier: Any) -> float:
        return float(self.at_s - earlier.at_s)


class Stream:
    """Work begins once it is submitted and what was before it has ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.end_s, self.launch = clock, 0.0, self

    def work(self, for_s: float) -> None:
        self.clock.now_s += self.clock.call_s
        self.end_s = max(self.end_s, self.clock.now_s) + for_s

    def record(self) -> Event:
        self.work(0.0)
        return Event(self.clock, self.end_s)


class Device:
    simulated = False
    name = "a GPU"

    def copy(self, stream: Any, source: Any, target: Any) -> None:
        stream.work(source.nbytes / BYTES_PER_S)


@pytest.fixture
def lane() -> Callable[..., Any]:
    def make(call_s: float, head_start_bytes: int) -> Any:
        memory = np.zeros(head_start_bytes, np.uint8)
        return Lane(device=Device(), stream=Stream(Clock(call_s)), head_start=(memory, memory))  # type: ignore[arg-type]

    return make


def kernel(stream: Stream) -> None:
    stream.work(KERNEL_S)


@pytest.mark.parametrize("call_s", [1e-9, 5e-6, 1.5e-5])
@pytest.mark.parametrize("head_start_bytes", [20_000, 100_000, 1_000_000])
def test_a_sample_has_no_time_of_the_host_however_long_its_calls_and_its_head_start_are(
    call_s: float, head_start_bytes: int, lane: Callable[..., Any]
) -> None:
    taken, array = lane(call_s, head_start_bytes), np.zeros(4000, np.uint8)
    for _ in range(3):
        copy_s, time_s = taken.sample(array, array, kernel)
        assert copy_s == pytest.approx(4000 / BYTES_PER_S) and time_s == pytest.approx(KERNEL_S)
    assert taken.burst(10, kernel) == pytest.approx([KERNEL_S] * 10)


def test_a_head_start_that_was_too_short_is_longer_from_then_on(lane: Callable[..., Any]) -> None:
    taken, array = lane(5e-6, 10_000), np.zeros(4, np.uint8)
    taken.sample(array, array, kernel)
    copies = dict(taken.copies)
    assert copies[1] > 1
    taken.sample(array, array, kernel)
    assert taken.copies == copies


def test_a_host_that_no_head_start_outlasts_is_an_error(lane: Callable[..., Any]) -> None:
    taken, array = lane(1.0, 4), np.zeros(4, np.uint8)
    with pytest.raises(CommunicationError, match="longer to submit 1 calls than 256 copies of 4 B take on a GPU"):
        taken.sample(array, array, kernel)
