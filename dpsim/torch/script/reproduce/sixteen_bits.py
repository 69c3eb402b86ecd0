"""Mistakes that only a script with 16 bits can have: its scaler of gradients, and what it keeps in 16 bits.

Loads no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsim.torch.script.reproduce.differences import (
    CLIPPED_SCALED,
    LOST,
    NARROW_NORMS,
    NOT_UNSCALED,
    OVERFLOW,
    SCALED_TWICE,
    UNKNOWN,
    Finding,
    Step,
)
from dpsim.torch.script.reproduce.observation import Observed, Tensors
from dpsim.torch.script.reproduce.rounding import ALLOWANCE, Rounding, quantities, size

_LOST = 0.05
"""The part of the numbers with a gradient that an update may leave as they are."""
_SAME_FACTOR = 1e-2
_RUNNING = ("running_mean", "running_var")


def overflow(step: Step) -> Finding | None:
    """Whether some ranks skip an update and others do not."""
    ranks = step.theirs
    skipping = [number for number, rank in enumerate(ranks) if rank.skipped]
    if not 0 < len(skipping) < len(ranks):
        return None
    because = (
        f"rank {skipping[0]} skips its update, for its gradients overflow, and others update theirs: each rank's scaler"
        " decides by gradients that are not reduced yet"
    )
    return step.found("the update", OVERFLOW, because)


def kept(step: Step) -> Finding | None:
    """Whether an update is lost in 16 bits, or statistics that are averaged are kept in them."""
    report = step.other.reports[0]
    lost = {name: part for name, part in step.theirs[0].lost.items() if part > _LOST}
    if lost:
        tensor = max(lost, key=lambda name: lost[name])
        kind = NARROW_NORMS if lost.keys() <= {*report.narrow_norms} else LOST
        because = (
            f"{lost[tensor]:.0%} of its numbers with a gradient are as before the update, which is smaller than half"
            f" of their last bit in {report.narrow[tensor]}"
        )
        return step.found(tensor, kind, because)
    running = [name for name in report.narrow_norms if name.endswith(_RUNNING)]
    if running:
        because = f"a mean over many steps is kept in {report.narrow[running[0]]}, where small changes of it are lost"
        return step.found(running[0], NARROW_NORMS, because)
    return None


def with_scaler(plain: Observed, scaled: Observed, rounding: Rounding) -> Finding | None:
    """Return the first gradient that an optimizer gets other than in the run without a scaler of gradients."""
    for number in range(min(plain.steps, scaled.steps)):
        step = Step(plain, scaled, rounding, number)
        if not any(rank.skipped for rank in step.theirs) and (finding := _with_scaler(step)):
            return finding
    return None


def _with_scaler(step: Step) -> Finding | None:
    ours, theirs = quantities(step.ours, "final"), quantities(step.theirs, "final")
    for name in step.names:
        if name not in ours or name not in theirs:
            continue
        mine, their = ours[name], theirs[name]
        if not (np.isfinite(mine).all() and np.isfinite(their).all()):
            return None
        moved, allowed = size(mine - their), step.rounding.explains("final", name, step.number, mine)
        if moved > ALLOWANCE * allowed:
            own = size(mine) or 1.0
            kind, because = _why(step, ours, theirs)
            return step.found(name, kind, because, difference=moved / own, rounding=allowed / own)
    return None


def _why(step: Step, ours: Tensors, theirs: Tensors) -> tuple[str, str]:
    """The class and the reason, by how backward's gradients and the optimizer's are scaled."""
    scale = step.theirs[0].scale
    backward = _factor(quantities(step.ours, "reduced"), quantities(step.theirs, "reduced")) * scale
    final = _factor(ours, theirs)
    got = f"the optimizer gets {final:.3g} times the gradients that it gets without a scaler"
    if scale > 1 and _close(backward, scale**2):
        return SCALED_TWICE, f"{got}, for backward's are {backward:.3g} times them, and the scale is {scale:g}"
    if scale > 1 and _close(final, scale):
        return NOT_UNSCALED, f"{got}, which is the scale: nothing divides by it"
    if _close(backward, scale):
        return CLIPPED_SCALED, f"{got}, and backward's are those times the scale: they are clipped while scaled"
    return UNKNOWN, f"{got}, and backward's are {backward:.3g} times them, where the scale is {scale:g}"


def _factor(ours: Tensors, theirs: Tensors) -> float:
    names = ours.keys() & theirs.keys()
    products = sum(_dot(ours[name], theirs[name]) for name in names)
    return products / (sum(_dot(ours[name], ours[name]) for name in names) or 1.0)


def _dot(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    return float(np.dot(one.astype(np.float64), other.astype(np.float64)))


def _close(factor: float, expected: float) -> bool:
    return abs(factor - expected) <= _SAME_FACTOR * expected
