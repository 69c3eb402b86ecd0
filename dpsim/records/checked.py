"""``Checked``: what holding a sweep against its hashes and its inputs showed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpsim.setting import Setting

SAME = 1e-8
"""Numbers that differ relatively by less are the same: processors and libraries round their last digits otherwise."""
Verdict = Literal["verified", "of another model", "damaged"]


@dataclass(frozen=True, kw_only=True)
class CheckedPoint:
    """The step of one setting in seconds, as a record states it and as today's model predicts it from its inputs."""

    setting: Setting
    stated_step_s: float
    today_step_s: float

    @property
    def difference(self) -> float:
        """today / stated - 1."""
        return self.today_step_s / self.stated_step_s - 1


@dataclass(frozen=True, kw_only=True)
class CheckedRecord:
    """A record of a sweep: the SHA-256 that its results state (empty: none), and that of its content.

    ``points`` are those of predictions, with today's predictions from the inputs beside them. ``agrees`` says whether
    these are the same to every digit that counts; it is ``None`` for inputs, which nothing predicts.
    """

    what: str
    file: str
    stated: str
    computed: str
    points: tuple[CheckedPoint, ...] = ()
    agrees: bool | None = None

    @property
    def as_stated(self) -> bool:
        """Whether the content has the hash that is stated, where one is."""
        return self.stated in ("", self.computed)

    @property
    def same_steps(self) -> bool:
        """Whether today's steps are the stated ones, to eight digits or more."""
        return all(abs(point.difference) < SAME for point in self.points)

    @property
    def largest(self) -> CheckedPoint | None:
        """The point of which today's prediction differs most."""
        return max(self.points, key=lambda point: abs(point.difference), default=None)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What holding a sweep against its hashes and inputs showed; ``damage`` says what is wrong (empty: nothing).

    Its predictions are by the model of ``model_version``; ``today`` is that of this dpsim.
    """

    model_version: int
    today: int
    records: tuple[CheckedRecord, ...] = ()
    damage: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether everything is as stated and today's model predicts the same, or why not."""
        if self.damage:
            return "damaged"
        predicted = [record.agrees for record in self.records if record.agrees is not None]
        same = bool(predicted) and all(predicted)
        return "verified" if self.model_version == self.today or same else "of another model"
