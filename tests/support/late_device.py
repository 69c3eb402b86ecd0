"""A device whose work is done late, as that of a GPU is: what numba's simulator, always ready, hides from the host.

Its streams and events are those of ``dpsim.comm.cuda.gpu``, over a stand-in for CuPy with CUDA's rules: operations on
arrays run in the calling thread's current stream; an event is complete when the host has waited for it or has asked
often enough; the time between events that are not complete is refused; and a fault is told only to a host that asks.
The values themselves are NumPy's, computed at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

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
_NUMBERS = itertools.count()
_THREAD = threading.local()


class Stream:
    """``cupy.cuda.Stream``. At its operation number ``fails_at`` the device fails, which all streams then tell.

    ``points``: what is done when all of its work is done, of this stream and of those that it follows.
    """

    fault = False

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(_NUMBERS)
        self.points: dict[Stream, int] = {}
        self.asked = self.reached = 0
        self.fails_at: int | None = None
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()

    def use(self) -> None:
        _THREAD.stream = self

    def operation(self, work: Callable[[], None] | None = None) -> None:
        """Ask for one more piece of work; ``work`` is done when the host waits for it and not before."""
        self.asked += 1
        self.points[self] = self.asked
        if work is not None:
            self._queue.append((self.asked, work))
        Stream.fault = Stream.fault or self.asked == self.fails_at

    def finish(self, point: int) -> None:
        while self._queue and self._queue[0][0] <= point:
            self._queue.popleft()[1]()
        self.reached = max(self.reached, point)

    def wait_event(self, event: Event) -> None:
        for stream, point in event.points.items():
            self.points[stream] = max(point, self.points.get(stream, 0))

    def synchronize(self) -> None:
        _wait(self.points)


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
        _operation((*inputs, *settings.values()), ufunc.__name__)
        outs = settings.get("out", ())
        given = {name: _on_host(value) for name, value in settings.items()}
        result = getattr(ufunc, method)(*map(_on_host, inputs), **given)
        return outs[0] if outs else late(result)

    def __array_function__(self, function: Any, types: Any, args: Any, settings: Any) -> Any:
        _operation((*args, *settings.values()), function.__name__)
        return late(super().__array_function__(function, types, args, settings))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, np.ndarray | list) for part in parts):
            _operation((self, *parts), "an index")
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _operation((self, index, value), "an assignment")
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


def _operation(values: Iterable[Any], name: str) -> None:
    """Put an operation into the current stream, which must be that of all arrays it is about."""
    stream = current()
    stream.operation()
    _refuse_others(values, stream, name)


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
            _operation((*args, *settings.values()), name)
            return late(given(*args, **settings))

        return called


def _cupy() -> ModuleType:
    cupy: Any = ModuleType("cupy")
    runtime = SimpleNamespace(eventQuery=event_query, CUDARuntimeError=CUDARuntimeError)
    cupy.cuda = SimpleNamespace(Stream=Stream, Event=Event, get_elapsed_time=elapsed_ms, runtime=runtime)
    return cupy  # type: ignore[no-any-return]


class LateDevice(SimulatedDevice):
    """See the top of this file. To open one imports ``cupy``; ``streams`` are CuPy's, in the order they were made.

    ``defers_copies``: copies are done when the host waits for them. Kernels would not find what was copied.
    """

    xp = LateModule()
    defers_copies = False

    def __init__(self) -> None:
        sys.modules.setdefault("cupy", _cupy())
        self.streams: list[Stream] = []

    def settle(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def stream(self) -> Any:
        from dpsim.comm.cuda import gpu

        with mock.patch.object(gpu, "cuda", SimpleNamespace(external_stream=int)):
            opened = gpu.GpuStream()
        self.streams.append(opened.cupy)
        return opened

    def memory(self, size_bytes: int) -> Any:
        return late(super().memory(size_bytes))

    def host_memory(self, size_bytes: int) -> Any:
        return np.asarray(super().memory(size_bytes))

    def copy(self, stream: Any, source: Any, target: Any) -> None:
        self._in(stream, super().copy, source, target)

    def upload(self, stream: Any, host: Any, array: Any) -> None:
        self._in(stream, super().upload, host, array)

    def download(self, stream: Any, array: Any, host: Any) -> None:
        self._in(stream, super().download, array, host)

    def _in(self, stream: Any, copy: Callable[..., None], source: Any, target: Any) -> None:
        work = functools.partial(copy, stream, np.asarray(source), np.asarray(target))
        stream.cupy.operation(work if self.defers_copies else None)
        if not self.defers_copies:
            work()

    def multiply(self, gemm: Any, a: Any, b: Any, c: Any) -> None:
        _operation((a, b, c), "multiply")
        super().multiply(gemm, *map(np.asarray, (a, b, c)))

    def share(self, comm: Any, size_bytes: int, way: Any) -> PeerMemory | None:
        memory = super().share(comm, size_bytes, way)
        return memory and dataclasses.replace(memory, ranks=tuple(map(late, memory.ranks)))


@contextlib.contextmanager
def late_devices() -> Iterator[None]:
    """While it is open, the simulator's device is a late one, and nothing of CuPy is imported before one is opened."""
    before = _without_cupy()
    try:
        with mock.patch.object(simulator, "SimulatedDevice", LateDevice):
            yield
    finally:
        _without_cupy()
        for name, module in before.items():
            sys.modules[name] = module
            if name != "cupy":
                setattr(dpsim.comm.cuda, name.rpartition(".")[2], module)
        Stream.fault = False
        _THREAD.stream = _NULL_STREAM


def _without_cupy() -> dict[str, ModuleType]:
    """Forget CuPy and the modules that were imported over it; returns them."""
    names = ("cupy", "dpsim.comm.cuda.gpu", "dpsim.comm.cuda.ipc")
    imported = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name in imported.keys() - {"cupy"}:
        delattr(dpsim.comm.cuda, name.rpartition(".")[2])
    return imported
