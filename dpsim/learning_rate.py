"""The learning rate of each step: a schedule of decay, a warm-up before it, and the linear scaling rule.

Source: Goyal et al. 2017 (arXiv:1706.02677), sections 2.1, 2.2 and 3.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.fields import Decides

DECAYS = ("constant", "step", "cosine")
_FORMS = "constant, step:EPOCH,EPOCH,... (also with gamma=0.1), cosine, or cosine:FINAL_FRACTION"


class Constant(Noun, frozen=True, tag_field="kind", tag="constant"):
    """The same rate throughout."""


class Step(Noun, frozen=True, tag_field="kind", tag="step"):
    """The rate times ``gamma`` from each of ``milestones`` on: epochs since the beginning of training, ascending."""

    milestones: tuple[float, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0.0, *self.milestones), (*self.milestones, math.inf), strict=True))
        if not self.milestones or not ascending:
            raise ConfigError(f"milestones {list(self.milestones)}", allowed="one or more epochs > 0, ascending")
        if not 0 < self.gamma < 1:
            raise ConfigError(f"gamma is {self.gamma}", allowed="a number between 0 and 1")


class Cosine(Noun, frozen=True, tag_field="kind", tag="cosine"):
    """Half a cosine from the end of the warm-up to the end of the run, down to ``final_fraction`` of the rate."""

    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"final fraction {self.final_fraction}", allowed="0 to 1")


class RateSchedule(Noun, frozen=True):
    """How the learning rate changes over a run; the optimizer's own is the rate at ``reference_batch`` samples a step.

    **Linear scaling.** With a reference batch the rate is multiplied by k = global batch / reference batch.
    **Warm-up.** Over the first ``warmup_epochs`` the rate rises by the same amount each step, from the unscaled rate
    to k times it; where k <= 1 (or there is no reference batch) it rises from one such amount instead. Then ``decay``
    goes on as if there had been none, its epochs counted from the beginning.
    **Momentum correction.** None is needed. Our SGD is their form (9), u = m u + g, w -= rate u: u holds no rate. In
    form (10), v = m v + rate g, w -= v, put v_t = rate_t u_t into (9): v_t = m (rate_t / rate_(t-1)) v_(t-1)
    + rate_t g_t. So (10) trains like (9) just when v is multiplied by rate_t / rate_(t-1) after each change, which
    is the momentum correction of their Remark 2.
    """

    decay: Annotated[Constant | Step | Cosine, Decides.BITS] = Constant()
    warmup_epochs: Annotated[
        float,
        Decides.BITS,
        "Epochs in which the learning rate rises to its value; with reference_batch, from the unscaled one.",
    ] = 0.0
    reference_batch: Annotated[
        int | None,
        Decides.BITS,
        "Multiply the learning rate by the global batch divided by this number of samples.",
    ] = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.warmup_epochs) and self.warmup_epochs >= 0):
            raise ConfigError(f"warmup_epochs is {self.warmup_epochs}", allowed="0 or more epochs")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise ConfigError(f"reference_batch is {self.reference_batch}", allowed="1 sample or more")
        if isinstance(self.decay, Step) and self.decay.milestones[0] < self.warmup_epochs:
            raise ConfigError(
                f"the rate falls at epoch {self.decay.milestones[0]:g}, in {self.warmup_epochs:g} epochs of warm-up",
                allowed="milestones after the warm-up",
                remedy="warm up for fewer epochs, or let it decay later",
            )


def learning_rate(
    schedule: RateSchedule, base: float, step: int, *, global_batch: int, steps_per_epoch: int, total_steps: int
) -> float:
    """The rate of step ``step`` (from 0) of ``total_steps``, in float64; a pure function, the same on every rank.

    ``base`` is the optimizer's own rate. With W steps of warm-up, step W is the first that has the whole rate;
    a cosine's floor would be reached in step ``total_steps``, the one after the last.
    """
    k = 1.0 if schedule.reference_batch is None else global_batch / schedule.reference_batch
    warmup = math.ceil(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup:
        start = 1 / k if k > 1 else 1 / (warmup + 1)
        return base * k * (start + (1 - start) * step / warmup)
    return base * k * _decayed(schedule.decay, step, warmup, steps_per_epoch, total_steps)


def _decayed(decay: Constant | Step | Cosine, step: int, warmup: int, steps_per_epoch: int, total_steps: int) -> float:
    if isinstance(decay, Constant):
        return 1.0
    if isinstance(decay, Step):
        return float(decay.gamma ** sum(step >= milestone * steps_per_epoch for milestone in decay.milestones))
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return decay.final_fraction + (1 - decay.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))


def parse_decay(text: str) -> Constant | Step | Cosine:
    """A decay from its token: ``constant``, ``step:10,15``, ``step:10,15,gamma=0.2``, ``cosine``, ``cosine:0.01``."""
    kind, colon, rest = text.partition(":")
    if kind not in DECAYS:
        raise unknown("schedule", text, DECAYS, remedy=f"write {_FORMS}")
    parts = rest.split(",") if colon else []
    named: dict[str, Any] = {}
    try:
        if parts and parts[-1].startswith("gamma="):
            named["gamma"] = float(parts.pop().removeprefix("gamma="))
        numbers = tuple(float(part) for part in parts)
    except ValueError:
        numbers = (math.nan,)
    if kind == "constant" and not colon:
        return Constant()
    if kind == "step" and numbers and not any(map(math.isnan, numbers)):
        return Step(milestones=numbers, **named)
    if kind == "cosine" and not named and len(numbers) == bool(colon) and not any(map(math.isnan, numbers)):
        return Cosine(final_fraction=numbers[0]) if numbers else Cosine()
    raise ConfigError(f"schedule {text!r} is not understood", allowed=_FORMS, remedy="for example step:10,15")
