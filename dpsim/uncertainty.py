"""How uncertain the numbers of workload and machine files are: relative standard errors, stated or assumed.

A relative uncertainty is one standard error of a number over the number. A file that states none was written by hand
or imported from measurements without their scatter; the wider ``ASSUMED_`` values below then hold.
"""

from __future__ import annotations

import math

from dpsim.codec import Noun
from dpsim.errors import ConfigError

ASSUMED_COMPUTE = 0.04
"""Of the layer times of a workload that states no uncertainty."""
ASSUMED_SPEED = 0.03
"""Of the mean of later times on a machine that states no uncertainty."""
ASSUMED_SLOWDOWN = 0.05
"""Of a compute slowdown whose half width is not known."""
ASSUMED_TABLE = 0.10
"""Of a table of collectives that states no uncertainty."""
ASSUMED_LINK = 0.35
"""Of the formula for a link that somebody stated: what a data sheet promises is not reached by some factor."""
ASSUMED_FIT = 0.10
"""The least of the formula for a link that was fitted to tables."""
ASSUMED_OVERLAP = 0.20
"""Of the times in an overlap table that states no uncertainty, or where there is no table."""
CONTENTION_ENDS = 3.0, 1.0
"""The most and the least that an assumed contention could be: beyond the 2.5 that a published set implies, and none.

Files say nothing of it, so a predicted interval reaches from one to the other, whatever past errors call for."""
ASSUMED_LOSS = 0.50
"""Of the compute time lost to overlap, where its uncertainty is not stated."""
ASSUMED_OVERHEAD = 1.0
"""Of what the host adds to each collective, where that is not stated: a factor of five either way at 90 %."""
_MOST = 10.0


class IntervalWidth(Noun, frozen=True):
    """How many times as wide as the model's own a predicted interval must be in a group of settings.

    So many past ``studies`` of this machine call for it (``dpsim.model.residuals``); none: it is assumed, by what
    predictions of published steps missed on so many ``clusters``.
    """

    group: str
    factor: float
    studies: int = 0
    clusters: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0 and self.studies >= 0 and self.clusters >= 0):
            raise ConfigError(
                f"intervals of {self.group!r} are {self.factor} times as wide by {self.studies} studies and"
                f" {self.clusters} clusters",
                allowed="a finite factor > 0, and 0 studies and clusters or more",
            )


def check_uncertainty(what: str, **values: float | None) -> None:
    """Refuse relative uncertainties that are no number from 0 to 10. Raises ``ConfigError``."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and 0 <= value <= _MOST):
            raise ConfigError(
                f"{what} has {name} {value}",
                allowed=f"a number from 0 to {_MOST:g}: one standard error over the value",
                remedy="leave it out if it is not known",
            )
