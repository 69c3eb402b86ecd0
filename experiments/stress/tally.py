"""The driver of all attacks: cases, what became of each, what is wrong with that; a file from which they continue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.experiments import command
from dpsim.experiments.command import ROOT
from dpsim.launch.scratch import scratch
from dpsim.study.environment import stamp

SCHEMA = "dpsim.hostile/1"
CASES_VARIABLE = "DPSIM_ATTACK_CASES"
"""The environment variable by which property tests learn how many cases to draw."""
_STATISTICS = re.compile(r"(\d+) passing, (\d+) failing, and (\d+) invalid test cases((?:\n {4}.*)*)")
_EVENT = re.compile(r"\* +([\d.]+)%, (.+)")
_SHOWN = 4000


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
        """Return this tally with one more case."""
        became = self.became | {outcome.became: self.became.get(outcome.became, 0) + 1}
        wrong = (*self.wrong, outcome) if outcome.wrong else self.wrong
        return msgspec.structs.replace(self, cases=self.cases + 1, became=became, wrong=wrong, at=stamp())

    def text(self) -> str:
        """Return how many cases became what, as a table for people, and a line for each that went wrong."""
        lines = [f"{self.part}: {self.cases} cases, {len(self.wrong)} went wrong"]
        lines += [f"{count:8}  {what}" for what, count in sorted(self.became.items())]
        return "\n".join([*lines, *(f"  {outcome.case}: {outcome.wrong}" for outcome in self.wrong)])


Run = Callable[[int, int, int, Path], Iterable[Outcome]]
"""``run(first, last, seed, folder)`` yields the outcomes of cases ``first`` to ``last``, in order."""


class Part(NamedTuple):
    """An attack, with its usual number of cases. One that ``continues`` goes on where it was interrupted."""

    run: Run
    cases: int
    continues: bool = True


def by_hypothesis(tests: str) -> Run:
    """Return the attack of property tests, a file of the checkout: hypothesis draws its cases, and tells of events."""

    def run(first: int, last: int, seed: int, folder: Path) -> Iterator[Outcome]:
        flags = [f"--hypothesis-seed={seed}", "--hypothesis-show-statistics", "--timeout=0", "-n", "2"]
        line = [sys.executable, "-m", "pytest", str(ROOT / tests), *flags]
        environment = os.environ | {CASES_VARIABLE: str(last)}
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        for passing, failing, invalid, events in _STATISTICS.findall(done.stdout):
            drawn = sum(map(int, (passing, failing, invalid)))
            for share, became in _EVENT.findall(events):
                yield from [Outcome(case=tests, became=became)] * round(float(share) / 100 * drawn)
        if done.returncode:
            yield Outcome(case=tests, became="failed", wrong=(done.stdout + done.stderr)[-_SHOWN:])

    return run


def tallied(part: str, seed: int, cases: int, file: Path | None, run: Callable[[int], Iterable[Outcome]]) -> Tally:
    """Return the tally of ``cases`` cases: ``run(first)`` yields the outcomes from case ``first`` on, in order.

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
    for outcome in run(tally.cases) if tally.cases < cases else ():
        tally = tally.add(outcome)
        if file is not None:
            codec.write(file, tally)
    return tally


def attack(title: str, part: Part, cases: int, seed: int, output: Path | None) -> Tally:
    """Run an attack. Raises ``ConfigError`` for counts of another seed."""
    file = output / f"{title}.json" if output is not None and part.continues else None
    with scratch("attack") as folder:
        return tallied(title, seed, cases, file, lambda first: part.run(first, cases, seed, folder))


def main(name: str, description: str | None, parts: Mapping[str, Part]) -> int:
    """Run the command of some attacks: print their tallies and a table of them; 1 if anything went wrong."""
    options = command.parser(f"stress.{name}", description)
    options.add_argument("--parts", default=",".join(parts))
    options.add_argument("--cases", type=int)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, help="folder for the counts, from which an interrupted part continues")
    given = options.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it

    def run() -> int:
        rows = [f"{'attack':<12}{'cases':>8}{'wrong':>8}{'seconds':>9}"]
        wrong = 0
        for title in given.parts.split(","):
            if title not in parts:
                raise unknown("part", title, parts)
            part, begin_s = parts[title], time.monotonic()
            tally = attack(title, part, given.cases or part.cases, given.seed, given.output)
            seconds = time.monotonic() - begin_s
            print(f"{tally.text()}\n  {seconds:.0f} s", flush=True)
            wrong += len(tally.wrong)
            rows.append(f"{title:<12}{tally.cases:>8}{len(tally.wrong):>8}{seconds:>9.0f}")
        print("\n".join(["", *rows]))
        return int(wrong > 0)

    return command.ended(name, run)
