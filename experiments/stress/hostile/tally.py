"""The outcomes of a part's cases, kept in a file from which an interrupted part continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.harness.measurement.environment import stamp

SCHEMA = "dpsim.hostile/1"
_SAVE_EVERY_S = 5.0


class Outcome(Noun, frozen=True):
    """One case: its name, what became of it in a word or two, and what is wrong with that (empty: nothing)."""

    case: str
    became: str
    wrong: str = ""


class Tally(Noun, frozen=True):
    """All cases of a part so far: how many became what, and those that went wrong."""

    part: str
    seed: int
    cases: int = 0
    became: dict[str, int] = msgspec.field(default_factory=dict)
    wrong: tuple[Outcome, ...] = ()
    at: str = ""
    schema: str = SCHEMA

    def add(self, outcome: Outcome) -> Tally:
        """This tally with one more case."""
        became = self.became | {outcome.became: self.became.get(outcome.became, 0) + 1}
        wrong = (*self.wrong, outcome) if outcome.wrong else self.wrong
        return msgspec.structs.replace(self, cases=self.cases + 1, became=became, wrong=wrong, at=stamp())

    def text(self) -> str:
        """How many cases became what, as a table for people, and a line for each that went wrong."""
        lines = [f"{self.part}: {self.cases} cases, {len(self.wrong)} went wrong"]
        lines += [f"{count:8}  {what}" for what, count in sorted(self.became.items())]
        return "\n".join([*lines, *(f"  {outcome.case}: {outcome.wrong}" for outcome in self.wrong)])


def tallied(
    part: str, seed: int, cases: int, file: Path | None, run: Callable[[int, Callable[[Outcome], None]], None]
) -> Tally:
    """The tally of ``cases`` cases: ``run(first, add)`` adds the outcomes from case ``first`` on, in order.

    ``file`` is kept up to date and continued if it exists. Raises ``ConfigError`` where it is of another seed.
    """
    tally = Tally(part=part, seed=seed)
    if file is not None and file.exists():
        tally = codec.read(file, Tally, "tally", SCHEMA)
        if (tally.part, tally.seed) != (part, seed):
            raise ConfigError(
                f"{file} is of part {tally.part} with seed {tally.seed}",
                allowed=f"part {part} with seed {seed}",
                remedy="choose another folder with --output",
            )
    saved_s = time.monotonic()

    def add(outcome: Outcome) -> None:
        nonlocal tally, saved_s
        tally = tally.add(outcome)
        if file is not None and time.monotonic() > saved_s + _SAVE_EVERY_S:
            codec.write(file, tally)
            saved_s = time.monotonic()

    try:
        if tally.cases < cases:
            run(tally.cases, add)
    finally:
        if file is not None:
            codec.write(file, tally)
    return tally
