"""Steps to a target loss against the global batch, the gradient noise scale, and what both mean for time and devices.

Source: McCandlish et al., arXiv:1812.06162: S = S_min (1 + B_noise / B), and E = S B samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dpsim.codec import Noun
from dpsim.errors import ConfigError

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


def paying_devices(times_s: Mapping[int, float], least_gain: float = LEAST_GAIN) -> int:
    """The number of devices beyond which more do not pay: up to it, each doubling saves ``least_gain`` of the time.

    Between counts n < m a doubling saves 1 - (T_m / T_n)^(1 / log2(m / n)). Raises ``ConfigError`` for no time.
    """
    if not times_s:
        raise ConfigError("times to a target for no number of devices", allowed="1 number of devices or more")
    counts = sorted(times_s)
    for fewer, more in itertools.pairwise(counts):
        saved = 1 - (times_s[more] / times_s[fewer]) ** (1 / math.log2(more / fewer))
        if saved < least_gain:
            return fewer
    return counts[-1]
