"""The glossary: what reports call their columns is explained in it, and a report ends with the terms that it has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dpsim.report.glossary import occurring, terms, without_terms
from dpsim.report.words import BASELINES

PACKAGE = Path(__file__).parents[2] / "dpsim"
_ORDINARY = """
0 1 95 a add added against all alone as assumed assumptions auto batch best better bits by cases cause citation command
computation difference different does doubt dpsim each elements explain fast fastest few fewer first fit from global
half in independent inf inside its job kind largest least licence lines local mean median MPI most ms name network not
of on one over part plain published question ratio record relative rests results rounding row rows run runs s second
set share size slowest source system table target that the time to too type us verdict what why wider width without
worst
"""
"""Words of column heads that a glossary would only repeat."""


def heads() -> set[str]:
    """The heads of all columns that are written in the package, as they stand in its source."""
    found = set(BASELINES.values())
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "head"]
                found |= {each.value for each in given if isinstance(each, ast.Constant)}
    return found


def test_every_word_of_a_column_head_is_ordinary_or_explained() -> None:
    known = heads()
    assert {"exposed ms", "regret", "best cap"} <= known
    left = {word: head for head in known for word in re.findall(r"\w+", without_terms(head))}
    unexplained = {word: head for word, head in left.items() if word not in _ORDINARY.split()}
    assert not unexplained, "explain these in dpsim/report/glossary.toml"


def test_a_word_that_nobody_explains_is_seen() -> None:
    assert without_terms("predicted flux of a bucket") == "flux of a"


def test_no_word_stands_for_two_terms() -> None:
    words = [word.lower() for term in terms() for word in (term.name, *term.also)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("term", terms(), ids=lambda term: term.name)
def test_a_term_is_explained_in_one_sentence(term: tuple[str, tuple[str, ...], str, str]) -> None:
    text = term[2]
    assert text[0].isupper() and text.endswith(".") and ". " not in text and len(text) < 200


def test_the_longest_term_counts() -> None:
    assert [term.name for term in occurring(["Fusion thresholds", "the fusion threshold", "exposed MS"])] == [
        "exposed communication",
        "fusion threshold",
    ]
