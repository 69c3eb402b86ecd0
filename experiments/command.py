"""What the commands ``python -m dpsim.experiments.NAME`` share: parser, progress, errors in words, page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dpsim.errors import DpsimError

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
_END = "<!-- end -->"


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the description of a module, its lines as they stand."""
    shown = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"python -m dpsim.experiments.{name}", description=description, formatter_class=shown
    )


def tell(line: str) -> None:
    """Show a line of progress."""
    print(line, file=sys.stderr, flush=True)


def ended(name: str, run: Callable[[], int | None]) -> int:
    """Return the exit code of ``run``: 0 for None, and 2 with a message after a ``DpsimError``."""
    try:
        return run() or 0
    except DpsimError as error:
        tell(f"{name}: {error}")
        return 2


def with_parts(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the text of a page with its parts made anew; each begins after the comment by which ``parts`` names it."""
    for begin, make in parts.items():
        before, _, rest = text.partition(begin)
        text = before + begin + make() + _END + rest.partition(_END)[2]
    return text


def rewrite(path: Path, page: Callable[[str], str]) -> None:
    """Replace the file of a page by what ``page`` makes of its text."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
