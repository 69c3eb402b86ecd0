"""An array module that behaves as one of a GPU does towards code written for NumPy: what CuPy refuses, it refuses.

Its arrays are NumPy's in the host's memory, of a class of their own. Mixing them with host arrays, or turning one into
a host array without saying so, is an error; reductions to one element stay arrays; and the module has only functions
that CuPy has too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from cupy_signatures import Call
from numpy.typing import NDArray

from dpsim.memory import HostMemory

IN_CUPY = {
    "abs",
    "add",
    "all",
    "any",
    "arange",
    "argmax",
    "asarray",
    "copyto",
    "count_nonzero",
    "cumsum",
    "divide",
    "einsum",
    "empty",
    "exp",
    "greater",
    "greater_equal",
    "hstack",
    "isfinite",
    "isnan",
    "less",
    "log",
    "matmul",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "ones",
    "power",
    "repeat",
    "split",
    "sqrt",
    "square",
    "stack",
    "subtract",
    "sum",
    "tile",
    "where",
    "zeros",
}
"""Functions of CuPy that the operations use, with the same arguments there (CuPy 13 and 14, API reference)."""


_CALLS: list[set[Call]] = []


@contextlib.contextmanager
def called() -> Iterator[set[Call]]:
    """What is called while it is open, under CuPy's names for it: functions, ufuncs, and methods of arrays."""
    calls: set[Call] = set()
    _CALLS.append(calls)
    try:
        yield calls
    finally:
        _CALLS.remove(calls)


def _record(name: str, args: Sequence[Any], settings: Iterable[str]) -> None:
    for calls in _CALLS:
        calls.add(Call(f"cupy.{name}", len(args), tuple(settings)))


class StrictArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that pretends to be in the memory of a GPU. Not one of NumPy's: nothing takes it for a host array."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._host = values

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        outs = settings.pop("out", ())
        _refuse_host((*inputs, *outs, *settings.values()), f"{ufunc.__name__}.{method}")
        if outs:
            settings["out"] = tuple(map(host, outs))
        if method == "__call__":
            _record(ufunc.__name__, inputs, settings)
        result = getattr(ufunc, method)(*map(host, inputs), **settings)
        return outs[0] if outs else strict(result)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, settings: Any) -> Any:
        return _called(function, args, settings)

    @property
    def base(self) -> Any:
        """What every view of it refers to as well."""
        return self._host if self._host.base is None else self._host.base

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an implicit conversion to a host array")

    def __getitem__(self, index: Any) -> Any:
        _refuse_host(_parts(index), "an index")
        return strict(self._host[_deep(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_host((*_parts(index), value), "an assignment")
        self._host[_deep(index)] = host(value)

    def __getattr__(self, name: str) -> Any:
        if name in _CONVERSIONS:
            raise TypeError(f"{name} fetches element by element")
        value = getattr(self._host, name)
        if not callable(value):
            return strict(value)

        def method(*args: Any, **settings: Any) -> Any:
            _refuse_host((*args, *settings.values()), name)
            _record(f"ndarray.{name}", args, settings)
            return strict(value(*_deep(args), **{key: host(each) for key, each in settings.items()}))

        return method

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[Any]:
        return map(strict, self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)


_CONVERSIONS = ("tolist", "tobytes", "ctypes", "data", "__array_interface__", "__array_struct__")


def strict(value: Any) -> Any:
    """The same array as a ``StrictArray``; NumPy's scalars become arrays of one element, as CuPy's reductions are."""
    if isinstance(value, list):
        return [strict(each) for each in value]
    return StrictArray(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def host(value: Any) -> Any:
    """The same array as NumPy's own."""
    return value._host if isinstance(value, StrictArray) else value


def _deep(value: Any) -> Any:
    return type(value)(map(_deep, value)) if isinstance(value, list | tuple) else host(value)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _refuse_host(values: Iterable[Any], where: str) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _refuse_host(value, where)
        elif isinstance(value, np.ndarray):
            raise TypeError(f"a host array of shape {value.shape} in {where}")


def _called(function: Callable[..., Any], args: Any, settings: Any) -> Any:
    name = getattr(function, "__name__", str(function))
    if name not in IN_CUPY:
        raise AttributeError(f"CuPy has no {name}, or the list of what it has lacks it")
    _refuse_host((*args, *settings.values()), name)
    _record(name, args, settings)
    out = settings.get("out")
    result = function(*_deep(args), **{key: _deep(value) for key, value in settings.items()})
    return strict(result) if out is None else out


@contextlib.contextmanager
def nothing_waited_for() -> Iterator[None]:
    """While it is open, a strict array of one element is no number either: its value would have to be waited for."""

    def refused(self: StrictArray) -> Any:
        raise TypeError("the host waits for a value")

    before = {name: getattr(StrictArray, name) for name in ("__float__", "__int__", "__bool__")}
    try:
        for name in before:
            setattr(StrictArray, name, refused)
        yield
    finally:
        for name, conversion in before.items():
            setattr(StrictArray, name, conversion)


class StrictMemory(HostMemory):
    """``dpsim.memory.Memory`` of strict arrays: values go in by ``upload`` and come out by ``fetch``."""

    deferred = True

    def __init__(self) -> None:
        self.xp = StrictModule()

    def upload(self, name: str, host: Any) -> Any:
        return self.xp.asarray(host)

    def fetch(self, arrays: Sequence[Any]) -> list[Any]:
        return [np.array(host(array)) for array in arrays]

    def address(self, array: Any) -> int:
        return super().address(host(array))


class _StrideTricks:
    @staticmethod
    def as_strided(x: StrictArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return strict(np.lib.stride_tricks.as_strided(host(x), shape, strides))


class _Lib:
    stride_tricks = _StrideTricks


class StrictModule:
    """The module of ``StrictArray``: NumPy's functions by name, those of them that CuPy has."""

    lib = _Lib

    def asarray(self, values: Any, dtype: Any = None) -> Any:
        """An array on the device of anything; of a host array it is a copy, as an upload is."""
        return strict(np.array(host(values), dtype))

    def __getattr__(self, name: str) -> Any:
        if name not in IN_CUPY:
            raise AttributeError(f"CuPy has no {name}, or the list of what it has lacks it")
        function = getattr(np, name)
        if isinstance(function, np.ufunc):
            return _Ufunc(function)

        return lambda *args, **settings: _called(function, args, settings)

    @staticmethod
    def errstate(**_: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Ufunc:
    """A ufunc that refuses host arrays even where all of its arguments are."""

    def __init__(self, function: np.ufunc) -> None:
        self._function = function

    def __call__(self, *args: Any, **settings: Any) -> Any:
        _refuse_host((*args, *settings.values()), self._function.__name__)
        _record(self._function.__name__, args, settings)
        return strict(self._function(*args, **settings))

    def reduce(self, *args: Any, **settings: Any) -> Any:
        _refuse_host((*args, *settings.values()), f"{self._function.__name__}.reduce")
        _record(f"{self._function.__name__}.reduce", args, settings)
        return self._function.reduce(*args, **settings)
