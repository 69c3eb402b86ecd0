"""Runs with letters: equal ones have equal bits. Two runs are compared before any rank starts, and told why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether two runs have the same bits (None: not known), or the first step and tensor that differ; and why."""

    same: bool | None
    why: str
    step: int | None = None
    tensor: str = ""

    @property
    def verdict(self) -> str:
        """``same bits``, ``differ from step 1 on, first in dense2.bias``, or ``not known``."""
        if self.same is None:
            return "not known"
        return "same bits" if self.same else f"differ from step {self.step} on, first in {self.tensor}"


@dataclass(frozen=True, kw_only=True)
class LetteredRun:
    """A run: its ``name`` among others of its ``section``, its ``settings`` by the names of ``--json``, its ``letter``.

    Runs of one ``law`` have the same bits for one reason; those of one letter may have it for several.
    """

    name: str
    section: str
    settings: Mapping[str, Any]
    letter: str
    law: int


class LetteredRuns(Protocol):
    """The runs, each compared with its reference and with any other.

    ``title`` says what is compared, and ``against`` with what each run is.
    """

    @property
    def title(self) -> str: ...

    @property
    def against(self) -> str: ...

    @property
    def runs(self) -> Sequence[LetteredRun]: ...

    def reference(self, number: int) -> int:
        """Return the run that a run is compared with."""

    def compare(self, number: int, other: int) -> Comparison:
        """Compare a run with another one."""


def pairs(lettered: LetteredRuns) -> list[tuple[int, int]]:
    """Return the first runs of every two letters, those of which the other is a reference first."""
    letters = [run.letter for run in lettered.runs]
    first = [letters.index(each) for each in dict.fromkeys(letters)]
    every = [(number, other) for position, other in enumerate(first) for number in first[position + 1 :]]
    return sorted(every, key=lambda pair: pair[1] != lettered.reference(pair[0]))


def alike(lettered: LetteredRuns) -> list[tuple[int, int]]:
    """Return runs with the first of their letter: one for each law, besides the first run itself."""
    firsts: dict[str, int] = {}
    others: dict[tuple[str, int], int] = {}
    for number, run in enumerate(lettered.runs):
        if firsts.setdefault(run.letter, number) != number:
            others.setdefault((run.letter, run.law), number)
    return [(number, firsts[letter]) for (letter, _), number in others.items()]
