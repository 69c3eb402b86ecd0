"""The weights with which the ranks' own gradients add up to those of the first run. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.torch.script.reproduce.differences import Step
from dpsim.torch.script.reproduce.observation import Tensors
from dpsim.torch.script.reproduce.rounding import ALLOWANCE, quantities, size

SAME_WEIGHT = 1e-3
_LEAST_WEIGHT = 1e-3
"""Below it a rank has no share in the mean: what was compared are other samples."""
_NEAR_ONE = 0.02
"""Weights of a mean add to 1, but for what rounding leaves open where numbers have 16 bits."""
_VALUES_A_RANK = 3
"""Values that a tensor must have for each weight that is sought in it alone."""


@dataclass(frozen=True)
class Compared:
    """The gradients of a step that are compared, by name: what is reduced, else what is prepared for the optimizer."""

    ours: Tensors
    theirs: Tensors
    allowed: Mapping[str, float]
    """The root mean square of the difference that rounding explains."""

    @staticmethod
    def of(step: Step) -> Compared:
        """Return those of a step."""
        ours, theirs = dict[str, NDArray[np.floating]](), dict[str, NDArray[np.floating]]()
        allowed = {}
        for kind in ("reduced", "prepared"):
            mine, their = quantities(step.ours, kind), quantities(step.theirs, kind)
            for name in {*mine, *their} - {*ours, *theirs}:
                ours |= {name: mine[name]} if name in mine else {}
                theirs |= {name: their[name]} if name in their else {}
                allowed[name] = step.rounding.explains(
                    kind, name, step.number, mine[name] if name in mine else their[name]
                )
        return Compared(ours, theirs, allowed)

    def differs(self, name: str) -> bool:
        """Whether rounding does not explain the difference of a gradient that both runs have."""
        return size(self.ours[name] - self.theirs[name]) > ALLOWANCE * self.allowed[name]


def weights_of_ranks(step: Step, gradients: Compared, *, of_micro_batches: bool = False) -> list[float]:
    """Return the weights with which the ranks' own gradients add up to the first run's; empty where none do.

    Or those of each micro-batch of the ranks, where they are known.
    """
    parts = [rank.local for rank in step.theirs]
    if of_micro_batches:
        parts = [
            {name.partition(" ")[2]: values for name, values in rank.parts.items() if name.startswith(f"{number} ")}
            for rank in step.theirs
            for number in range(len(rank.micro_batches))
        ]
        if not all(parts):
            return []
    names = [name for name in step.names if name in gradients.ours and any(name in part for part in parts)]
    return _weights(gradients, parts, names)


def weights_of_a_term(step: Step, gradients: Compared) -> tuple[str, list[float]]:
    """Return the same of one tensor alone, whose gradient is of one term of the loss; ``("", [])`` without any.

    A loss of several terms may divide each by another number, so that no weights are right for all tensors.
    """
    parts = [rank.local for rank in step.theirs]
    for name in step.names:
        if name not in gradients.ours or name not in gradients.theirs or not gradients.differs(name):
            continue
        if gradients.ours[name].size < _VALUES_A_RANK * len(parts) or not all(name in part for part in parts):
            continue
        if weights := _weights(gradients, parts, [name]):
            return name, weights
    return "", []


def _weights(gradients: Compared, parts: Sequence[Tensors], names: Sequence[str]) -> list[float]:
    """The weights with which parts add up to the first run's gradients of these names; empty where none do."""
    if not names:
        return []
    ours = gradients.ours
    wanted = np.concatenate([ours[name] for name in names]).astype(np.float64)
    columns = np.stack(
        [
            np.concatenate([part.get(name, np.zeros_like(ours[name])) for name in names]).astype(np.float64)
            for part in parts
        ],
        axis=1,
    )
    weights, _, rank_of, _ = np.linalg.lstsq(columns, wanted)
    left = wanted - columns @ weights
    sizes = [ours[name].size for name in names]
    total = float(np.sqrt(np.dot(np.square([gradients.allowed[name] for name in names]), sizes) / sum(sizes)))
    if rank_of < len(parts) or size(left) > ALLOWANCE * total or min(weights) < _LEAST_WEIGHT * max(weights):
        return []
    return [float(weight) for weight in weights]


def are_equal(weights: Sequence[float]) -> bool:
    """Whether all weights are the same but for rounding."""
    return bool(np.ptp(weights) < SAME_WEIGHT * np.mean(np.abs(weights)))


def parts_of_one(weights: Sequence[float]) -> list[float]:
    """Return the weights to three decimals, which add to 1 where the weights do but for rounding."""
    total = sum(weights)
    if abs(total - 1) > _NEAR_ONE:
        return [round(weight, 3) for weight in weights]
    thousandths = [1000 * weight / total for weight in weights]
    down = [math.floor(each) for each in thousandths]
    order = sorted(range(len(down)), key=lambda rank: down[rank] - thousandths[rank])
    up = set(order[: 1000 - sum(down)])
    return [(each + (rank in up)) / 1000 for rank, each in enumerate(down)]
