"""Convolution on NHWC pictures, forward and both backward passes, without unfolding them.

Meaning: ``NumpyOps.conv2d``, ``conv2d_input_gradient`` and ``conv2d_weight_gradient`` of dpsim.nn. A block of output
elements stays in registers while the loops over what is summed run around it; elements outside the picture are
left out, not multiplied by zero. One sample's results depend on that sample and the weights alone.
Memory passes: each input read and each output written about once; what is used again is read from the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from dpsim.kernels.allreduce.tree import leaf_program
from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import ACCUMULATORS, WIDE, Element, Kernel, Value, Variable, balanced, even_parts

Array = NDArray[Any]
_MOST_VECTORS = 4 if WIDE else 2
"""Vectors of channels of a block: with 12 sums in 16 registers, four of them would leave none for an element."""
_LEAST_POSITIONS = 128  # pixels whose products are added in registers before they are added to a weight gradient


class _Shapes(NamedTuple):
    """A convolution from [H, W, I] to [h, w, O], h = ceil(H / stride), with a kernel of K x K."""

    height: int
    width: int
    inputs: int
    outputs: int
    kernel: int
    stride: int
    dtype: str

    @property
    def out(self) -> tuple[int, int]:
        return -(-self.height // self.stride), -(-self.width // self.stride)


def _shapes(x_bHWi: Array, weight_shape: tuple[int, ...], stride: int) -> _Shapes:
    kernel, _, inputs, outputs = weight_shape
    return _Shapes(x_bHWi.shape[1], x_bHWi.shape[2], inputs, outputs, kernel, stride, x_bHWi.dtype.name)


def conv2d(x_bHWi: Array, weight_KKio: Array, stride: int, out_bhwo: Array) -> None:
    """out[b,h,w,o] = sum over i,j,c of x[b, h s + i - K//2, w s + j - K//2, c] W[i,j,c,o], s the stride."""
    _forward(_shapes(x_bHWi, weight_KKio.shape, stride))(x_bHWi, weight_KKio, out_bhwo, len(x_bHWi))


def conv2d_input_gradient(grad_bhwo: Array, weight_KKoi: Array, stride: int, out_bHWi: Array) -> None:
    """Compute the gradient of x, from the kernel with its channels exchanged."""
    kernel, _, outputs, inputs = weight_KKoi.shape
    shapes = _shapes(out_bHWi, (kernel, kernel, inputs, outputs), stride)
    _input_gradient(shapes)(grad_bhwo, weight_KKoi, out_bHWi, len(grad_bhwo))


def conv2d_weight_gradient(
    x_bHWi: Array, grad_bhwo: Array, leaves: tuple[int, ...], stride: int, out_KKio: Array, waiting_DKKio: Array
) -> None:
    """Compute the weights' gradient: a sum over each leaf's samples in order, and over leaves along their tree.

    ``waiting`` is for the sums that wait for their pair, ``waiting_sums(leaves)`` of them.
    """
    program = leaf_program(leaves)
    kernel = _weight_gradient(_shapes(x_bHWi, out_KKio.shape, stride))
    kernel(x_bHWi, grad_bhwo, out_KKio, waiting_DKKio, program, len(program))


def waiting_sums(leaves: tuple[int, ...]) -> int:
    """Return how many sums over leaves wait for their pair at once, besides the first."""
    return (len(leaves) - 2).bit_length()


class _Reach(NamedTuple):
    """The source pixels that an output pixel is made of.

    ``rows(h)`` gives the kernel rows i that output row h needs (first, end, step) and the source row of each;
    ``column(w, j)`` the source column of output column w under kernel column j, None outside the picture.
    ``advance`` source columns correspond to ``unit`` output columns.
    """

    source: tuple[int, int]
    out: tuple[int, int]
    rows: Callable[[Value], tuple[Value, Value, int, Callable[[Value], Value]]]
    column: Callable[[int, int], int | None]
    advance: int
    unit: int


@compiled
def _forward(s: _Shapes) -> Kernel:
    pad = s.kernel // 2

    def rows(h: Value) -> tuple[Value, Value, int, Callable[[Value], Value]]:
        top = h * s.stride - pad
        return (top * -1).at_least(0), (top * -1 + s.height).at_most(s.kernel), 1, lambda i: top + i

    def column(w: int, j: int) -> int | None:
        source = w * s.stride + j - pad
        return source if 0 <= source < s.width else None

    kernel = Kernel(s.dtype, ("x", "weight", "out"), ("samples",))
    reach = _Reach((s.height, s.width), s.out, rows, column, advance=s.stride, unit=1)
    _write_product(kernel, reach, s.inputs, s.outputs, s.kernel)
    return kernel


@compiled
def _input_gradient(s: _Shapes) -> Kernel:
    """Return the transposed convolution: of each kernel row and column only those pixels that the stride met."""
    pad = s.kernel // 2
    height, width = s.out

    def rows(h: Value) -> tuple[Value, Value, int, Callable[[Value], Value]]:
        top = h + pad
        first = (top % s.stride).at_least(top - (height - 1) * s.stride)
        return first, (top + 1).at_most(s.kernel), s.stride, lambda i: (top - i) // s.stride

    def column(w: int, j: int) -> int | None:
        source, rest = divmod(w + pad - j, s.stride)
        return source if not rest and 0 <= source < width else None

    kernel = Kernel(s.dtype, ("x", "weight", "out"), ("samples",))
    reach = _Reach(s.out, (s.height, s.width), rows, column, advance=1, unit=s.stride)
    _write_product(kernel, reach, s.outputs, s.inputs, s.kernel)
    return kernel


def _write_product(k: Kernel, reach: _Reach, inputs: int, outputs: int, size: int) -> None:
    """Multiply neighbouring pixels of a row by some vectors of output channels in registers, for all samples' rows."""
    height, width = reach.out
    vectors = balanced(-(-outputs // k.lanes), _MOST_VECTORS)
    most = max(ACCUMULATORS // vectors, reach.unit)
    with k.loop(0, k["samples"]) as b, k.loop(0, height) as h:
        first, end, step, source_row = reach.rows(h)

        def channels(o: Value, count: int) -> None:
            parts = [(v, min(k.lanes, count - v)) for v in range(0, count, k.lanes)]
            for run in _runs(reach, size, most):
                with k.loop(run.first, run.end, run.pixels) as w:
                    sums = [[k.variable() for _ in parts] for _ in range(run.pixels)]
                    with k.loop(first, end, step) as i:
                        row = (b * reach.source[0] + source_row(i)) * reach.source[1]
                        corner = row + w // reach.unit * reach.advance
                        for j, taps in enumerate(run.taps):
                            _add_taps(k, corner, (i * size + j) * inputs, taps, sums, o, parts, (inputs, outputs))
                    for p in range(run.pixels):
                        offset = ((b * height + h) * width + w + p) * outputs + o
                        for (v, n), total in zip(parts, sums[p], strict=True):
                            k.store(k["out"], offset + v, total.get(), n)

        k.in_parts(outputs, vectors * k.lanes, channels)


def _add_taps(
    k: Kernel,
    corner: Value,
    weight_row: Value,
    taps: _Taps,
    sums: list[list[Variable]],
    o: Value,
    parts: list[tuple[int, int]],
    channels: tuple[int, int],
) -> None:
    """Add the products of one kernel element with the source pixels it meets, channel by channel."""
    inputs, outputs = channels
    if not taps:
        return
    with k.loop(0, inputs) as c:
        weights = [k.load(k["weight"], (weight_row + c) * outputs + o + v, n) for v, n in parts]
        for p, column in taps:
            x = k.vector(k.load_number(k["x"], (corner + column) * inputs + c))
            for total, weight in zip(sums[p], weights, strict=True):
                total.add_product(x, weight)


_Taps = tuple[tuple[int, int], ...]


class _Run(NamedTuple):
    """Neighbouring tiles of a row that are alike: the output columns [first, end), in tiles of some pixels.

    ``taps[j]`` names the pixels of a tile that kernel column j reaches, and their source columns from the tile's own.
    """

    first: int
    end: int
    pixels: int
    taps: tuple[_Taps, ...]


def _runs(reach: _Reach, size: int, most: int) -> list[_Run]:
    runs: list[_Run] = []
    width, unit = reach.out[1], reach.unit
    parts = even_parts(-(-width // unit), max(most // unit, 1))
    for first in (unit * tile for part in parts for tile in range(*part)):
        pixels = next(unit * size for start, end, size in parts if unit * start <= first < unit * end)
        inside = range(min(pixels, width - first))
        base = first // reach.unit * reach.advance
        reached = [[(p, reach.column(first + p, j)) for p in inside] for j in range(size)]
        taps = tuple(tuple((p, source - base) for p, source in row if source is not None) for row in reached)
        if runs and runs[-1].taps == taps and runs[-1].pixels == len(inside):
            runs[-1] = runs[-1]._replace(end=first + len(inside))
        else:
            runs.append(_Run(first, first + len(inside), len(inside), taps))
    return runs


@compiled
def _weight_gradient(s: _Shapes) -> Kernel:
    """Multiply some input channels by some vectors of output channels in registers, a few rows of a picture at a time.

    A leaf's sum is added up in ``out``, or in ``waiting`` where sums before it wait for their pair.
    """
    k = Kernel(s.dtype, ("x", "grad", "out", "waiting", "program"), ("leaves",))
    elements = k.index(s.kernel * s.kernel * s.inputs * s.outputs)
    depth = k.variable(k.index(0))

    def sum_at(level: Value) -> Value:
        return (level < 1).choose(k["out"], k.part(k["waiting"], (level - 1) * elements))

    with k.loop(0, k["leaves"]) as leaf:
        start, stop, merges = (k.load_index(k["program"], leaf * 3 + field) for field in range(3))
        k["sum"] = sum_at(depth.get())
        k.elementwise(elements, lambda e: e.set_zero("sum"))
        _add_samples(k, s, start, stop)
        with k.loop(0, merges):
            k["last"] = sum_at(depth.get())
            depth.set(depth.get() - 1)
            k["before"] = sum_at(depth.get())
            k.elementwise(elements, _add_last)
        depth.set(depth.get() + 1)
    return k


def _add_last(e: Element) -> None:
    e["before"] = e["before"] + e["last"]


def _add_samples(k: Kernel, s: _Shapes, start: Value, stop: Value) -> None:
    """Add what samples ``start`` to ``stop - 1`` give to ``sum``."""
    (height, width), pad = s.out, s.kernel // 2
    vectors = balanced(-(-s.outputs // k.lanes), _MOST_VECTORS)
    rows = min(height, -(-_LEAST_POSITIONS // width))
    with k.loop(start, stop) as b, k.loop(0, height, rows) as row, k.loop(0, s.kernel) as i:
        above = i * -1 + pad + s.stride - 1
        first = (above // s.stride).at_least(row)
        end = ((above + s.height) // s.stride).at_most(row + rows).at_most(height)
        for j in range(s.kernel):
            left, right = -(-(pad - j) // s.stride), -(-(s.width + pad - j) // s.stride)
            columns = max(0, left), min(width, right)

            def block(c: Value, inputs: int, j: int = j, columns: tuple[int, int] = columns) -> None:
                def part(o: Value, outputs: int) -> None:
                    parts = [(v, min(k.lanes, outputs - v)) for v in range(0, outputs, k.lanes)]
                    sums = [[k.variable() for _ in parts] for _ in range(inputs)]
                    with k.loop(first, end) as h, k.loop(*columns) as w:
                        y = ((b * height + h) * width + w) * s.outputs + o
                        x_row = (b * s.height + h * s.stride + i - pad) * s.width
                        x = (x_row + w * s.stride + (j - pad)) * s.inputs + c
                        grads = [k.load(k["grad"], y + v, n) for v, n in parts]
                        for one in range(inputs):
                            value = k.vector(k.load_number(k["x"], x + one))
                            for total, grad in zip(sums[one], grads, strict=True):
                                total.add_product(value, grad)
                    for one in range(inputs):
                        offset = ((i * s.kernel + j) * s.inputs + c + one) * s.outputs + o
                        for (v, n), total in zip(parts, sums[one], strict=True):
                            k.store(k["sum"], offset + v, k.load(k["sum"], offset + v, n) + total.get(), n)

                k.in_parts(s.outputs, vectors * k.lanes, part)

            for begin, end_of_part, size in even_parts(s.inputs, ACCUMULATORS // vectors):
                with k.loop(begin, end_of_part, size) as c:
                    block(c, size)
