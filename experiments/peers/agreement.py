"""Whether two systems train the same: weights in each other's layout, first gradients and losses compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dpsim.errors import DpsimError
from dpsim.replica import Array

CHECKED_STEPS = 5
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = {"mlp": 1e-3, "resnet20": 5e-2}
"""Relative, by kind of model. Rounding decides on which side of zero some of the 12 million inputs of ResNet-20's
rectifiers lie, and each of those moves a gradient by a whole sample's part: 2e-3 contiguous and 1.4e-2 channels-last
were measured, where the losses agree to 2e-6. In float64 the gradients are equal to 1e-9, which a test checks.
"""


def to_torch(value: Array) -> Array:
    """Convert dpsim's layout to PyTorch's: conv [K, K, in, out] -> [out, in, K, K], dense [in, out] -> [out, in]."""
    return np.ascontiguousarray(value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T)


def from_torch(value: Array) -> Array:
    """Convert PyTorch's layout to dpsim's: the inverse of ``to_torch``."""
    return np.ascontiguousarray(value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T)


def match(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return dpsim's name of each of PyTorch's tensors; both models are given as shapes by name, in forward order.

    Both models have the same layers in the same order, and in a layer weights (or gamma) before biases (beta).
    Raises ``DpsimError`` where number or shapes differ.
    """
    names = dict(zip(theirs, ours, strict=False))
    wrong = [
        f"{name} {theirs[name]} and {our} {ours[our]}"
        for name, our in names.items()
        if theirs[name] != to_torch(np.empty(ours[our], np.bool_)).shape
    ]
    if len(ours) != len(theirs) or wrong:
        raise DpsimError(
            f"the two models are not the same: {len(theirs)} tensors in PyTorch's, {len(ours)} in dpsim's"
            + (f"; shapes differ, first {wrong[0]}" if wrong else ""),
            allowed="the same tensors in the same order",
            remedy="this is a defect of dpsim.experiments.peers, please report it",
        )
    return names


def gradient_errors(gradients: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, float]:
    """Return |gradient - reference| / |reference| of every tensor (2-norms); infinite where a value is not finite."""
    errors = {}
    for name, expected in reference.items():
        difference = float(np.linalg.norm(gradients[name].astype(np.float64) - expected))
        error = difference / max(float(np.linalg.norm(expected)), float(np.finfo(np.float32).tiny))
        errors[name] = error if np.isfinite(error) else float("inf")
    return errors


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two equally long series of losses; infinite where one is not finite."""
    ours, theirs = np.array(losses, np.float64), np.array(reference, np.float64)
    errors = np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-3)
    return float(errors.max()) if np.isfinite(errors).all() else float("inf")


def require_agreement(system: str, kind: str, errors: Mapping[str, float], error: float) -> None:
    """Raise ``DpsimError`` where gradients or losses differ by more than the tolerance: such times mean nothing."""
    worst, tolerance = max(errors, key=lambda name: errors[name]), GRADIENT_TOLERANCE[kind]
    reason = ""
    if errors[worst] > tolerance:
        reason = f"the first gradient of {worst} differs by {errors[worst]:.2g} of its norm"
    elif error > LOSS_TOLERANCE:
        reason = f"the losses of {CHECKED_STEPS} steps differ by up to {error:.2g}"
    if reason:
        raise DpsimError(
            f"{system} does not train as dpsim does: {reason}",
            allowed=f"gradients within {tolerance:g}, losses within {LOSS_TOLERANCE:g}",
            remedy="nothing is timed, for times of different work mean nothing; this is a defect, please report it",
        )
