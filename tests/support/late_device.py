"""A device whose work is done late, as that of a GPU is: what numba's simulator, always ready, hides from the host.

Its streams and events are those of ``dpsim.comm.cuda.gpu``, over a stand-in for CuPy with CUDA's rules: operations on
arrays run in the calling thread's current stream; an event is complete when the host has waited for it or has asked
often enough; the time between events that are not complete is refused; and a fault is told only to a host that asks.

Copies between host and device are done when a later operation of the device needs them, or the host waits; all other
work is done by NumPy at once. So that its order is held to nevertheless, every access to device memory is kept with its
stream and its place there: two accesses to the same bytes of which one writes, in two streams of which neither follows
the other, are an error (``Block``), unless the host has waited between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from quick_simulator import short_turns

import dpsim.comm.cuda
from dpsim.comm.cuda import simulator
from dpsim.comm.cuda.device import PeerMemory
from dpsim.comm.cuda.simulator import SimulatedDevice

POLLS = 3
"""How often the host asks for an event in vain, unless it waits for it."""

_SUCCESS, _NOT_READY, _ILLEGAL_ADDRESS = 0, 600, 700


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        names = {_NOT_READY: "cudaErrorNotReady", _ILLEGAL_ADDRESS: "cudaErrorIllegalAddress"}
        super().__init__(f"{names[status]}: {status}")


_EVENTS: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
_STREAMS: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_THREAD = threading.local()


def touched(stream: int, read: NDArray[Any], written: NDArray[Any] | None = None) -> None:
    """An operation of a library in the stream of this number: what it reads, and what it writes."""
    if (asked := _STREAMS.get(stream)) is not None:
        asked.operation()
        _access_array(asked, read, False, "a library")
        if written is not None:
            _access_array(asked, written, True, "a library")


class _Work(NamedTuple):
    """A copy that was asked for, and what has to be done before."""

    point: int
    before: dict[Stream, int]
    copy: Callable[[], None]


class Stream:
    """``cupy.cuda.Stream``. At its operation number ``fails_at`` the device fails, which all streams then tell.

    ``points``: what is done when all of its work is done, of this stream and of those that it follows. ``reached``: up
    to where the host has waited for it.
    """

    fault = False

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(_NUMBERS)
        self.points: dict[Stream, int] = {}
        self.asked = self.reached = 0
        self.fails_at: int | None = None
        self._queue: deque[_Work] = deque()
        _STREAMS[self.ptr] = self

    def use(self) -> None:
        _THREAD.stream = self

    def operation(self, copy: Callable[[], None] | None = None) -> None:
        """Ask for one more piece of work: a copy, or what the caller does at once when all before it has been done."""
        before = dict(self.points)
        self.asked += 1
        self.points[self] = self.asked
        if copy is not None:
            self._queue.append(_Work(self.asked, before, copy))
        else:
            _perform(before)
        Stream.fault = Stream.fault or self.asked == self.fails_at

    def perform(self, point: int) -> None:
        """Do the copies up to a point."""
        while self._queue and self._queue[0].point <= point:
            work = self._queue.popleft()
            _perform(work.before)
            work.copy()

    def finish(self, point: int) -> None:
        """The host has waited up to a point."""
        self.perform(point)
        self.reached = max(self.reached, point)

    def wait_event(self, event: Event) -> None:
        for stream, point in event.points.items():
            self.points[stream] = max(point, self.points.get(stream, 0))

    def synchronize(self) -> None:
        _wait(self.points)


def _perform(points: dict[Stream, int]) -> None:
    for stream, point in points.items():
        stream.perform(point)


class _Access(NamedTuple):
    start: int
    stop: int
    writes: bool
    stream: Stream
    point: int


class Block:
    """Device memory and the last accesses to it that the host has not waited for."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._accesses: list[_Access] = []

    def access(self, new: _Access, name: str) -> None:
        """Raises ``AssertionError`` where nothing says which of two accesses to the same bytes comes first."""
        kept = []
        for old in self._accesses:
            if old.stream.reached >= old.point:
                continue
            apart = old.stop <= new.start or new.stop <= old.start
            ordered = new.stream.points.get(old.stream, 0) >= old.point
            if not (apart or ordered) and (old.writes or new.writes):
                done = ["read", "written"]
                raise AssertionError(
                    f"{name}: memory {done[new.writes]} in stream {new.stream.ptr}, which does not follow"
                    f" stream {old.stream.ptr}, where it is {done[old.writes]}"
                )
            inside = new.start <= old.start and old.stop <= new.stop
            if not (ordered and inside and (new.writes or not old.writes)):
                kept.append(old)
        self._accesses = [*kept, new]


_BLOCKS: dict[int, Block] = {}
_LOCK = threading.RLock()


def _tracked(array: NDArray[Any]) -> Any:
    """A late array over memory of the device, accesses to which are kept while it lives."""
    start = array.ctypes.data
    _BLOCKS[start] = Block(start, start + array.nbytes)
    weakref.finalize(_owner(array), _BLOCKS.pop, start, None)
    return late(array)


def _access(stream: Stream, start: int, stop: int, writes: bool, name: str) -> None:
    """Keep an access by the last operation of a stream, if it is to memory of the device."""
    with _LOCK:
        for block in list(_BLOCKS.values()):
            if block.start <= start < block.stop:
                block.access(_Access(start, stop, writes, stream, stream.asked), name)


def _access_array(stream: Stream, array: NDArray[Any], writes: bool, name: str) -> None:
    if array.nbytes:
        _access(stream, *np.lib.array_utils.byte_bounds(array), writes, name)


def _wait(points: dict[Stream, int]) -> None:
    if Stream.fault:
        raise CUDARuntimeError(_ILLEGAL_ADDRESS)
    for stream, point in list(points.items()):
        stream.finish(point)


_NULL_STREAM = Stream()


def current() -> Stream:
    """The calling thread's current stream."""
    return getattr(_THREAD, "stream", _NULL_STREAM)


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self) -> None:
        self.ptr = id(self)
        self.polls = 0
        self.points: dict[Stream, int] = {}
        _EVENTS[self.ptr] = self

    def record(self, stream: Stream) -> None:
        stream.operation()
        self.points, self.at_s = dict(stream.points), time.perf_counter()

    @property
    def complete(self) -> bool:
        return all(stream.reached >= point for stream, point in self.points.items())

    @property
    def done(self) -> bool:
        """As CuPy's, it raises nothing: after a fault it is false for ever."""
        return event_query(self.ptr) == _SUCCESS

    def synchronize(self) -> None:
        _wait(self.points)


def event_query(pointer: int) -> int:
    event = _EVENTS[pointer]
    if Stream.fault:
        return _ILLEGAL_ADDRESS
    event.polls += 1
    if event.polls > POLLS:
        _wait(event.points)
    return _SUCCESS if event.complete else _NOT_READY


def elapsed_ms(start: Event, end: Event) -> float:
    if not (start.complete and end.complete):
        raise CUDARuntimeError(_NOT_READY)
    return 1e3 * (end.at_s - start.at_s)


class LateArray(np.ndarray[Any, Any]):
    """An array of a late device; ``stream`` is the number of the one in which its memory was made and is computed."""

    stream: int | None

    def __array_finalize__(self, source: Any) -> None:
        self.stream = getattr(source, "stream", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        outs = settings.get("out", ())
        _operation((*inputs, *settings.values()), ufunc.__name__, outs or inputs[: method == "at"])
        given = {name: _on_host(value) for name, value in settings.items()}
        result = getattr(ufunc, method)(*map(_on_host, inputs), **given)
        return outs[0] if outs else late(result)

    def __array_function__(self, function: Any, types: Any, args: Any, settings: Any) -> Any:
        _operation((*args, *settings.values()), function.__name__, _written(function.__name__, args, settings))
        return late(super().__array_function__(function, types, args, settings))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, np.ndarray | list) for part in parts):
            _operation((self, *parts), "an index")
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _operation((self, index, value), "an assignment", (_part(self, index),))
        super().__setitem__(index, value)

    def copy(self, *args: Any, **settings: Any) -> Any:
        _operation((self,), "copy")
        return super().copy(*args, **settings)

    def astype(self, *args: Any, **settings: Any) -> Any:
        _operation((self,), "astype")
        return super().astype(*args, **settings)


def late(result: Any) -> Any:
    """An array of the current stream; anything else as it is."""
    if isinstance(result, list):
        return [late(each) for each in result]
    if not isinstance(result, np.ndarray):
        return result
    array = result.view(LateArray)
    array.stream = current().ptr
    return array


def _on_host(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_on_host, value))
    return np.asarray(value) if isinstance(value, LateArray) else value


def _written(name: str, args: Any, settings: Any) -> tuple[Any, ...]:
    """What a function of NumPy writes to."""
    return (args[0],) if name == "copyto" else (settings.get("out"),)


def _part(array: NDArray[Any], index: Any) -> NDArray[Any]:
    """What an index reaches, or the whole array where that is no view of it."""
    whole = np.asarray(array)
    part = whole[index]
    return part if isinstance(part, np.ndarray) and np.may_share_memory(part, whole) else whole


def _operation(values: Iterable[Any], name: str, written: Iterable[Any] = ()) -> None:
    """Put an operation into the current stream, which must be that of all arrays it is about."""
    stream = current()
    stream.operation()
    _refuse_others(values, stream, name)
    outs = [each for each in written if isinstance(each, np.ndarray)]
    for array in outs:
        _access_array(stream, array, True, name)
    for array in _arrays(values):
        if not any(array is each for each in outs) and name != "an assignment":
            _access_array(stream, array, False, name)


def _arrays(values: Iterable[Any]) -> Iterator[NDArray[Any]]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _arrays(value)
        elif isinstance(value, LateArray):
            yield value


def _refuse_others(values: Iterable[Any], stream: Stream, name: str) -> None:
    for value in values:
        if isinstance(value, tuple | list):
            _refuse_others(value, stream, name)
        elif isinstance(value, LateArray) and value.stream is not None:
            assert value.stream == stream.ptr, f"{name} in stream {stream.ptr} of memory of stream {value.stream}"


class LateModule:
    """NumPy's functions on arrays of the current stream."""

    def __getattr__(self, name: str) -> Any:
        given = getattr(np, name)
        if not callable(given) or isinstance(given, type | np.ufunc):
            return given

        def called(*args: Any, **settings: Any) -> Any:
            _operation((*args, *settings.values()), name, _written(name, args, settings))
            return late(given(*args, **settings))

        return called


def _cupy() -> ModuleType:
    cupy: Any = ModuleType("cupy")
    runtime = SimpleNamespace(eventQuery=event_query, CUDARuntimeError=CUDARuntimeError)
    cupy.cuda = SimpleNamespace(Stream=Stream, Event=Event, get_elapsed_time=elapsed_ms, runtime=runtime)
    return cupy  # type: ignore[no-any-return]


class LateDevice(SimulatedDevice):
    """See the top of this file. To open one imports ``cupy``; ``streams`` are CuPy's, in the order they were made."""

    xp = LateModule()

    def __init__(self) -> None:
        sys.modules.setdefault("cupy", _cupy())
        self.streams: list[Stream] = []

    def settle(self) -> None:
        for stream in list(_STREAMS.values()):
            stream.synchronize()

    def stream(self) -> Any:
        from dpsim.comm.cuda import gpu

        with mock.patch.object(gpu, "cuda", SimpleNamespace(external_stream=int)):
            opened = gpu.GpuStream()
        self.streams.append(opened.cupy)
        return opened

    def memory(self, size_bytes: int) -> Any:
        return _tracked(super().memory(size_bytes))

    def host_memory(self, size_bytes: int) -> Any:
        return super().memory(size_bytes)

    def copy(self, stream: Any, source: Any, target: Any) -> None:
        self._copy(stream.cupy, np.asarray(source), np.asarray(target), "a copy")

    def upload(self, stream: Any, host: Any, array: Any) -> None:
        self._copy(stream.cupy, host, np.asarray(array), "an upload")

    def download(self, stream: Any, array: Any, host: Any) -> None:
        self._copy(stream.cupy, np.asarray(array), host, "a download")

    @staticmethod
    def _copy(stream: Stream, source: NDArray[Any], target: NDArray[Any], name: str) -> None:
        """Ask for a copy, which finds the arrays by their addresses, as a device does."""
        host = weakref.ref(_owner(source if name == "an upload" else target))
        kept = target if name == "an upload" else source  # a pool of device memory gives back in the order of streams
        addresses, size_bytes = (target.ctypes.data, source.ctypes.data), source.nbytes

        def copy(kept: Any = kept) -> None:
            assert host() is not None, f"{name} with host memory that was given back meanwhile"
            ctypes.memmove(*addresses, size_bytes)

        stream.operation(copy)
        _access_array(stream, source, False, name)
        _access_array(stream, target, True, name)

    def multiply(self, gemm: Any, a: Any, b: Any, c: Any) -> None:
        _operation((a, b, c), "multiply", (c,))
        super().multiply(gemm, *map(np.asarray, (a, b, c)))

    def share(self, comm: Any, size_bytes: int, way: Any) -> PeerMemory | None:
        memory = super().share(comm, size_bytes, way)
        if memory is None:
            return None
        give_back = memory.close

        def close() -> None:
            busy = [stream.ptr for stream in self.streams if stream.reached < stream.asked]
            assert not busy or Stream.fault, f"memory is given back while streams {busy} have work"
            give_back()

        return dataclasses.replace(memory, ranks=tuple(map(_tracked, memory.ranks)), close=close)


class Watched:
    """A communicator of one rank, which meets others only when the device has done all that it was asked for."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.met = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(MPI.COMM_SELF, name)

    def Barrier(self) -> None:
        self._meet()

    def Ibarrier(self) -> Any:
        self._meet()
        return MPI.COMM_SELF.Ibarrier()

    def _meet(self) -> None:
        assert all(stream.reached == stream.asked for stream in self._device.streams), "the device still works"
        self.met += 1


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    """The array whose life is that of the memory."""
    return array.base if isinstance(array.base, np.ndarray) else array


@contextlib.contextmanager
def _launches_in_streams() -> Iterator[None]:
    """While it is open, kernels of the simulator are operations of their streams, and access what they do."""
    from numba.cuda.simulator import kernel as simulator_kernel

    from dpsim.kernels.allreduce.cuda import simulated

    kernel, touched = simulator_kernel.FakeCUDAKernel, set[tuple[int, int, bool]]()
    configure, launch, memory = kernel.__getitem__, kernel.__call__, simulated._memory

    def configured(self: Any, configuration: Any) -> Any:
        self.stream = configuration[2] if len(configuration) > 2 else 0
        return configure(self, configuration)

    def launched(self: Any, *arguments: Any) -> None:
        if self._device or simulator_kernel._kernel_context:
            return launch(self, *arguments)
        stream = _STREAMS[int(self.stream)]
        stream.operation()
        touched.clear()
        launch(self, *arguments)
        for writes in (False, True):
            for start, stop in _joined((start, stop) for start, stop, wrote in touched if wrote is writes):
                _access(stream, start, stop, writes, f"a kernel ({self.fn.__qualname__})")

    def noted(address: int, dtype: Any, count: int) -> Any:
        writes = sys._getframe(1).f_code.co_name.startswith("write")
        touched.add((int(address), int(address) + np.dtype(dtype).itemsize * count, writes))
        return memory(address, dtype, count)

    with (
        mock.patch.object(kernel, "__getitem__", configured),
        mock.patch.object(kernel, "__call__", launched),
        mock.patch.object(simulated, "_memory", noted),
    ):
        yield


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges, neighbours as one."""
    first, last = 0, 0
    for start, stop in sorted(ranges):
        if start > last:
            if last:
                yield first, last
            first = start
        last = max(last, stop)
    if last:
        yield first, last


@contextlib.contextmanager
def late_devices() -> Iterator[None]:
    """While it is open, the simulator's device is a late one, and nothing of CuPy is imported before one is opened."""
    before = _without_cupy()
    try:
        with mock.patch.object(simulator, "SimulatedDevice", LateDevice), _launches_in_streams(), short_turns():
            yield
    finally:
        _without_cupy()
        for name, module in before.items():
            sys.modules[name] = module
            if name != "cupy":
                setattr(dpsim.comm.cuda, name.rpartition(".")[2], module)
        Stream.fault = False
        _BLOCKS.clear()
        _THREAD.stream = _NULL_STREAM


def _without_cupy() -> dict[str, ModuleType]:
    """Forget CuPy and the modules that were imported over it; returns them."""
    names = ("cupy", "dpsim.comm.cuda.gpu", "dpsim.comm.cuda.ipc")
    imported = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name in imported.keys() - {"cupy"}:
        delattr(dpsim.comm.cuda, name.rpartition(".")[2])
    return imported
