"""The results of a comparison: whether two systems train the same, and ratios of medians, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from dpsim.errors import DpsimError
from dpsim.experiments.peers.setting import OWN, PeerComparison, Setting, shown
from dpsim.replica import Array
from dpsim.report.table import Column
from dpsim.study.statistics import median_interval, median_ratio
from dpsim.units import format_duration

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


Point = dict[str, Any]
Tried = tuple[Setting, float, int]
"""A setting, the least median step of its visits, and the choice in which it took turns with others."""


class SystemResult(NamedTuple):
    """One system on one device count: its best setting, and a median step a round with and without communication.

    ``gradient_error`` and ``loss_error`` are its differences from dpsim's first setting.
    """

    system: str
    devices: int
    setting: Setting
    gradient_error: float
    loss_error: float
    tried: tuple[Tried, ...]
    step_s: tuple[float, ...] = ()
    alone_step_s: tuple[float, ...] = ()


def points(comparison: PeerComparison, results: Sequence[SystemResult]) -> list[Point]:
    """Return a flat record for each result, raw samples and tried settings included.

    ``images_per_s_ratio`` is dpsim's images/s over this system's in the same rounds, above 1 where dpsim is faster.
    """
    own = {result.devices: result.step_s for result in results if result.system == OWN}
    return [_point(comparison, result, own[result.devices]) for result in results]


def _point(comparison: PeerComparison, result: SystemResult, own_step_s: Sequence[float]) -> Point:
    step, batch = median_interval(result.step_s), result.devices * comparison.local_batch
    alone_s = statistics.median(result.alone_step_s) if result.alone_step_s else None
    ratio = None if result.system == OWN else median_ratio(result.step_s, own_step_s)
    return {
        "system": result.system,
        "devices": result.devices,
        "model": comparison.model,
        "global_batch": batch,
        "local_batch": comparison.local_batch,
        "images_per_s": batch / step.median,
        "measured_step_s": step.median,
        "measured_low_s": step.low,
        "measured_high_s": step.high,
        "step_without_communication_s": alone_s,
        "exposed_communication_s": 0.0 if alone_s is None else step.median - alone_s,
        "images_per_s_ratio": ratio and ratio.median,
        "images_per_s_ratio_low": ratio and ratio.low,
        "images_per_s_ratio_high": ratio and ratio.high,
        "gradient_error": result.gradient_error,
        "loss_error": result.loss_error,
        "setting": dict(result.setting),
        "tried": [{"setting": dict(each), "step_s": step_s, "choice": choice} for each, step_s, choice in result.tried],
        "rounds_step_s": list(result.step_s),
        "rounds_step_without_communication_s": list(result.alone_step_s),
    }


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """Return ratios by system and device count, and dpsim's ratio to the fastest peer of each device count."""
    peers = [point for point in points if point["system"] != OWN]
    names = {"ratio": "images_per_s_ratio", "low": "images_per_s_ratio_low", "high": "images_per_s_ratio_high"}
    ratios = {f"{p['system']}-{p['devices']}": {key: p[name] for key, name in names.items()} for p in peers}
    fastest = {str(p["devices"]): p for p in sorted(peers, key=itemgetter("images_per_s"))}
    best = {
        devices: {"system": fastest[devices]["system"], "ratio": fastest[devices]["images_per_s_ratio"]}
        for devices in dict.fromkeys(str(point["devices"]) for point in peers)
    }
    return {"images_per_s_ratio": ratios, "best_peer": best}


def _without_communication(point: Point, name: str) -> str:
    return "" if point["step_without_communication_s"] is None else format_duration(point[name])


def _ratio(point: Point) -> str:
    ratio = "{images_per_s_ratio:.2f} ({images_per_s_ratio_low:.2f} to {images_per_s_ratio_high:.2f})"
    return "" if point["images_per_s_ratio"] is None else ratio.format_map(point)


COLUMNS: tuple[Column[Point], ...] = (
    Column(head="system", cell=itemgetter("system"), left=True),
    Column(head="ranks", cell=lambda point: str(point["devices"])),
    Column(head="images/s", cell=lambda point: f"{point['images_per_s']:,.0f}"),
    Column(head="step", cell=lambda point: format_duration(point["measured_step_s"])),
    Column(head="without comm.", cell=lambda point: _without_communication(point, "step_without_communication_s")),
    Column(head="exposed", cell=lambda point: _without_communication(point, "exposed_communication_s")),
    Column(head="dpsim over it (95 %)", cell=_ratio),
)


def notes(results: Sequence[SystemResult]) -> list[str]:
    """Return the setting with which each system was timed, and how many were tried."""
    return [
        f"{result.system} on {result.devices}: best of {max(1, len({setting for setting, _, _ in result.tried}))}"
        f" settings ({shown(result.setting)})"
        for result in results
    ]
