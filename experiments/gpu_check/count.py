"""Counts what a training step asks of a GPU: kernels and copies, and the bytes they read and write, by layer.

``python -m dpsim.experiments.gpu_check.count [--model resnet20] [--batch 512] [--by operation] [--library]``

It needs no GPU: forward, backward and update run with arrays of the host in the place of CuPy's, where every function
that would be a kernel there counts as one call, and each kernel of this project counts instead of being run. The bytes
are those of the call's operands, each once, however often caches are asked for them; a view of overlapping windows
counts as what it stands for. So they are a lower bound of what a device moves, and no measurement. ``--library``
counts without this project's kernels of layers: everything is then a function of the array module.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpsim.experiments import command
from dpsim.kernels.layers_cuda import LayerKernels
from dpsim.memory import HostMemory
from dpsim.nn import build_model
from dpsim.replica import Batch
from dpsim.workload import Tensor

_VIEWS = frozenset({"reshape", "broadcast_to", "split", "empty", "as_strided"})
"""Functions of the array module that make no kernel."""


@dataclass
class Tally:
    """Calls, bytes read and bytes written by (layer, pass, operation); ``location`` is (layer, pass) under way."""

    location: tuple[str, str] = ("", "")
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    read_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    written_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def count(self, operation: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        key = (*self.location, operation)
        self.calls[key] += 1
        self.read_bytes[key] += sum(map(_bytes, reads))
        self.written_bytes[key] += sum(map(_bytes, writes))


TALLY = Tally()


def _bytes(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else 0


class CountedArray(np.ndarray[Any, Any]):
    """An array whose operations count; none is computed that has an array to write into."""

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.__array_interface__

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        outs = settings.get("out", ())
        TALLY.count(f"{ufunc.__name__}{'.reduce' * (method == 'reduce')}", inputs, outs)
        if outs:
            return outs[0]
        with np.errstate(all="ignore"):
            result = getattr(ufunc, method)(*map(_plain, inputs), **settings)
        TALLY.written_bytes[*TALLY.location, f"{ufunc.__name__}{'.reduce' * (method == 'reduce')}"] += _bytes(result)
        return counted(result)

    def __array_function__(self, function: Any, types: Any, args: Any, settings: Any) -> Any:
        return _called(function, args, settings)

    def __setitem__(self, index: Any, value: Any) -> None:
        TALLY.count("copy", [value], [_plain(self)[_plain(index)]])

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, np.ndarray | list) for part in parts):
            TALLY.count("gather", [result, *parts], [result])
        return result


def _method(name: str) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **settings: Any) -> Any:
        result = getattr(_plain(self), name)(*map(_plain, args), **settings)
        TALLY.count(name, [self], [result])
        return counted(result)

    return called


for _name in ("argmax", "astype", "copy", "max", "mean", "sum"):
    setattr(CountedArray, _name, _method(_name))


def counted(value: Any) -> Any:
    """Return the same as counted arrays; CuPy's reductions to one element are arrays too."""
    if isinstance(value, list):
        return [counted(each) for each in value]
    return np.asarray(value).view(CountedArray) if isinstance(value, np.ndarray | np.generic) else value


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.view(np.ndarray) if isinstance(value, CountedArray) else value


def _called(function: Any, args: Any, settings: Any) -> Any:
    name = function.__name__
    if name == "copyto":
        return TALLY.count("copy", [args[1]], [args[0]])
    result = counted(function(*_plain(args), **{key: _plain(value) for key, value in settings.items()}))
    if name not in _VIEWS:
        TALLY.count(name, _arrays(args), _arrays(result))
    return result


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _arrays(each)
    else:
        yield value


class _CountedModule:
    """NumPy's functions, counted."""

    lib = np.lib

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if isinstance(function, np.ufunc):
            return function
        return lambda *args, **settings: _called(function, args, settings)


class _CountedKernels(LayerKernels):
    """Kernels that count instead of being run."""

    def launch(
        self, kernel: Any, grid: tuple[int, int], reads: Sequence[Any], writes: Sequence[Any], numbers: tuple[Any, ...]
    ) -> None:
        name = kernel.py_func.__qualname__.partition(".")[0]
        TALLY.count(f"kernel {name}", reads, writes)


class CountedMemory(HostMemory):
    """The memory of a device that counts. ``kernels``: whether it has this project's kernels of layers."""

    deferred = True

    def __init__(self, kernels: bool) -> None:
        self.xp = _CountedModule()
        self._kernels = _CountedKernels(None, self.zeros) if kernels else None

    def zeros(self, size_bytes: int) -> Any:
        return super().zeros(size_bytes).view(CountedArray)

    def upload(self, name: str, host: Any) -> Any:
        TALLY.count("upload", [], [host])
        return counted(np.asarray(host))

    def layer_kernels(self) -> Any:
        return self._kernels


class _Locations:
    """Events of a step: what is computed next belongs to the next layer."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def forward_done(self, layer: int) -> None:
        following = self._names[layer + 1] if layer + 1 < len(self._names) else "loss"
        TALLY.location = (following, "forward")

    def loss_done(self) -> None:
        TALLY.location = (self._names[-1], "backward")

    def gradients_ready(self, layer: int) -> None: ...

    def backward_done(self, layer: int) -> None:
        TALLY.location = (self._names[layer - 1], "backward") if layer else ("update", "update")


def counted_step(model: str, shape: tuple[int, int, int], batch: int, kernels: bool) -> Tally:
    """Count what one step asks for; the update is one kernel of parameters, gradients and velocity."""
    global TALLY
    network = build_model(model, shape, 10)
    memory = CountedMemory(kernels)
    network.compute_in(memory)
    tensors = [tensor for layer in network.layers for tensor in layer.tensors]
    flat = [memory.zeros(4 * sum(math.prod(t.shape) for t in tensors)).view(np.float32) for _ in range(3)]
    parameters, gradients = (_tensors(values, tensors) for values in flat[:2])
    network.bind(parameters, gradients)
    x, labels = np.zeros((batch, *shape), np.float32), np.zeros(batch, np.int64)
    names = [layer.name for layer in network.layers]
    for _ in range(2):  # the first step allocates
        TALLY = Tally(location=(names[0], "forward"))
        network.forward_backward(Batch(x=x, labels=labels, leaves=(0, batch)), _Locations(names))
        TALLY.count("kernel sgd", flat, [flat[0], flat[2]])
    return TALLY


def _tensors(flat: Any, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the tensors of a flat array, as in one bucket: the last ones first, without gaps."""
    views, start = {}, 0
    for tensor in reversed(tensors):
        size = math.prod(tensor.shape)
        views[tensor.name] = flat[start : start + size].reshape(tensor.shape)
        start += size
    return views


def table(tally: Tally, by: str) -> str:
    """Return rows of calls and megabytes by layer (its passes in columns) or by operation, and their sums."""
    keep: Callable[[tuple[str, str, str]], str] = (lambda key: key[2]) if by == "operation" else (lambda key: key[0])
    rows: dict[str, list[int]] = {}
    for key, calls in tally.calls.items():
        row = rows.setdefault(keep(key), [0, 0, 0])
        for index, value in enumerate((calls, tally.read_bytes[key], tally.written_bytes[key])):
            row[index] += value
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"{by:28s}{'calls':>8s}{'read':>14s}{'written':>14s}"]
    for name, (calls, read, written) in rows.items():
        lines.append(f"{name:28s}{calls:8d}{read / 1e6:11.1f} MB{written / 1e6:11.1f} MB")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    options = command.parser("gpu_check.count", __doc__)
    options.add_argument("--model", default="resnet20")
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--by", choices=("layer", "operation"), default="layer")
    options.add_argument("--library", action="store_true", help="without this project's kernels of layers")
    given = options.parse_args(arguments)
    if given.batch < 1:
        options.error("--batch must be 1 or more")

    def run() -> None:
        print(table(counted_step(given.model, (32, 32, 3), given.batch, not given.library), given.by))

    return command.ended("gpu-check", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
