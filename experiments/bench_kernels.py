"""``python -m dpsim.experiments.bench_kernels``: every candidate for every operation of the built-in networks.

Each is checked against NumPy's before it is timed; all take turns in one process of one thread. The second table has
what is done between products and convolutions, which has one implementation besides NumPy's: shapes are those of
ResNet-20, local batch 64, float32, and times the core time of one thread, which other processes disturb least.
``--json`` prints one object.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from dpsim import processor
from dpsim.choices import Problem
from dpsim.experiments import command
from dpsim.kernels import update
from dpsim.nn import build_model
from dpsim.nn.array_ops import NumpyOps
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.implementations import Candidate, Timing, argument_sets
from dpsim.replica import Array
from dpsim.study.loop import StopRule, in_turns

TORCH = "torch"
NETWORKS: dict[str, tuple[str, tuple[int, int, int]]] = {
    "mlp": ("mlp:2048,2048,2048", (28, 28, 1)),
    "resnet20": ("resnet20", (32, 32, 3)),
    "cnn": ("cnn", (8, 8, 1)),
    "mlp:64x20": ("mlp:64x20", (8, 8, 1)),
    "mlp:256,256": ("mlp", (8, 8, 1)),
}
"""A name, and the model and pictures it stands for."""
CPU, NUMPY = CpuOps(), NumpyOps()
_BATCH, _PARAMETERS = 64, 272_474
_ACTIVATIONS = ((32, 16), (16, 32), (8, 64))
"""Sides and channels of the pictures between the layers of ResNet-20."""
_ROUNDS = StopRule(least_rounds=15, most_rounds=15)
_Row = dict[str, Any]


def candidate_times(problem: Problem, seconds: float) -> _Row:
    """Return the median seconds of each candidate for a problem, and the fastest of dpsim's own over PyTorch's.

    Raises ``AssertionError`` where two candidates do not compute the same.
    """
    timing = Timing(problem, {TORCH: _torch(problem)} if importlib.util.find_spec(TORCH) is not None else {})
    _check(problem, timing.candidates)
    for warm_up in timing.warm_ups():
        warm_up()
    timing.run(seconds, least=6, most=100)
    medians = {name: statistics.median(times) for name, times in timing.times.items()}
    fastest = min((name for name in medians if name != TORCH), key=lambda name: medians[name])
    pairs = zip(timing.times[fastest], timing.times.get(TORCH, []), strict=False)
    ratios = [own / other for own, other in pairs]
    return {
        "problem": problem.name,
        "operation": problem.operation,
        "samples": problem.rows,
        "sizes": problem.sizes,
        "time_s": medians,
        "fastest": fastest,
        "over_torch": statistics.median(ratios) if ratios else None,
    }


def _check(problem: Problem, candidates: dict[str, Candidate]) -> None:
    """Raise ``AssertionError`` unless every candidate computes what the first, NumPy's, does."""
    given = argument_sets(problem)[0]
    out = next(array for array in reversed(given) if isinstance(array, np.ndarray))
    expected: Array | None = None
    for name, candidate in candidates.items():
        out[...] = np.nan
        candidate(*given)
        expected = out.copy() if expected is None else expected
        atol = 1e-4 * float(np.abs(expected).max())
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=atol, err_msg=f"{name} for {problem.name}")


def _torch(problem: Problem) -> Candidate:
    """Return PyTorch on the same memory, one thread, convolutions channels last; tensors are made once an array."""
    import torch

    torch.set_num_threads(1)
    tensors: dict[int, Any] = {}

    def tensor(array: Array, change: Callable[[Any], Any] = lambda result: result) -> Any:
        if (result := tensors.get(id(array))) is None:
            result = tensors[id(array)] = change(torch.from_numpy(array))
        return result

    pictures = partial(tensor, change=lambda result: result.permute(0, 3, 1, 2))
    weights = partial(
        tensor, change=lambda result: result.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    )

    def kept(of: Array, result: Any, *axes: int) -> None:
        """Copy into the given array, in the check before the timing alone: a training would make no such copy."""
        if np.isnan(of.flat[0]):
            of[...] = result.permute(*axes).numpy()

    def product(x: Array, weight: Array, out: Array) -> None:
        torch.matmul(tensor(x), tensor(weight), out=tensor(out))

    def product_with_transposed(grad: Array, weight: Array, out: Array) -> None:
        torch.matmul(tensor(grad), tensor(weight).T, out=tensor(out))

    def transposed_product(x: Array, grad: Array, out: Array) -> None:
        torch.matmul(tensor(x).T, tensor(grad), out=tensor(out))

    def conv2d(x: Array, weight: Array, stride: int, out: Array, work: object) -> None:
        result = torch.nn.functional.conv2d(pictures(x), weights(weight), None, stride, weight.shape[0] // 2)
        kept(out, result, 0, 2, 3, 1)

    def backward(grad: Any, x: Any, weight: Any, stride: int, side: int, mask: list[bool]) -> Any:
        steps, border = [stride, stride], [side // 2, side // 2]
        call = torch.ops.aten.convolution_backward
        return call(grad, x, weight, None, steps, border, [1, 1], False, [0, 0], 1, mask)

    def conv2d_input_gradient(grad: Array, weight: Array, stride: int, out: Array, work: object) -> None:
        result = backward(pictures(grad), pictures(out), weights(weight), stride, weight.shape[0], [True, False, False])
        kept(out, result[0], 0, 2, 3, 1)

    def conv2d_weight_gradient(x: Array, grad: Array, leaves: object, stride: int, out: Array, work: object) -> None:
        result = backward(pictures(grad), pictures(x), weights(out), stride, out.shape[0], [False, True, False])
        kept(out, result[1], 2, 3, 1, 0)

    products = (product, product_with_transposed, transposed_product)
    convolutions = (conv2d, conv2d_input_gradient, conv2d_weight_gradient)
    return {candidate.__name__: candidate for candidate in (*products, *convolutions)}[problem.operation]


class Pass(NamedTuple):
    """An operation on some arrays, by a kernel and by NumPy, which must leave the same in ``outputs``.

    It moves ``size_bytes`` of memory.
    """

    operation: str
    shape: str
    size_bytes: float
    outputs: tuple[Array, ...]
    kernel: Callable[[], object]
    numpy: Callable[[], object]


def passes() -> Iterator[Pass]:
    """Yield what is done to each activation between two convolutions, and the optimizer's update of all parameters."""
    for side, channels in _ACTIVATIONS:
        x, grad = _normal(0, _BATCH, side, side, channels), _normal(1, _BATCH, side, side, channels)
        y, mask = CPU.zeros(x.shape, np.float32), CPU.zeros(x.shape, bool)
        mean, scale, shift, dot, total = _normal(2, 5, channels)
        slope, half = scale * np.float32(1e-3), np.full_like(scale, 0.5)  # what is applied again should not grow
        operations: dict[str, tuple[float, tuple[Array, ...], tuple[Array, ...]]] = {
            "channel_moments": (1, (dot, total), (x, dot, total)),
            "channel_normalise": (2, (y,), (x, mean, scale, shift, y)),
            "channel_normalise_sums": (2, (dot, total), (grad, x, mean, dot, total)),
            "channel_normalise_backward": (3, (grad,), (grad, x, mean, half, slope, slope)),
            "relu": (2.25, (y,), (x, y, mask)),
            "keep_where": (2.25, (grad,), (grad, mask)),
        }
        for name, (times, outputs, arguments) in operations.items():
            kernel, numpy = (partial(getattr(ops, name), *arguments) for ops in (CPU, NUMPY))
            yield Pass(name, f"{side}x{side}x{channels}", times * x.nbytes, outputs, kernel, numpy)
    w, g, v = _normal(0, 3, _PARAMETERS)
    numbers = (1 / _BATCH, 0.9, 1e-4, 0.1)

    def sgd() -> None:
        scale, momentum, decay, rate = map(np.float32, numbers)
        np.copyto(v, v * momentum + (g * scale + w * decay))
        np.subtract(w, v * rate, out=w)

    kernel = partial(update.sgd, w, g, v, *numbers, nesterov=False)
    yield Pass("sgd", str(_PARAMETERS), 5 * w.nbytes, (w, v), kernel, sgd)


def _normal(seed: int, *shape: int) -> Array:
    """Return random numbers in memory as layers have it."""
    array = CPU.zeros(shape, np.float32)
    array[...] = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return array


def pass_times(of: Pass) -> _Row:
    """Return medians of kernel and NumPy, in turns. Raises ``AssertionError`` where they do not compute the same."""
    before = [output.copy() for output in of.outputs]
    results = []
    for run in (of.kernel, of.numpy):
        for output, value in zip(of.outputs, before, strict=True):
            output[...] = value
        run()
        results.append([output.copy() for output in of.outputs])
    for result, expected in zip(*results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max()))

    def visit(run: Callable[[], object]) -> float:
        begin_s = time.thread_time()
        run()
        return time.thread_time() - begin_s

    taken_s = in_turns({run: partial(visit, run) for run in (of.kernel, of.numpy)}, _ROUNDS, warm_up=0)
    time_s, numpy_s = (statistics.median(taken_s[run]) for run in (of.kernel, of.numpy))
    row = {"operation": of.operation, "shape": of.shape, "time_s": time_s, "numpy_s": numpy_s}
    return row | {"rate": of.size_bytes / time_s / 1e9, "unit": "GB"}


def main() -> None:
    options = command.parser("bench_kernels", __doc__)
    options.add_argument("--model", default=",".join(NETWORKS), help=f"built-in networks (all: {', '.join(NETWORKS)})")
    options.add_argument("--samples", default="1,8,64,256", help="samples at once (1,8,64,256)")
    options.add_argument("--seconds", type=float, default=0.25, help="time for each operation (0.25)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    names, samples = given.model.split(","), [int(number) for number in given.samples.split(",")]
    if unknown := [name for name in names if name not in NETWORKS]:
        options.error(f"unknown network {unknown[0]!r}; allowed: {', '.join(NETWORKS)}")
    networks = [(build_model(*NETWORKS[name], 10), rows) for name in names for rows in samples]
    every = dict.fromkeys(problem for network, rows in networks for problem in network.problems(rows, training=True))
    tell: Callable[..., None] = (lambda *_, **__: None) if given.json else print
    points = []
    with threadpool_limits(1):
        torch = importlib.metadata.version(TORCH) if importlib.util.find_spec(TORCH) is not None else "not installed"
        where = f"{processor.model()} ({processor.family()}), {processor.blas()}, PyTorch {torch}"
        tell(f"{where}, one thread; milliseconds, medians; the fastest of dpsim's over PyTorch's last")
        for problem in every:
            points.append(row := candidate_times(problem, given.seconds))
            times = "  ".join(f"{name} {time_s * 1e3:.4f}" for name, time_s in row["time_s"].items())
            ratio = f"   {row['over_torch']:.2f}" if row["over_torch"] is not None else ""
            tell(f"{row['problem']:52} {times}   best: {row['fastest']}{ratio}", flush=True)
        rows = [pass_times(each) for each in passes()]
    if given.json:
        report = {"schema": 2, "command": "bench_kernels", "machine": where, "points": points, "passes": rows}
        print(json.dumps(report))
    for row in rows:
        times = f"{row['time_s'] * 1e3:8.3f} ms   numpy {row['numpy_s'] * 1e3:8.3f} ms"
        tell(f"{row['operation']:26} {row['shape']:22} {times} {row['rate']:7.1f} {row['unit']}/s")


if __name__ == "__main__":
    main()
