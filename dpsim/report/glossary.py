"""The glossary: every term of reports and help texts, in a sentence. ``docs/glossary.md`` is generated from it."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from typing import NamedTuple


class Term(NamedTuple):
    """A term: its name, other words for it, what it means, and the formula it stands for (plain text)."""

    name: str
    also: tuple[str, ...]
    text: str
    formula: str


@functools.cache
def terms() -> tuple[Term, ...]:
    """Return all terms, alphabetically."""
    content = tomllib.loads((resources.files("dpsim.report") / "glossary.toml").read_text(encoding="utf-8"))
    read = (
        Term(name, tuple(term.get("also", ())), term["text"], term.get("formula", ""))
        for name, term in content["terms"].items()
    )
    return tuple(sorted(read, key=lambda term: term.name.lower()))


def occurring(texts: Iterable[str]) -> tuple[Term, ...]:
    """Return the terms that occur in some texts, alphabetically. Of terms that overlap the longest counts."""
    by_word = _by_word()
    occurring_terms = {by_word[match.lower()] for text in texts for match in _pattern().findall(text)}
    return tuple(term for term in terms() if term in occurring_terms)


def without_terms(text: str) -> str:
    """Return a text without the terms that it has: what remains needs no explanation, or lacks one."""
    return " ".join(_pattern().sub(" ", text).split())


@functools.cache
def _by_word() -> dict[str, Term]:
    return {word.lower(): term for term in terms() for word in (term.name, *term.also)}


@functools.cache
def _pattern() -> re.Pattern[str]:
    words = sorted(_by_word(), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, words))})(?![\w-])", re.IGNORECASE)
