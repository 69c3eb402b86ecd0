"""``Verdict``: what can be said of the settings of one group. Every sentence, mark and cell on it is made from this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.report.words import percent

Said = Literal["nothing", "one setting", "no difference", "unsure", "best"]
MOST_NOISE = 0.3
"""Above this noise, or this drift, a sweep says nothing about its settings."""
_SURE = 1.5
"""The best setting is named where the effect exceeds the noise so many times."""
_LARGE_EFFECT = 0.1
"""An effect of this size may matter, even where it is below the uncertainty."""
_TIE = 1e-6
"""Predictions that differ by no more than this are a tie."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a sweep says of a group: ``nothing`` (with the ``reason``), or how its settings compare.

    ``one setting`` leaves no choice; with ``no difference`` and ``unsure`` none is surely the best. ``fastest`` is the
    one with the shortest measured median, ``slowest`` the one with the longest, and ``as_fast`` are those that cannot
    be told apart from the fastest: the difference is within the A/A difference and the half widths of the two
    intervals. ``chosen`` are those that are predicted to be fastest, several where the model predicts the same for
    them. ``model`` says whether its choice was ``right`` or ``wrong``, where that can be seen.
    """

    said: Said
    reason: str
    fastest: ComparedPoint
    slowest: ComparedPoint
    as_fast: tuple[ComparedPoint, ...]
    chosen: tuple[ComparedPoint, ...]

    @property
    def best(self) -> ComparedPoint | None:
        """The setting that is surely the best; ``None`` where none is."""
        return self.fastest if self.said == "best" else None

    @property
    def choice(self) -> bool:
        """Whether there is a choice between settings of which something can be said."""
        return self.said not in ("nothing", "one setting")

    @property
    def model(self) -> Literal["right", "wrong"] | None:
        """Whether the model's choice was right; ``None`` where no setting is surely the best, or its ties differ."""
        right = {point in self.as_fast for point in self.chosen}
        if self.said != "best" or len(right) > 1:
            return None
        return "right" if True in right else "wrong"

    def mark(self, point: ComparedPoint) -> str:
        """Return the star of the best setting and the diamond of the model's choice, as tables and maps show them."""
        return "★" * (point is self.best) + "◆" * (self.choice and point in self.chosen)

    def values(self, comparison: Comparison) -> dict[str, Any]:
        """Return the verdict for ``--json``; settings are indices of ``points``."""

        def indices(points: tuple[ComparedPoint, ...]) -> list[int]:
            return [index for index, point in enumerate(comparison.points) if any(point is each for each in points)]

        return {
            "said": self.said,
            "reason": self.reason,
            "best": next(iter(indices((self.fastest,) if self.best is not None else ())), None),
            "as_fast": indices(self.as_fast) if self.said == "best" else [],
            "chosen": indices(self.chosen) if self.choice else [],
            "model": self.model,
        }


def verdict(comparison: Comparison, group: Group) -> Verdict:
    """Return what can be said of the settings of a group."""
    members = comparison.members(group)
    fastest, predicted = comparison.best_measured(group), comparison.best_predicted(group)
    reason = _disturbance(members, group)
    said: Said = "best"
    if reason:
        said = "nothing"
    elif len(members) == 1:
        said = "one setting"
    elif group.below_noise and group.effect <= _LARGE_EFFECT:
        said = "no difference"
    elif group.below_noise or group.effect <= _SURE * group.noise_floor:
        said = "unsure"
    least_s = _predicted_s(predicted)
    return Verdict(
        said=said,
        reason=reason,
        fastest=fastest,
        slowest=max(members, key=lambda point: point.measured_s_per_sample),
        as_fast=tuple(point for point in members if slower_by(group, point, fastest) is None),
        chosen=tuple(point for point in members if abs(_predicted_s(point) / least_s - 1) <= _TIE),
    )


def marker(comparison: Comparison) -> Callable[[ComparedPoint], str]:
    """Return what gives a point its star and its diamond (``Verdict.mark``)."""
    of = {group.name: verdict(comparison, group) for group in comparison.groups}
    return lambda point: of[point.group].mark(point) if point.group in of else ""


def slower_by(group: Group, point: ComparedPoint, other: ComparedPoint) -> float | None:
    """Return time of a sample at a point / at another one - 1; ``None`` where that is within the noise of the two."""
    slower = point.measured_s_per_sample / other.measured_s_per_sample - 1
    noise = max(group.noise or 0.0, point.measured_noise, other.measured_noise)
    return slower if slower > noise else None


def _predicted_s(point: ComparedPoint) -> float:
    return point.predicted_step_s / point.global_batch


def _disturbance(members: Sequence[ComparedPoint], group: Group) -> str:
    """Return why nothing can be said about a group of settings; nothing where something can."""
    if few := next((point for point in members if point.too_few_clean), None):
        return f"only {few.too_few_clean} of other processes at one setting"
    if group.noise is not None and group.noise > MOST_NOISE:
        return f"two runs of one setting differ by {percent(group.noise)}"
    if group.drift is not None and abs(group.drift) > MOST_NOISE:
        return f"steps changed by {percent(group.drift, sign=True)} from the first third of the run to the last"
    if group.noise_floor > MOST_NOISE:
        return f"the medians are only known to {percent(group.noise_floor)}"
    return ""
