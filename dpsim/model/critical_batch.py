"""Steps to a target loss against the global batch, the gradient noise scale, and what both mean for time and devices.

Source: McCandlish et al., arXiv:1812.06162: S = S_min (1 + B_noise / B), and E = S B samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.records.convergence import Convergence
from dpsim.units import format_duration

Record = dict[str, Any]
LEAST_BATCHES = 3
LEAST_GAIN = 0.05
"""More devices pay as long as each doubling takes this share off the time to the target."""


class StepsFit(Noun, frozen=True):
    """S = ``min_steps`` (1 + ``noise_batch`` / B): steps to the target at global batch B."""

    min_steps: float
    noise_batch: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value > 0 for value in (self.min_steps, self.noise_batch)):
            raise ConfigError(
                f"least steps of {self.min_steps} and a noise batch of {self.noise_batch}", allowed="finite numbers > 0"
            )

    def steps(self, global_batch: float) -> float:
        """Steps to the target."""
        return self.min_steps * (1 + self.noise_batch / global_batch)

    def efficiency(self, global_batch: float) -> float:
        """Progress a sample, as a share of that at the smallest batches: E_min / E = 1 / (1 + B / B_noise)."""
        return 1 / (1 + global_batch / self.noise_batch)

    def time_s(self, global_batch: float, step_s: float) -> float:
        """T(n, B) = S(B) step(n, B / n)."""
        return self.steps(global_batch) * step_s

    def goodput(self, global_batch: float, images_per_s: float) -> float:
        """Throughput times efficiency: the samples a second of small batches that would make the same progress."""
        return images_per_s * self.efficiency(global_batch)


def fit_steps(steps: Mapping[int, float]) -> StepsFit:
    """Fit S_min and B_noise to steps by global batch, with the least squared relative errors.

    Raises ``ConfigError`` for fewer than three batches, and where steps fall as 1/B or faster throughout, so that no
    S_min is visible, or do not fall at all.
    """
    if len(steps) < LEAST_BATCHES:
        raise ConfigError(
            f"steps to a target at {len(steps)} global batches",
            allowed=f"{LEAST_BATCHES} or more that reach the target",
            remedy="measure more batches, or choose a target that they reach",
        )
    batches, values = np.array(list(steps), np.float64), np.array(list(steps.values()), np.float64)
    rows = np.stack([1 / values, 1 / (batches * values)], axis=1)
    (least, slope), *_ = np.linalg.lstsq(rows, np.ones(len(values)), rcond=None)
    if least <= 0 or slope <= 0:
        shape = "fall as fast as the batch grows" if least <= 0 else "do not fall as the batch grows"
        raise ConfigError(
            f"steps to the target {shape}, at global batches {', '.join(map(str, sorted(steps)))}",
            allowed="batches of which some are below and some above the noise batch",
            remedy="measure " + ("larger" if least <= 0 else "smaller") + " batches, or choose another target",
        )
    return StepsFit(min_steps=float(least), noise_batch=float(slope / least))


def power_law(steps: Mapping[int, float], global_batch: float) -> float:
    """A baseline: the straight line through log(steps) against log(batch)."""
    line = np.polyfit(np.log(list(steps)), np.log(list(steps.values())), 1)
    return float(np.exp(np.polyval(line, np.log(global_batch))))


def same_samples(steps: Mapping[int, float], global_batch: int) -> float:
    """A baseline: any batch needs the same number of samples, S = E / B."""
    return math.exp(float(np.mean([math.log(b * value) for b, value in steps.items()]))) / global_batch


def gradient_noise(
    small: Sequence[float], big: Sequence[float], small_batch: float, big_batch: float
) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) from squared norms of the mean gradients of ``small_batch`` and of ``big_batch`` samples.

    tr(Sigma) ~ (|G_small|^2 - |G_big|^2) / (1/b - 1/B), |G|^2 ~ (B |G_big|^2 - b |G_small|^2) / (B - b), averaged over
    the steps before they are divided by each other. Raises ``ConfigError``.
    """
    if not small or len(small) != len(big) or not 0 < small_batch < big_batch:
        raise ConfigError(
            f"{len(small)} and {len(big)} gradient norms of batches {small_batch:g} and {big_batch:g}",
            allowed="as many of each, 1 or more, of a smaller and of a larger batch",
        )
    of_small, of_big = float(np.mean(small)), float(np.mean(big))
    trace = (of_small - of_big) / (1 / small_batch - 1 / big_batch)
    return trace, (big_batch * of_big - small_batch * of_small) / (big_batch - small_batch)


def paying_devices(times_s: Mapping[int, float]) -> int:
    """The number of devices beyond which more do not pay: up to it, each doubling saves ``LEAST_GAIN`` of the time.

    Between counts n < m a doubling saves 1 - (T_m / T_n)^(1 / log2(m / n)). Raises ``ConfigError`` for no time.
    """
    if not times_s:
        raise ConfigError("times to a target for no number of devices", allowed="1 number of devices or more")
    counts = sorted(times_s)
    for fewer, more in itertools.pairwise(counts):
        saved = 1 - (times_s[more] / times_s[fewer]) ** (1 / math.log2(more / fewer))
        if saved < LEAST_GAIN:
            return fewer
    return counts[-1]


def add_time_to_target(points: Sequence[Record], summary: Record, convergence: Convergence) -> None:
    """Add ``steps_to_target``, ``time_to_target_s`` and ``goodput_images_per_s`` to every point of ``predict_points``.

    Its summary gets the target, the fit, and sentences on the recommended number of devices. Both change in place.
    """
    best = summary["best"]
    fit = StepsFit(min_steps=convergence.min_steps, noise_batch=convergence.noise_batch)
    for point in (*points, *best):
        batch = point["global_batch"]
        point["steps_to_target"] = fit.steps(batch)
        point["time_to_target_s"] = fit.time_s(batch, point["predicted_step_s"])
        point["goodput_images_per_s"] = fit.goodput(batch, point["images_per_s"])
    summary |= {
        "target_loss": convergence.target_loss,
        "min_steps": convergence.min_steps,
        "noise_batch": convergence.noise_batch,
        "time_to_target": list(_sentences(best, fit, convergence, strong=summary["scaling"] == "strong")),
    }


def _sentences(best: Sequence[Record], fit: StepsFit, convergence: Convergence, *, strong: bool) -> Iterator[str]:
    """Yield the recommended devices of each rule, algorithm and, under strong scaling, batch; then how far to trust it.

    Under weak scaling the batch grows with the devices, so that points of one local batch belong together.
    """
    target = f"Training loss {convergence.target_loss:g} ({convergence.name})"
    names = ("fusion_rule", "algorithm", "global_batch" if strong else "local_batch")
    for rows in grouped(best, lambda point: tuple(point[name] for name in names)).values():
        fastest: dict[int, Record] = {}
        for point in rows:
            best_so_far = fastest.setdefault(point["devices"], point)
            if point["time_to_target_s"] < best_so_far["time_to_target_s"]:
                fastest[point["devices"]] = point
        count = paying_devices({devices: point["time_to_target_s"] for devices, point in fastest.items()})
        point = fastest[count]
        more = (
            f"; more save less than {LEAST_GAIN:.0%} a doubling"
            if count < max(fastest)
            else ", the most that were given"
        )
        yield (
            f"{target}, {point['fusion_rule']}, {point['algorithm']}: {count} device{'s' * (count != 1)}{more}. "
            f"Batch {point['global_batch']}: {point['steps_to_target']:.0f} steps, "
            f"{format_duration(point['time_to_target_s'])}, efficiency {fit.efficiency(point['global_batch']):.0%}."
        )
    low, high = min(convergence.batches), max(convergence.batches)
    outside = sorted({p["global_batch"] for p in best if not low / 2 <= p["global_batch"] <= 2 * high})
    if outside:
        yield (
            f"Steps to the target were fitted at batches {low} to {high}: treat those at "
            f"{', '.join(map(str, outside))} as rough."
        )
