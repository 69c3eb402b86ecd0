"""An array module that behaves as one of a GPU does towards code written for NumPy: what CuPy refuses, it refuses.

Its arrays are NumPy's in the host's memory, of a class of their own. Mixing them with host arrays, or turning one into a
host array or a number without saying so, is an error; reductions to one element stay arrays; and the module has only
functions that CuPy has too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

IN_CUPY = frozenset(
    """
    abs add all any arange argmax asarray copyto count_nonzero cumsum divide einsum empty exp greater greater_equal
    hstack isfinite isnan less log matmul maximum minimum multiply negative ones power repeat split sqrt square stack
    subtract sum tile where zeros
    """.split()
)
"""Functions of CuPy that the operations use, with the same arguments there (CuPy 13 and 14, API reference)."""


class StrictArray(np.ndarray):  # type: ignore[type-arg]
    """An array that pretends to be in the memory of a GPU."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        outs = settings.get("out", ())
        _refuse_host((*inputs, *outs), f"{ufunc.__name__}.{method}")
        plain = {name: value for name, value in settings.items() if name != "out"}
        if outs:
            plain["out"] = tuple(map(host, outs))
        result = getattr(ufunc, method)(*map(host, inputs), **plain)
        return outs[0] if outs else strict(result)

    def __array_function__(self, function: Any, types: Any, args: Any, settings: Any) -> Any:
        return _called(function, args, settings)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an implicit conversion to a host array")

    def __getitem__(self, index: Any) -> Any:
        _refuse_host(index if isinstance(index, tuple) else (index,), "an index")
        return strict(host(self)[_host_of(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_host((*(index if isinstance(index, tuple) else (index,)), value), "an assignment")
        host(self)[_host_of(index)] = host(value)


def _method(name: str) -> Callable[..., Any]:
    def method(self: StrictArray, *args: Any, **settings: Any) -> Any:
        _refuse_host((*args, *settings.values()), name)
        return strict(getattr(host(self), name)(*map(host, args), **{key: host(v) for key, v in settings.items()}))

    return method


for _name in ("sum", "max", "min", "mean", "argmax", "all", "any"):
    setattr(StrictArray, _name, _method(_name))


def _conversion(name: str) -> Callable[[StrictArray], Any]:
    def convert(self: StrictArray) -> Any:
        global synchronisations
        synchronisations += 1
        return getattr(host(self), name)()

    return convert


synchronisations = 0
"""How often a value was fetched: each would wait for a GPU."""
for _name in ("__float__", "__int__", "__bool__", "__index__", "item"):
    setattr(StrictArray, _name, _conversion(_name))


def _listed(self: StrictArray) -> list[Any]:
    raise TypeError("tolist fetches element by element")


setattr(StrictArray, "tolist", _listed)


def strict(value: Any) -> Any:
    """The same array as a ``StrictArray``; NumPy's scalars become arrays of one element, as CuPy's reductions are."""
    if isinstance(value, list | tuple):
        return type(value)(map(strict, value))
    return np.asarray(value).view(StrictArray) if isinstance(value, np.ndarray | np.generic) else value


def host(value: Any) -> Any:
    """The same array as NumPy's own."""
    return np.ndarray.view(value, np.ndarray) if isinstance(value, StrictArray) else value


def _host_of(index: Any) -> Any:
    return tuple(map(host, index)) if isinstance(index, tuple) else host(index)


def _refuse_host(values: Iterable[Any], where: str) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _refuse_host(value, where)
        elif isinstance(value, np.ndarray) and not isinstance(value, StrictArray):
            raise TypeError(f"a host array of shape {value.shape} in {where}")


def _called(function: Any, args: Any, settings: Any) -> Any:
    _refuse_host((*args, *settings.values()), getattr(function, "__name__", str(function)))
    if function.__name__ not in IN_CUPY | {"as_strided"}:
        raise AttributeError(f"CuPy has no {function.__name__}, or the list of what it has lacks it")
    out = settings.get("out")
    plain = {name: _deep(value) for name, value in settings.items()}
    result = function(*map(_deep, args), **plain)
    return out if out is not None else strict(result)


def _deep(value: Any) -> Any:
    return type(value)(map(_deep, value)) if isinstance(value, list | tuple) else host(value)


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
            return function

        def called(*args: Any, **settings: Any) -> Any:
            return _called(function, args, settings)

        return called

    @staticmethod
    def errstate(**_: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
