"""How far rounding alone moves the loss and the gradients of a step: measured on nulls, without a mistake in them.

A null is the first run once more, with the noise of one rounding on every module's output, and one of two also has the
samples of each batch in another order. So every sum of a step, forward, backward and over samples, is rounded anew.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.torch.script.probe.reproduce.report import RankStep
from dpsim.torch.script.reproduce.observation import Observed, Tensors

ALLOWANCE = 30.0
"""A difference is more than rounding if it is so many times what the nulls came to."""
EPSILON = 2.0**-23
"""The distance of floating-point numbers of 32 bits, as a part of them."""
NARROW_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance of numbers of 16 bits."""
_HOOK_EPSILON = {
    "fp16": NARROW_EPSILON["float16"],
    "bf16": NARROW_EPSILON["bfloat16"],
    "powerSGD": 1.0,
    "batched_powerSGD": 1.0,
}
LOSS = "the loss"

Array = NDArray[np.floating]


def size(values: Array) -> float:
    """Return the root of the mean square of the values."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def mean_loss(ranks: Sequence[RankStep]) -> float:
    """Return the mean of the losses of all ranks."""
    return float(np.mean([rank.loss for rank in ranks]))


def quantities(ranks: Sequence[RankStep], kind: str) -> Tensors:
    """Return the gradients of a step that all ranks hold, or the loss (``loss``).

    They are ``reduced`` or ``final``, or what the script has made of the reduced ones before it clips their norm
    (``prepared``).
    """
    if kind == "loss":
        return {LOSS: np.array([mean_loss(ranks)])}
    if kind == "prepared":
        return {name: values / ranks[0].clipped.get(name, 1.0) for name, values in ranks[0].final.items()}
    tensors: Tensors = getattr(ranks[0], kind)
    return tensors


def sent_epsilon(run: Observed) -> float:
    """Return the distance of the numbers that ranks send, by the communication hook or the policy.

    It is 1 with a hook that leaves parts out.
    """
    report = run.reports[0]
    hook = next((part for word, part in _HOOK_EPSILON.items() if word in report.hook), EPSILON)
    return max(hook, NARROW_EPSILON.get(report.sent_as, EPSILON))


@dataclass(frozen=True)
class Rounding:
    """What rounding explains, by kind, tensor and step: root mean squares, and parts of the tensor's own."""

    absolute: dict[tuple[str, str, int], float]
    relative: dict[tuple[str, str], float]
    least: float = EPSILON

    def explains(self, kind: str, name: str, step: int, values: Array) -> float:
        """Return the root mean square of the difference that rounding explains in a tensor with these values."""
        part = max(self.relative.get((kind, name), 0.0), self.least)
        return max(self.absolute.get((kind, name, step), 0.0), part * size(values))


KINDS = ("reduced", "prepared", "final", "loss")


def rounding_of(first: Observed, nulls: Sequence[Observed]) -> Rounding:
    """Return what rounding explains: the largest difference of a null in each step, and the median over the steps."""
    least = EPSILON if (sent := sent_epsilon(first)) == EPSILON else sent / ALLOWANCE
    absolute: dict[tuple[str, str, int], float] = {}
    parts: dict[tuple[str, str], list[float]] = {}
    for null in nulls:
        for step in range(min(first.steps, null.steps)):
            if null.run.permuted and any(rank.draws for rank in first.step(step)):
                continue  # other samples would get these random numbers
            for kind in KINDS:
                ours, theirs = quantities(first.step(step), kind), quantities(null.step(step), kind)
                for name in ours.keys() & theirs.keys():
                    if not (np.isfinite(ours[name]).all() and np.isfinite(theirs[name]).all()):
                        continue
                    moved, own = size(ours[name] - theirs[name]), size(ours[name])
                    absolute[kind, name, step] = max(absolute.get((kind, name, step), 0.0), moved)
                    if own:
                        parts.setdefault((kind, name), []).append(moved / own)
    return Rounding(absolute, {key: float(np.median(values)) for key, values in parts.items()}, least)
