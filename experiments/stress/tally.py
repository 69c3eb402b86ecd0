"""The driver of attacks: cases, what became of each, what is wrong with that; a file from which they continue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import unknown
from dpsim.experiments import command
from dpsim.experiments.command import ROOT
from dpsim.launch.scratch import scratch

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


def shown(part: str, outcomes: Sequence[Outcome]) -> str:
    """Return how many cases became what, as a table for people, and a line for each that went wrong."""
    wrong = [f"  {outcome.case}: {outcome.wrong}" for outcome in outcomes if outcome.wrong]
    counts = sorted(Counter(outcome.became for outcome in outcomes).items())
    rows = [f"{count:8}  {became}" for became, count in counts]
    return "\n".join([f"{part}: {len(outcomes)} cases, {len(wrong)} went wrong", *rows, *wrong])


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


def attack(part: Part, cases: int, seed: int, file: Path | None) -> list[Outcome]:
    """Return the outcomes of ``cases`` cases. ``file`` has those so far, a line of JSON each; new ones are added."""
    lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
    outcomes = [codec.decode(codec.parse_json(line), Outcome, "outcome") for line in lines]
    with scratch("attack") as folder:
        for outcome in part.run(len(outcomes), cases, seed, folder) if len(outcomes) < cases else ():
            outcomes.append(outcome)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as log:
                    log.write(codec.to_json(outcome, indent=None) + "\n")
    return outcomes


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
            file = given.output / f"{title}-{given.seed}.jsonl" if given.output and part.continues else None
            outcomes = attack(part, given.cases or part.cases, given.seed, file)
            of_part, seconds = sum(bool(outcome.wrong) for outcome in outcomes), time.monotonic() - begin_s
            print(f"{shown(title, outcomes)}\n  {seconds:.0f} s", flush=True)
            wrong += of_part
            rows.append(f"{title:<12}{len(outcomes):>8}{of_part:>8}{seconds:>9.0f}")
        print("\n".join(["", *rows]))
        return int(wrong > 0)

    return command.ended(name, run)
