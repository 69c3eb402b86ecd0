"""Which code computes an operation in reproducible training: a committed table, never a measurement.

Candidates differ in bits, and two measurements on one machine may choose differently. So the table decides by
properties that are the same on every device: operation, dtype, samples of one leaf, size of the weights, processor
family and BLAS architecture. All ranks use rank 0's table.
"""

from __future__ import annotations

import functools
import math
from importlib import resources
from typing import get_args

from dpsim import codec, processor
from dpsim.choices import CONVOLUTIONS, Choices, Operation, Problem
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.nn.candidates import CANDIDATES, has_kernels

SCHEMA = "dpsim.kernel-table/1"
_WORTH_PROPOSING = 1.1
"""A candidate is proposed if the table's takes more than this multiple of its time."""


class Rule(Noun, frozen=True):
    """The candidate for a class of problems.

    ``dtype``, ``processor`` (``dpsim.processor.family``) and ``blas`` (the architecture): empty for any. Bounds, None
    for none: samples of one leaf, inputs, outputs, and weights (inputs times outputs, of a convolution also times the
    kernel's pixels).
    """

    operation: Operation
    candidate: str
    dtype: str = ""
    processor: str = ""
    blas: str = ""
    least_rows: int | None = None
    most_rows: int | None = None
    least_inputs: int | None = None
    most_inputs: int | None = None
    least_outputs: int | None = None
    most_outputs: int | None = None
    least_weights: int | None = None
    most_weights: int | None = None

    def __post_init__(self) -> None:
        if self.candidate not in CANDIDATES[self.operation]:
            raise unknown(f"candidate for {self.operation}", self.candidate, list(CANDIDATES[self.operation]))

    def fits(self, problem: Problem) -> bool:
        """Whether this rule applies to a problem, apart from processor and BLAS."""
        inputs, outputs = problem.sizes[2:4] if problem.operation in CONVOLUTIONS else problem.sizes
        kernel = problem.sizes[4] if problem.operation in CONVOLUTIONS else 1
        bounds = (
            (problem.rows, self.least_rows, self.most_rows),
            (inputs, self.least_inputs, self.most_inputs),
            (outputs, self.least_outputs, self.most_outputs),
            (inputs * outputs * kernel * kernel, self.least_weights, self.most_weights),
        )
        return (
            self.operation == problem.operation
            and self.dtype in ("", problem.dtype)
            and all((least or 0) <= value <= (math.inf if most is None else most) for value, least, most in bounds)
        )


class KernelTable(Noun, frozen=True, dict=True):
    """Rules, of which the first that fits a problem decides. One must fit every problem."""

    version: int
    rules: tuple[Rule, ...]
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.version < 1:
            raise ConfigError(f"a kernel table of version {self.version}", allowed="1 or more")
        for operation in get_args(Operation):
            own = [rule for rule in self.rules if rule.operation == operation]
            if not own or own[-1] != Rule(operation=operation, candidate=own[-1].candidate):
                raise ConfigError(f"a kernel table without a last rule for {operation}", allowed="one without bounds")

    def candidate(self, problem: Problem) -> str:
        """The candidate for a problem on this processor; NumPy's if the dtype has no kernels."""
        if not has_kernels(problem.dtype):
            return next(iter(CANDIDATES[problem.operation]))
        return next(rule.candidate for rule in self._local_rules if rule.fits(problem))

    @functools.cached_property
    def _local_rules(self) -> list[Rule]:
        """The rules for this processor and its BLAS."""
        family, blas = processor.family(), processor.blas_architecture()
        return [rule for rule in self.rules if rule.processor in ("", family) and rule.blas in ("", blas)]

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of its rules and version."""
        return codec.digest(self)[:16]


@functools.cache
def committed() -> KernelTable:
    """The table that comes with this version of dpsim."""
    with resources.as_file(resources.files("dpsim.nn") / "kernel_table.toml") as path:
        return codec.read(path, KernelTable, "kernel table", SCHEMA)


def proposal(table: KernelTable, measured: Choices) -> KernelTable | None:
    """The table's next version, with a rule for each class of problems in which another candidate was much faster.

    None without such problems. The proposal is not used: committing it changes the bits of reproducible training.
    """
    family, blas = processor.family(), processor.blas_architecture()
    rules = []
    for choice in measured.kernels:
        problem = choice.problem
        current = table.candidate(problem)
        if choice.time_ratios.get(current, 1.0) <= _WORTH_PROPOSING:
            continue
        inputs, outputs = problem.sizes[2:4] if problem.operation in CONVOLUTIONS else problem.sizes
        rules.append(
            Rule(
                operation=problem.operation,
                candidate=choice.candidate,
                dtype=problem.dtype,
                processor=family,
                blas=blas,
                least_rows=problem.rows,
                most_rows=problem.rows,
                least_inputs=inputs,
                most_inputs=inputs,
                least_outputs=outputs,
                most_outputs=outputs,
            )
        )
    return KernelTable(version=table.version + 1, rules=(*rules, *table.rules)) if rules else None
