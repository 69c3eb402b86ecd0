"""The memory of a device that a replica computes in: what is uploaded, written and fetched, in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpsim.comm.cuda.available import open_device, why_no_gpu
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.comm.cuda.simulator import SimulatedDevice, SimulatedStream
from dpsim.memory import HOST, Memory, aligned_bytes

WHERE = ["host", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)]


def opened(where: str, monkeypatch: pytest.MonkeyPatch) -> Memory:
    if where == "host":
        return HOST
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1" if where == "simulator" else "0")
    if where == "gpu" and (reason := why_no_gpu()):
        pytest.skip(f"no CUDA device: {reason}")
    return DeviceMemory(open_device(0))


@pytest.mark.parametrize("where", WHERE)
def test_values_come_back_as_they_were_given(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = opened(where, monkeypatch)
    xp = memory.xp
    for host in (
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24, dtype=np.int64).reshape(4, 6)[:, ::2],
        np.array([True, False]),
        np.zeros((0, 3), np.float32),
        np.array(2.5),
    ):
        (back,) = memory.fetch([memory.upload("x", host)])
        assert isinstance(back, np.ndarray) and back.dtype == host.dtype and back.shape == host.shape
        np.testing.assert_array_equal(back, host)
    flat = memory.zeros(40).view(np.float32)
    assert memory.address(flat) % 64 == 0 and memory.address(flat[3:]) == memory.address(flat) + 12
    memory.write(flat[2:8].reshape(2, 3), np.arange(6.0).reshape(3, 2).T.astype(np.float32))
    several = memory.fetch([flat, xp.arange(6).reshape(2, 3).T, (flat > 3).any(), flat[:0]])
    assert [np.asarray(each).tolist() for each in several] == [
        [0, 0, 0, 2, 4, 1, 3, 5, 0, 0],
        [[0, 3], [1, 4], [2, 5]],
        True,
        [],
    ]
    first = memory.mark()
    second = memory.mark()
    second.wait()
    assert first.done() and second.done() and second.seconds_since(first) >= 0


@pytest.mark.parametrize("where", WHERE[1:])
def test_what_was_fetched_stays_when_more_is_fetched(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = opened(where, monkeypatch)
    (first,) = memory.fetch([memory.upload("x", np.arange(3.0))])
    memory.fetch([memory.upload("x", np.zeros(3))])
    assert first.tolist() == [0, 1, 2] and memory.fetches == 2  # type: ignore[attr-defined]


class LateEvent:
    """A point in the work of a late device: waiting for it does the work up to there."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._number = device, device.asked

    def done(self) -> bool:
        return self._device.finished >= self._number

    def due_s(self) -> float | None:
        return None

    def wait(self) -> None:
        self._device.finish(self._number)

    def seconds_since(self, earlier: Any) -> float:
        return 0.0


class LateStream(SimulatedStream):
    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def record(self) -> Any:
        return LateEvent(self._device)

    def wait(self) -> None:
        self._device.finish(self._device.asked)


class LateDevice(SimulatedDevice):
    """Copies nothing before somebody waits for it."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self.finished = 0

    @property
    def asked(self) -> int:
        return self.finished + len(self._work)

    def finish(self, number: int) -> None:
        while self.finished < number:
            self._work.pop(0)()
            self.finished += 1

    def stream(self) -> LateStream:
        return LateStream(self)

    def upload(self, stream: Any, host: Any, array: Any) -> None:
        self._work.append(lambda: super(LateDevice, self).upload(stream, host, array))

    def download(self, stream: Any, array: Any, host: Any) -> None:
        self._work.append(lambda: super(LateDevice, self).download(stream, array, host))

    def use(self, _: Any = None) -> None:
        pass


def test_the_host_may_write_what_it_uploads_and_runs_two_uploads_ahead() -> None:
    device = LateDevice()
    memory = DeviceMemory(device)
    batch, seen, ahead = np.empty(5), [], []
    for number in range(6):
        batch[:] = number
        array = memory.upload("x", batch)
        device._work.append(lambda array=array: seen.append(array.copy()))  # type: ignore[misc]
        ahead.append(device.asked - device.finished)
        batch[:] = -1
    assert max(ahead) <= 6 and ahead[1] > 1  # two uploads, and what reads them
    memory.fetch([])
    assert [each.tolist() for each in seen] == [[number] * 5 for number in range(6)]


def test_memory_of_the_host_is_what_it_was() -> None:
    array = np.arange(3.0)
    assert HOST.upload("x", array) is array and HOST.fetch([array])[0] is array
    HOST.write(array, array)
    HOST.write(array[1:], np.zeros(2))
    assert array.tolist() == [0, 0, 0] and HOST.stream is None and not HOST.deferred
    assert aligned_bytes(7).ctypes.data % 64 == 0
    HOST.use()
