"""The memory of a device that a replica computes in: what is uploaded, written and fetched, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from late_device import LateDevice, late_devices

from dpsim.comm.cuda.available import open_device, why_no_gpu
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.errors import ConfigError
from dpsim.memory import HOST, Memory, aligned_bytes
from dpsim.processor import LAYERS_VARIABLE
from dpsim.records.train import TrainConfig
from dpsim.study.environment import environment

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


@pytest.fixture
def late() -> Iterator[LateDevice]:
    with late_devices():
        yield LateDevice()


def test_the_host_may_write_what_it_uploads_and_runs_two_uploads_ahead(late: LateDevice) -> None:
    memory = DeviceMemory(late)
    (stream,) = late.streams
    batch, seen, ahead = np.empty(5), [], []
    for number in range(6):
        batch[:] = number
        array = memory.upload("x", batch)
        stream.operation(lambda array=array: seen.append(np.asarray(array).copy()))  # type: ignore[misc]
        ahead.append(stream.asked - stream.reached)
        batch[:] = -1
    assert ahead == [3, 6, 7, 7, 7, 7]  # two uploads with their events and readers, and the reader of the one before
    memory.fetch([])
    assert [each.tolist() for each in seen] == [[number] * 5 for number in range(6)]


def test_times_are_told_of_events_that_are_complete_and_not_before(late: LateDevice) -> None:
    memory = DeviceMemory(late)
    first, second = memory.mark(), memory.mark()
    with pytest.raises(RuntimeError, match="cudaErrorNotReady"):
        second.seconds_since(first)
    asked = 0
    while not first.done():
        asked += 1
    assert asked > 0
    second.wait()
    assert second.done() and second.seconds_since(first) >= 0


def test_each_memory_fetches_in_its_own_stream_and_no_other_one_is_computed_in(late: LateDevice) -> None:
    first, second = DeviceMemory(late), DeviceMemory(late)
    array = second.upload("x", np.arange(3.0))
    first.fetch([])
    with pytest.raises(AssertionError, match="add in stream"):
        array + 1
    second.use()
    (twice,) = second.fetch([array * 2])
    assert twice.tolist() == [0, 2, 4]


def test_a_fault_of_the_device_is_an_error_to_who_asks_for_an_event_and_to_who_waits(late: LateDevice) -> None:
    memory = DeviceMemory(late)
    (stream,) = late.streams
    before = memory.mark()
    before.wait()
    stream.fails_at = stream.asked + 2
    memory.upload("x", np.arange(3.0))
    after = memory.mark()
    for asks in (after.done, after.wait, memory.stream.wait, lambda: memory.fetch([])):
        with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
            asks()


def test_memory_of_the_host_is_what_it_was() -> None:
    array = np.arange(3.0)
    assert HOST.upload("x", array) is array and HOST.fetch([array])[0] is array
    HOST.write(array, array)
    HOST.write(array[1:], np.zeros(2))
    assert array.tolist() == [0, 0, 0] and HOST.stream is None and not HOST.deferred
    assert aligned_bytes(7).ctypes.data % 64 == 0
    HOST.use()


@pytest.mark.parametrize("where", WHERE[1:])
def test_a_variable_leaves_the_kernels_of_layers_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAYERS_VARIABLE, "cupy")
    assert opened(where, monkeypatch).layer_kernels() is None
    monkeypatch.delenv(LAYERS_VARIABLE)
    memory = opened(where, monkeypatch)
    assert memory.layer_kernels() is memory.layer_kernels() is not None


def test_another_word_in_that_variable_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAYERS_VARIABLE, "numpy")
    assert TrainConfig.of().backend == "cpu"
    with pytest.raises(ConfigError, match="DPSIM_GPU_LAYERS=numpy") as error:
        TrainConfig.of(backend="cuda")
    assert "allowed: cupy" in str(error.value) and "unset DPSIM_GPU_LAYERS" in str(error.value)


def test_the_environment_of_a_record_has_that_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAYERS_VARIABLE, "cupy")
    assert environment().variables[LAYERS_VARIABLE] == "cupy"
