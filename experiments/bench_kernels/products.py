"""Products and convolutions: each candidate, and PyTorch's, timed in turns after a check."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpsim.choices import Problem
from dpsim.nn.implementations import Candidate, Timing, argument_sets
from dpsim.replica import Array

TORCH = "torch"
NETWORKS: dict[str, tuple[str, tuple[int, int, int]]] = {
    "mlp": ("mlp:2048,2048,2048", (28, 28, 1)),
    "resnet20": ("resnet20", (32, 32, 3)),
    "cnn": ("cnn", (8, 8, 1)),
    "mlp:64x20": ("mlp:64x20", (8, 8, 1)),
    "mlp:256,256": ("mlp", (8, 8, 1)),
}
"""A name, and the model and pictures it stands for."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Median seconds of each candidate for one problem; the fastest of dpsim's own over PyTorch's, in turns."""

    problem: str
    operation: str
    samples: int
    sizes: tuple[int, ...]
    time_s: dict[str, float]
    fastest: str
    over_torch: float | None


def torch_version() -> str:
    return importlib.metadata.version(TORCH) if importlib.util.find_spec(TORCH) is not None else "not installed"


def row(problem: Problem, seconds: float) -> Row:
    """The times of one problem. Raises ``AssertionError`` where two candidates do not compute the same."""
    others = {TORCH: _torch(problem)} if importlib.util.find_spec(TORCH) is not None else {}
    timing = Timing(problem, others)
    _check(problem, timing.candidates)
    for warm_up in timing.warm_ups():
        warm_up()
    timing.run(seconds, least=6, most=100)
    own = {name: times for name, times in timing.times.items() if name != TORCH}
    fastest = min(own, key=lambda name: statistics.median(own[name]))
    pairs = zip(own[fastest], timing.times.get(TORCH, []), strict=False)
    ratios = [ours / theirs for ours, theirs in pairs]
    return Row(
        problem=problem.name,
        operation=problem.operation,
        samples=problem.rows,
        sizes=problem.sizes,
        time_s={name: statistics.median(times) for name, times in timing.times.items()},
        fastest=fastest,
        over_torch=statistics.median(ratios) if ratios else None,
    )


def _check(problem: Problem, candidates: dict[str, Candidate]) -> None:
    """Every candidate computes what NumPy's does."""
    given = argument_sets(problem)[0]
    out = next(array for array in reversed(given) if isinstance(array, np.ndarray))
    expected: Array | None = None
    for name, candidate in candidates.items():
        out[...] = np.nan
        candidate(*given)
        if expected is None:
            expected = out.copy()
        atol = 1e-4 * float(np.abs(expected).max())
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=atol, err_msg=f"{name} for {problem.name}")


def _torch(problem: Problem) -> Candidate:
    """PyTorch on the same memory, one thread, convolutions channels last; tensors are made once an array."""
    import torch

    torch.set_num_threads(1)
    tensors: dict[int, Any] = {}

    def tensor(array: Array, change: Callable[[Any], Any] = lambda result: result) -> Any:
        if (result := tensors.get(id(array))) is None:
            result = tensors[id(array)] = change(torch.from_numpy(array))
        return result

    def pictures(array: Array) -> Any:
        return tensor(array, lambda result: result.permute(0, 3, 1, 2))

    def weights(array: Array) -> Any:
        return tensor(array, lambda result: result.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last))

    def kept(of: Array, result: Any) -> None:
        """Into the given array, in the check before the timing alone: a copy that a training would not make."""
        if np.isnan(of.flat[0]):
            of[...] = result.numpy()

    def product(x: Array, weight: Array, out: Array) -> None:
        torch.matmul(tensor(x), tensor(weight), out=tensor(out))

    def product_with_transposed(grad: Array, weight: Array, out: Array) -> None:
        torch.matmul(tensor(grad), tensor(weight).T, out=tensor(out))

    def transposed_product(x: Array, grad: Array, out: Array) -> None:
        torch.matmul(tensor(x).T, tensor(grad), out=tensor(out))

    def conv2d(x: Array, weight: Array, stride: int, out: Array, work: object) -> None:
        result = torch.nn.functional.conv2d(pictures(x), weights(weight), None, stride, weight.shape[0] // 2)
        kept(out, result.permute(0, 2, 3, 1))

    def backward(grad: Any, x: Any, weight: Any, stride: int, side: int, mask: list[bool]) -> Any:
        steps, border = [stride, stride], [side // 2, side // 2]
        call = torch.ops.aten.convolution_backward
        return call(grad, x, weight, None, steps, border, [1, 1], False, [0, 0], 1, mask)

    def conv2d_input_gradient(grad: Array, weight: Array, stride: int, out: Array, work: object) -> None:
        result = backward(pictures(grad), pictures(out), weights(weight), stride, weight.shape[0], [True, False, False])
        kept(out, result[0].permute(0, 2, 3, 1))

    def conv2d_weight_gradient(x: Array, grad: Array, leaves: object, stride: int, out: Array, work: object) -> None:
        mask = [False, True, False]
        result = backward(pictures(grad), pictures(x), weights(out), stride, out.shape[0], mask)
        kept(out, result[1].permute(2, 3, 1, 0))

    every: dict[str, Candidate] = {
        candidate.__name__: candidate
        for candidate in (
            product,
            product_with_transposed,
            transposed_product,
            conv2d,
            conv2d_input_gradient,
            conv2d_weight_gradient,
        )
    }
    return every[problem.operation]
