"""Breaks the science of dpsim in 40 places, one at a time, and shows that the tests notice each.

``python -m dpsim.experiments.stress.mutations [--only NAME ...] [--renamed OLD=NEW ...]``. The mutations stand
in ``mutations.toml``. Each replaces a text that occurs exactly once in ``dpsim`` and ``kernels``, wherever that is and
however it is wrapped, so that files may move; where an identifier got another name, ``--renamed`` says which. All this
happens in a copy of the checkout, of which tests marked slow are left out and the first failure ends a run: first the
tests that a mutation names, then, if these pass or are gone, the whole suite. A failed test must pass again without the
mutation. Exits with 0 if every mutation was caught. Takes 15 minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dpsim.experiments import command
from dpsim.experiments.command import ROOT
from dpsim.launch import child_process

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
_LIMIT_S = 1800.0
"""For each run of tests."""
_NOTHING_FAILED = (0, 5)
"""Exit codes of pytest: all tests passed, or none was selected."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A text of the source and what replaces it; ``tests`` are the arguments of pytest that select what notices it."""

    name: str
    broken: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def renamed(self, names: Mapping[str, str]) -> Mutation:
        """Return the mutation with identifiers replaced, in the text and in its replacement."""

        def rename(text: str) -> str:
            return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)

        return Mutation(**vars(self) | {"text": rename(self.text), "replacement": rename(self.replacement)})


class Outcome(NamedTuple):
    """The verdict on a mutation, ``caught`` or why it was not; ``detail`` names the failed test, or says more."""

    verdict: str
    detail: str = ""


def read_mutations() -> list[Mutation]:
    """Read the mutations, in the order of the file."""
    tables = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**table | {"tests": tuple(table["tests"])}) for table in tables]


def pattern(text: str) -> re.Pattern[str]:
    """Return what matches a text of Python source however it is wrapped: with other blanks and trailing commas."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    joined = r"\s*".join((r"(?:,\s*)?" if token in ")]}" else "") + re.escape(token) for token in tokens)
    first, last = (r"\b" if re.match(r"\w", token) else "" for token in (tokens[0], tokens[-1]))
    return re.compile(first + joined + last)


def occurrences(tree: Path, text: str) -> list[tuple[Path, re.Match[str]]]:
    """Find a text in ``dpsim`` and ``kernels`` of a checkout; in ``dpsim/experiments`` there is no science."""
    files = {path.resolve() for folder in ("dpsim", "kernels") for path in (tree / folder).rglob("*.py")}
    experiments = (tree / "experiments").resolve()
    sought = pattern(text)
    return [
        (path, match)
        for path in sorted(files)
        if not path.is_relative_to(experiments)
        for match in sought.finditer(path.read_text(encoding="utf-8"))
    ]


def try_mutation(tree: Path, mutation: Mutation, limit_s: float) -> Outcome:
    """Break a checkout, run the tests that are named, and all if none of these fails, and mend it again."""
    where = occurrences(tree, mutation.text)
    if len(where) != 1:
        return Outcome("place not found", f"the text occurs {len(where)} times: {mutation.text}")
    ((path, match),) = where
    source = path.read_text(encoding="utf-8")
    path.write_text(source[: match.start()] + mutation.replacement + source[match.end() :], encoding="utf-8")
    try:
        outcome = Outcome("not caught")
        if all(argument.startswith("-") or (tree / argument).exists() for argument in mutation.tests):
            outcome = run_tests(tree, mutation.tests, limit_s)
        if outcome.verdict == "not caught":
            outcome = run_tests(tree, ["-n", "2", "--dist", "loadfile", "tests"], limit_s)
    finally:
        path.write_text(source, encoding="utf-8")
    if outcome.verdict != "caught":
        return outcome
    without = run_tests(tree, [outcome.detail], limit_s)
    if without.verdict != "not caught":
        return Outcome("not caught", f"without the mutation, too, {outcome.detail} fails: {without.detail}")
    return outcome


def run_tests(tree: Path, arguments: Sequence[str], limit_s: float) -> Outcome:
    """Run pytest in a checkout, on that checkout's package, up to the first failure."""
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:dpsim",
        "-x",
        "-m",
        "not slow",
        "-rfE",
        "--tb=no",
        "--no-header",
        *arguments,
    ]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "DPSIM_CACHE_DIR")
    }
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # byte code is taken for that of any file of the same second and size
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    try:
        done = child_process.run(pytest, timeout_s=limit_s, env=environment, cwd=tree)
    except subprocess.TimeoutExpired:
        return Outcome("not caught", f"the tests {' '.join(arguments)} took more than {limit_s:.0f} s")
    output = done.stdout + done.stderr
    failed = _FAILED.search(output)
    if failed is not None:
        return Outcome("caught", failed[1])
    if done.returncode in _NOTHING_FAILED:
        return Outcome("not caught")
    return Outcome("does not run", " ".join(output.split())[-500:])


def copy_checkout(root: Path, tree: Path) -> None:
    """Copy the files that Git knows or does not ignore, as they are now, into a checkout of their own."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_symlink() or (root / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name, follow_symlinks=False)
    for words in (("init", "--quiet"), ("add", "--all", "--force")):
        subprocess.run(["git", "-C", str(tree), *words], check=True)


def main() -> int:
    """Try mutations and print what became of each; 1 where one was not caught."""
    options = command.parser("stress.mutations", __doc__)
    options.add_argument("--only", nargs="+", metavar="NAME", help="try these mutations alone")
    options.add_argument(
        "--renamed", nargs="+", default=[], metavar="OLD=NEW", help="identifiers with another name now"
    )
    given = options.parse_args()
    names = dict(
        pair.split("=", 1) if "=" in pair else options.error(f"{pair}: write OLD=NEW") for pair in given.renamed
    )
    mutations = {mutation.name: mutation.renamed(names) for mutation in read_mutations()}
    if unknown := sorted({*(given.only or ())} - mutations.keys()):
        options.error(f"no mutation is named {', '.join(unknown)}: mutations.toml names them all")
    chosen = [mutations[name] for name in given.only or mutations]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="dpsim-mutations-") as folder:
        copy_checkout(ROOT, Path(folder))
        for mutation in chosen:
            begin_s = time.monotonic()
            outcome = try_mutation(Path(folder), mutation, _LIMIT_S)
            caught += outcome.verdict == "caught"
            took_s = time.monotonic() - begin_s
            print(f"{outcome.verdict:16}{mutation.name:36}{took_s:5.0f} s  {outcome.detail}", flush=True)
    print(f"{caught} of {len(chosen)} mutations were caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
