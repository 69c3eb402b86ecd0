"""The generated parts of a page that is otherwise written by hand: what stands between two comments of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

_END = "<!-- end -->"


def with_parts(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the text of a page with its parts made anew; each begins after the comment by which ``parts`` names it."""
    for begin, make in parts.items():
        before, _, rest = text.partition(begin)
        text = before + begin + make() + _END + rest.partition(_END)[2]
    return text


def rewrite(path: Path, page: Callable[[str], str]) -> None:
    """Replace the file of a page by what ``page`` makes of its text."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
