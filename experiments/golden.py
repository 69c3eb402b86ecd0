"""``python -m dpsim.experiments.golden`` shows that a refactoring changes nothing that users see.

The committed reports are drawn again from their records and compared with the committed pages, the figures left out,
since their bytes depend on the version of matplotlib. With ``--base REV`` that revision is checked out, and both trees
run the same commands in turn; compared is then also what has no committed copy: the help of every command, what
reports print, their ``--json``, tables and figures, predictions, refusals, and the weights after training, also of one
that the older revision began. Texts are equal line by line, their numbers to 1e-12; those of
``reports/validation`` to 1e-6, since its least squares end in other last digits on another processor.

``--speed`` gives the times of training, of predictions and of starting, new over old, in turns.
It exits with 1 where anything differs but the speed. ``--write-help`` keeps the words of all help pages for
``make test``, in ``tests/cli/help.txt``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsim.errors import DpsimError
from dpsim.experiments import command
from dpsim.experiments.command import ROOT
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.statistics import median_ratio

HELP = ROOT / "tests/cli/help.txt"
TOLERANCE = 1e-12
FITTED, FITTED_TOLERANCE = "validation/", 1e-6
"""The pages with numbers from least squares."""
SPEED_ROUNDS = 9
_TIMEOUT_S = 1800.0
_SHOWN = 8
_TODAY = re.compile(r"^ +to do: +type: dpsim (.+)$", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_FIGURE = re.compile(r"<svg.*?</svg>", re.DOTALL)
_MEASURED = re.compile(r'"(?:images_per_s|step_s|exposed_communication_s)": [^,\n]*')
"""Fields of ``dpsim train --json`` that differ from run to run."""
_RECORDS = ("results.json", "allreduce.json", "reproduce.json", "quality.json")
"""The records of which ``dpsim report`` draws a report."""

_COMPARED: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The commands that are run in both trees."""


@dataclass(frozen=True)
class Tree:
    """A checkout whose commands run in it, with a cache of its own of compiled kernels and measured choices."""

    source: Path
    cache: Path

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run this tree's Python code. A fixed seed of hashes keeps the order of a set of strings."""
        variables = {"PYTHONPATH": str(self.source), "DPSIM_CACHE_DIR": str(self.cache)}
        env = os.environ | variables | {"PYTHONHASHSEED": "0", "COLUMNS": "100", "NO_COLOR": "1"}
        line = [sys.executable, *words]
        try:
            return subprocess.run(
                line, cwd=self.source, env=env, text=True, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DpsimError(str(error)) from error

    def shown(self, line: str) -> str:
        """Return what a command prints and its exit code; of an older spelling, those of the line that it names."""
        done = self.python("-m", "dpsim", *shlex.split(line))
        if done.returncode == 2 and (today := _TODAY.search(done.stderr)) is not None:
            return self.shown(today[1])
        text = f"{done.stdout}{done.stderr}" + (f"exit code {done.returncode}\n" if done.returncode else "")
        return text.replace(str(self.source), "ROOT")


def lines_that_differ(old: str, new: str, tolerance: float = TOLERANCE) -> list[str]:
    """Return the differing lines of two texts, with ``-`` or ``+`` before; numbers are equal to a tolerance."""
    if old == new:
        return []
    lines = old.splitlines(), new.splitlines()
    differing: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        removed, added = lines[0][a:b], lines[1][c:d]
        if kind == "equal":
            continue
        if len(removed) == len(added) and all(_equal(*pair, tolerance) for pair in zip(removed, added, strict=True)):
            continue
        differing += [f"- {line}" for line in removed] + [f"+ {line}" for line in added]
    return differing


def _equal(old: str, new: str, tolerance: float) -> bool:
    """Return whether two lines have the same words, and the same numbers to a relative tolerance."""
    numbers = _NUMBER.findall(old), _NUMBER.findall(new)
    return (
        _NUMBER.split(old) == _NUMBER.split(new)
        and len(numbers[0]) == len(numbers[1])
        and all(
            a == b or math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=0.0)
            for a, b in zip(*numbers, strict=True)
        )
    )


def pages(folder: Path, *, figures: bool) -> dict[str, str]:
    """Return the texts of all generated pages below a folder by their names there, with or without their figures."""
    texts = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".md", ".csv") or (figures and path.suffix == ".svg"):
            text = path.read_text(encoding="utf-8")
            texts[path.relative_to(folder).as_posix()] = text if figures else _FIGURE.sub("<svg/>", text)
    return texts


def help_pages(shown: Callable[[str], str]) -> dict[str, str]:
    """Return the help of every command by its line; ``shown`` runs a line and returns what it prints."""
    texts: dict[str, str] = {}
    waiting = ["--help-all"]
    while waiting:
        texts |= {line: shown(line) for line in waiting}
        waiting = [
            f"{line.removesuffix('--help-all')}{name} --help-all"
            for line in waiting
            for box in re.findall(r"╭─ Commands.*?╰", texts[line], re.DOTALL)
            for name in re.findall(r"^│ ([^-\s]\S*) ", box, re.MULTILINE)
        ]
    return texts


def help_words(texts: Mapping[str, str]) -> str:
    """Return the words of help pages without their layout, which depends on the version of the library that draws."""
    parts = []
    for line, text in texts.items():
        words = re.sub(r"[╭╮╰╯│─\s]+", " ", text).strip()
        parts.append(f"dpsim {line}\n  " + re.sub(r" (?=--|\* --|dpsim )", "\n  ", words))
    return "\n\n".join(parts) + "\n"


def drawn(tree: Tree, *, figures: bool) -> dict[str, str]:
    """Return the pages of all committed reports, drawn again by this tree."""
    with tempfile.TemporaryDirectory(prefix="dpsim-golden-") as scratch:
        done = tree.python("-m", "dpsim.experiments.reports_page", "--output", scratch)
        if done.returncode:
            raise DpsimError(f"the reports of {tree.source} cannot be drawn: {done.stderr.strip()}")
        return pages(Path(scratch), figures=figures)


def outputs(tree: Tree) -> dict[str, str]:
    """Return whatever a tree shows that is the same in every run and on every machine, by what it comes from."""
    texts = help_pages(tree.shown) | drawn(tree, figures=True)
    reports = sorted({path.parent for name in _RECORDS for path in (tree.source / "reports").rglob(name)})
    with tempfile.TemporaryDirectory(prefix="dpsim-golden-") as scratch:
        lines = [
            f"report {folder.relative_to(tree.source)} --output {scratch}/{number} {flags}"
            for number, folder in enumerate(reports)
            for flags in ("--verbose --format md", "--json --format csv")
        ]
        for line in lines:  # one after the other: both forms of a report write into one folder
            texts[line.replace(scratch, "SCRATCH")] = tree.shown(line).replace(scratch, "SCRATCH")
        tables = pages(Path(scratch), figures=False)
        texts |= {f"{name} of dpsim report": text for name, text in tables.items() if name.endswith(".csv")}
    with ThreadPoolExecutor(4) as pool:
        predictions: list[str] = _COMPARED["predictions"]
        lines = [*predictions, *(f"{line} --json" for line in predictions), *_COMPARED["refusals"]]
        texts |= zip(lines, pool.map(tree.shown, lines), strict=True)
    for flags in _COMPARED["trainings"]:
        line = f"train {flags} --steps 3 --reproducible --json"
        texts[line] = _MEASURED.sub("", tree.shown(line))
    return texts


def resumed(old: Tree, new: Tree) -> dict[str, tuple[str, str]]:
    """Return what a training ends with, uninterrupted in the old tree, and begun there and continued in the new."""
    line = _COMPARED["resumed"]
    with tempfile.TemporaryDirectory(prefix="dpsim-golden-") as scratch:
        old.shown(f"{line} --steps 3 --checkpoint {scratch}/run")
        continued = new.shown(f"train --resume {scratch}/run --steps 6 --json")
    return {"train --resume": (_ended(old.shown(f"{line} --steps 6 --json")), _ended(continued))}


def _ended(text: str) -> str:
    return "\n".join(re.findall(r'"(?:digest|test_accuracy|final_loss)": .*|exit code .*', text))


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[None]:
    """Hold a temporary worktree of a revision. Raises ``DpsimError``."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    try:
        added = git("worktree", "add", "--detach", str(folder), revision)
        if added.returncode:
            raise DpsimError(f"git cannot check out {revision!r}: {added.stderr.strip()}")
        yield
    finally:
        git("worktree", "remove", "--force", str(folder))


def speeds(old: Tree, new: Tree) -> Iterator[str]:
    """Yield the ratio of the median times, new over old, for each timed command, with its 95 % interval."""
    for name, line in _COMPARED["speeds"].items():

        def visit(tree: Tree, line: str = line) -> float:
            begin_s = time.perf_counter()
            done = tree.python(*line.split(maxsplit=1 if line.startswith("-c") else -1))
            elapsed_s = time.perf_counter() - begin_s
            if done.returncode:
                raise DpsimError(f"{line} fails in {tree.source}: {done.stderr.strip()}")
            return float(json.loads(done.stdout)["summary"]["step_s"]) if "--json" in line else elapsed_s

        visits = {tree: functools.partial(visit, tree) for tree in (old, new)}
        times_s = in_turns(visits, StopRule(least_rounds=SPEED_ROUNDS, most_rounds=SPEED_ROUNDS))
        ratio = median_ratio(times_s[new], times_s[old])
        yield f"{name}, new over old: {ratio.median:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"


def compared(old: Mapping[str, str], new: Mapping[str, str]) -> int:
    """Print what differs, by page; return how many pages do."""
    different = 0
    for name in dict.fromkeys((*old, *new)):
        tolerance = FITTED_TOLERANCE if name.startswith(FITTED) else TOLERANCE
        differing = lines_that_differ(old.get(name, ""), new.get(name, ""), tolerance)
        if not differing:
            continue
        different += 1
        print(f"{name}: {len(differing)} lines differ")
        for line in differing[:_SHOWN]:
            print(f"  {line[:300]}")
    print(f"{len(new)} pages and texts: {different or 'none'} differ", flush=True)
    return different


def main() -> int:
    """Print what differs; return 1 where anything does, 2 where the trees cannot be compared."""
    options = command.parser("golden", __doc__)
    options.add_argument("--base", help="the revision to compare with: a commit, a branch or a tag")
    options.add_argument("--speed", action="store_true", help="only compare speeds (with --base)")
    options.add_argument("--write-help", action="store_true", help="only write the words of all help pages")
    given = options.parse_args()
    if given.speed and not given.base:
        options.error("--speed needs --base REV")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def run(scratch: Path) -> int:
        new = Tree(ROOT, scratch / "cache")
        if given.write_help:
            HELP.write_text(help_words(help_pages(new.shown)), encoding="utf-8")
            return 0
        if given.base is None:
            again, committed = drawn(new, figures=False), pages(ROOT / "reports", figures=False)
            return int(compared({name: committed.get(name, "") for name in again}, again) > 0)
        with checked_out(given.base, scratch / "base"):
            old = Tree(scratch / "base", scratch / "cache" if given.speed else scratch / "base-cache")
            if given.speed:
                print("\n".join(speeds(old, new)))
                return 0
            pairs = resumed(old, new)
            before, after = outputs(old), outputs(new)
            before |= {name: pair[0] for name, pair in pairs.items()}
            after |= {name: pair[1] for name, pair in pairs.items()}
            return int(compared(before, after) > 0)

    with tempfile.TemporaryDirectory(prefix="dpsim-golden-") as name:
        return command.ended("golden", lambda: run(Path(name).resolve()))


if __name__ == "__main__":
    raise SystemExit(main())
