"""The gap of batch norm against the local batch: what the noise of a small batch's statistics costs in training loss.

A gap is log(loss with local batch b) - log(loss with the global batch's statistics), at the same seed and step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown

Values = NDArray[np.float64]
_Shape = Callable[[Values, int, Any], Values]
FORM = "saturating"
LEAST_POINTS = 2
_SHAPES = np.geomspace(1e-3, 1e3, 4001)


def _noise(batches: Values, global_batch: int) -> Values:
    return 1 / batches - 1 / global_batch


FORMS: dict[str, tuple[_Shape, bool]] = {
    "saturating": (lambda b, total, k: _noise(b, total) / (1 + k * _noise(b, total)), True),
    "logarithmic": (lambda b, total, k: np.log1p(k * _noise(b, total)), True),
    "proportional": (lambda b, total, k: _noise(b, total), False),
    "power of the noise": (lambda b, total, k: _noise(b, total) ** k, True),
    "difference of powers": (lambda b, total, k: b**-k - float(total) ** -k, True),
    "inverse": (lambda b, total, k: 1 / b, False),
    "inverse power": (lambda b, total, k: b**-k, True),
}
"""Forms of a gap up to its scale c, and whether the form has a parameter k as well.

With x = 1/b - 1/B: c x / (1 + k x), c log(1 + k x), c x, c x^k, c (b^-k - B^-k), c / b, c b^-k.
"""


class GapFit(Noun, frozen=True):
    """A fitted form: its ``scale`` c and its ``shape`` k (0 where it has none)."""

    form: str
    global_batch: int
    scale: float
    shape: float = 0.0

    def gap(self, local_batch: float) -> float:
        """The gap at a local batch."""
        function, _ = FORMS[self.form]
        return self.scale * float(function(np.array([float(local_batch)]), self.global_batch, self.shape)[0])


def fit_gap(gaps: Mapping[int, float], global_batch: int, form: str = FORM) -> GapFit:
    """Fit a form to gaps by local batch, with the least squared relative errors (of logarithms).

    The ``saturating`` form c x / (1 + k x) is the theory of small noise, c x, with an end: statistics so noisy that the
    model learns next to nothing cannot become worse. Raises ``ConfigError`` for fewer than two batches below the global
    one, and where there is no gap: one that is not above 0.
    """
    if form not in FORMS:
        raise unknown("form of a gap", form, FORMS)
    fitted = {b: gap for b, gap in gaps.items() if b < global_batch}
    if len(fitted) < LEAST_POINTS:
        raise ConfigError(
            f"a gap fitted to {len(fitted)} local batches below the global batch of {global_batch}",
            allowed=f"{LEAST_POINTS} or more",
            remedy="measure more local batches",
        )
    absent = [b for b, gap in fitted.items() if not gap > 0]
    if absent:
        raise ConfigError(
            f"no gap is visible at local batch {', '.join(map(str, absent))}",
            allowed="gaps above 0 at every fitted local batch",
            remedy="fit smaller local batches, or take harder data: digits:noise=0.35,samples=640",
        )
    batches, logs = np.array(list(fitted), np.float64), np.log(np.array(list(fitted.values())))
    function, has_shape = FORMS[form]
    shapes_K1 = _SHAPES[:, None] if has_shape else np.zeros((1, 1))
    with np.errstate(divide="ignore", invalid="ignore"):  # a large power may be 0: it is then never the best
        residuals_KN = np.atleast_2d(logs - np.log(function(batches, global_batch, shapes_K1)))
        best = int(np.nanargmin(np.var(residuals_KN, axis=1)))
    return GapFit(
        form=form,
        global_batch=global_batch,
        scale=float(np.exp(residuals_KN[best].mean())),
        shape=float(shapes_K1[best, 0]),
    )


def interpolated_gap(gaps: Mapping[int, float], global_batch: int, local_batch: int) -> float:
    """The baseline: linear between the fitted points and (B, 0) in log(b); the slope of the nearest two beyond them."""
    points = sorted(({b: gap for b, gap in gaps.items() if b < global_batch} | {global_batch: 0.0}).items())
    if len(points) < 2:
        raise ConfigError("a gap interpolated from the global batch alone", allowed="1 local batch or more")
    x, y = np.log([b for b, _ in points]), np.array([gap for _, gap in points])
    at = np.log(local_batch)
    place = int(np.clip(np.searchsorted(x, at), 1, len(x) - 1))
    slope = (y[place] - y[place - 1]) / (x[place] - x[place - 1])
    return float(y[place - 1] + slope * (at - x[place - 1]))
