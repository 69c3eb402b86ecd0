"""What was chosen by measurement on one type of processor: which code computes an operation of a layer.

Plain training takes these choices. Reproducible training never does: see ``dpsim.nn.implementations``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Literal

from dpsim.codec import Noun, digest, to_json
from dpsim.machine import Selection

SCHEMA = "dpsim.choices/1"
Operation = Literal[
    "product",
    "product_with_transposed",
    "transposed_product",
    "conv2d",
    "conv2d_input_gradient",
    "conv2d_weight_gradient",
]
"""Operations of ``dpsim.nn.ops.Ops`` that more than one implementation can compute."""
CONVOLUTIONS: tuple[Operation, ...] = ("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient")
_MOST_ROWS = 256
_MOST_PICTURES = 32


class Problem(Noun, frozen=True):
    """One operation at one size.

    ``rows``: samples. ``sizes``: inputs and outputs of a dense layer; height, width, inputs, outputs, kernel and stride
    of a convolution.
    """

    operation: Operation
    dtype: str
    rows: int
    sizes: tuple[int, ...]

    @property
    def shape_class(self) -> Problem:
        """The problem that represents all with nearly as many rows, or with enough to keep the processor busy."""
        most = _MOST_PICTURES if self.operation in CONVOLUTIONS else _MOST_ROWS
        return Problem(
            operation=self.operation, dtype=self.dtype, rows=_rounded(min(self.rows, most)), sizes=self.sizes
        )

    @property
    def name(self) -> str:
        """``product 64 x 2048 x 2048``, or ``conv2d 32 x 16x16 32->64 /2``."""
        if self.operation in CONVOLUTIONS:
            height, width, inputs, outputs, _, stride = self.sizes
            by = f" /{stride}" if stride > 1 else ""
            return f"{self.operation} {self.rows} x {height}x{width} {inputs}->{outputs}{by}"
        return f"{self.operation} {self.rows} x {' x '.join(map(str, self.sizes))}"

    @property
    def flops(self) -> float:
        """Floating-point operations, a multiplication and an addition counted as two."""
        if self.operation in CONVOLUTIONS:
            height, width, inputs, outputs, kernel, stride = self.sizes
            pixels = -(-height // stride) * -(-width // stride)
            return 2.0 * self.rows * pixels * kernel * kernel * inputs * outputs
        return 2.0 * self.rows * math.prod(self.sizes)


def _rounded(rows: int) -> int:
    """The nearest of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, by ratio."""
    if rows < 4:
        return rows
    power = 1 << (rows.bit_length() - 1)
    return min((power, power * 3 // 2, power * 2), key=lambda size: abs(math.log(size / rows)))


class Choice(Noun, frozen=True):
    """The fastest candidate for a class of problems, and what the others take as a multiple of its time.

    The ratios are medians over rounds in which all candidates ran one after another.
    """

    problem: Problem
    candidate: str
    time_ratios: dict[str, float]


class Choices(Noun, frozen=True, dict=True):
    """Everything that was measured on one type of processor with one set of libraries.

    ``selections``: which allreduce in shared memory is the fastest by size, one for each number of devices.
    """

    measured_on: str = ""
    kernels: tuple[Choice, ...] = ()
    selections: tuple[Selection, ...] = ()
    schema: str = SCHEMA

    @functools.cached_property
    def _by_problem(self) -> dict[Problem, Choice]:
        return {choice.problem: choice for choice in self.kernels}

    def choice(self, problem: Problem) -> Choice | None:
        """The choice that was measured for the class of a problem."""
        return self._by_problem.get(problem.shape_class)

    def digest(self, problems: Iterable[Problem]) -> str:
        """Return 16 digits of a SHA-256 of what was chosen for these problems: runs that share it compute alike."""
        chosen = {to_json(each): choice.candidate for each in problems if (choice := self.choice(each)) is not None}
        return digest(chosen)[:16]

    def selection(self, devices: int) -> Selection | None:
        """The allreduces by size on ``devices`` of a node."""
        return next((item for item in self.selections if item.devices == devices), None)

    def with_more(self, kernels: tuple[Choice, ...] = (), selections: tuple[Selection, ...] = ()) -> Choices:
        """These choices and others. Existing choices stay, so that a choice never changes once it was used."""
        return Choices(
            measured_on=self.measured_on,
            kernels=(*self.kernels, *(item for item in kernels if item.problem not in self._by_problem)),
            selections=(*self.selections, *(item for item in selections if self.selection(item.devices) is None)),
        )
