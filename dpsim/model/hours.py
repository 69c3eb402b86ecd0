"""Hours, cost, samples and tokens a second of a training: of so many samples, and not of a quality that it reaches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpsim.codec import Noun
from dpsim.errors import ConfigError

Record = dict[str, Any]
OF_SAMPLES = (
    "hours and cost are of these samples in training steps alone, and not of a quality: a larger global batch may need"
    " more samples (docs/batches.md)"
)


class Training(Noun, frozen=True):
    """What is trained on: ``samples`` an epoch, ``epochs``, tokens of a sample, and the price of a device an hour.

    ``samples`` is ``None`` where only rates are asked for, ``tokens_per_sample`` and ``price`` where nobody said them.
    The price is in any currency. Raises ``ConfigError`` for anything that is not a finite number above 0, and for
    epochs or a price without samples.
    """

    samples: float | None = None
    epochs: float | None = None
    tokens_per_sample: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {value:g}", allowed="a finite number above 0")
        for name in ("epochs", "price"):
            if getattr(self, name) is not None and self.samples is None:
                raise ConfigError(
                    f"--{name} without --samples",
                    allowed="hours and cost of a number of samples",
                    remedy="give the samples of an epoch: --samples 1.28M",
                )

    @property
    def every_sample(self) -> float:
        """The samples of all epochs; 0 where nobody said them."""
        return (self.samples or 0.0) * (self.epochs or 1)

    def hours(self, point: Mapping[str, Any], step_s: float) -> float:
        """Return the hours of all samples, where a step of a point's global batch takes so many seconds."""
        return float(self.every_sample / point["global_batch"] * step_s / 3600)

    def cost(self, point: Mapping[str, Any], step_s: float) -> float:
        """Return what all devices cost for these hours."""
        return float(self.hours(point, step_s) * point["devices"] * (self.price or 0.0))

    def record(self, point: Mapping[str, Any]) -> Record:
        """Return the columns of a predicted point, each with the ends of its interval.

        ``hours``, ``cost`` (in the price's currency) and ``tokens_per_s``, with ``_low`` and ``_high``; those that are
        not asked for are missing.
        """
        steps_s = {"": "predicted_step_s", "_low": "predicted_low_s", "_high": "predicted_high_s"}
        record: Record = {}
        if self.samples is not None:
            record |= {f"hours{end}": self.hours(point, point[name]) for end, name in steps_s.items()}
        if self.price is not None:
            record |= {f"cost{end}": self.cost(point, point[name]) for end, name in steps_s.items()}
        if self.tokens_per_sample is not None:
            names = ("images_per_s", "images_per_s_low", "images_per_s_high")
            tokens = {name.replace("images", "tokens"): self.tokens_per_sample * point[name] for name in names}
            record |= tokens
        return record


NO_TRAINING = Training()


def add_hours(points: Iterable[Record], summary: Record, training: Training) -> None:
    """Add what a training takes to predicted points, to the best ones of a summary, and what that means."""
    for point in (*points, *summary["best"]):
        point |= training.record(point)
    if training.samples is not None:
        summary["training"] = {name: getattr(training, name) for name in training.__struct_fields__}
        summary["cautions"] = [*summary["cautions"], OF_SAMPLES]
