"""The list of mutations, how a place is found, and what is reported of a mutation, on a package of three lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpsim.experiments.stress.mutations import Mutation, occurrences, pattern, read_mutations, try_mutation

MUTATION = Mutation(
    name="sum", broken="Numbers are subtracted.", text="a + b", replacement="a - b", tests=("tests/first",)
)
_CHECKS = {
    "tests/first": "assert add(2, 0) == 2",
    "tests/second": "assert add(2, 1) in (1, 3)",
    "tests/third": "assert add(2, 1) == 3",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of which only ``tests/third`` notices the mutation."""
    for folder in ("dpsim", "kernels", "experiments"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "dpsim" / "experiments").symlink_to("../experiments")
    (tmp_path / "dpsim" / "kernels").symlink_to("../kernels")
    (tmp_path / "kernels" / "add.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "experiments" / "other.py").write_text("a, b = 1, 2\nc = a + b\n")
    for folder, check in _CHECKS.items():
        (tmp_path / folder).mkdir(parents=True)
        test = f"from dpsim.kernels.add import add\n\ndef test_{Path(folder).name}():\n    {check}\n"
        (tmp_path / folder / f"test_{Path(folder).name}.py").write_text(test)
    return tmp_path


def test_there_are_forty_mutations_that_change_something() -> None:
    mutations = read_mutations()
    assert len({mutation.name for mutation in mutations}) == len(mutations) == 40
    assert all(not pattern(mutation.text).fullmatch(mutation.replacement) for mutation in mutations)


@pytest.mark.parametrize("wrapped", ["f(a, b[i])", "f(\n    a,\n    b[i],\n)", "f(a,b[ i ])"])
def test_a_text_is_found_however_it_is_wrapped(wrapped: str) -> None:
    assert pattern("f(a, b[i])").fullmatch(wrapped)


def test_a_name_is_not_found_within_another_one() -> None:
    assert not pattern("_ROUNDS = 1").search("_MOST_ROUNDS = 1") and not pattern("_ROUNDS = 1").search("_ROUNDS = 10")


def test_a_renamed_identifier_is_replaced_everywhere() -> None:
    renamed = MUTATION.renamed({"a": "left", "b": "right"})
    assert (renamed.text, renamed.replacement) == ("left + right", "left - right")


def test_experiments_and_links_do_not_count(tree: Path) -> None:
    assert [path for path, _ in occurrences(tree, MUTATION.text)] == [tree / "kernels" / "add.py"]


@pytest.mark.parametrize("tests", ["tests/third", "tests/first", "tests/of_an_earlier_version"])
def test_a_mutation_that_any_test_notices_is_caught_and_undone(tree: Path, tests: str) -> None:
    before = (tree / "kernels" / "add.py").read_text()
    outcome = try_mutation(tree, replace(MUTATION, tests=(tests,)), 60)
    assert (outcome.verdict, outcome.detail) == ("caught", "tests/third/test_third.py::test_third")
    assert (tree / "kernels" / "add.py").read_text() == before


def test_a_mutation_that_no_test_notices_is_not_caught(tree: Path) -> None:
    (tree / "tests" / "third" / "test_third.py").unlink()
    assert try_mutation(tree, MUTATION, 60).verdict == "not caught"


def test_a_test_that_fails_without_the_mutation_catches_nothing(tree: Path) -> None:
    (tree / "tests" / "first" / "test_first.py").write_text("def test_first():\n    assert False\n")
    outcome = try_mutation(tree, MUTATION, 60)
    assert outcome.verdict == "not caught" and "without the mutation, too, tests/first/test_first.py" in outcome.detail


def test_a_package_that_cannot_be_imported_catches_nothing(tree: Path) -> None:
    outcome = try_mutation(tree, replace(MUTATION, replacement="a b"), 60)
    assert outcome.verdict == "does not run" and "test_first.py" in outcome.detail


@pytest.mark.parametrize(("text", "found"), [("a * b", "0 times"), ("a", "2 times")])
def test_a_text_that_does_not_occur_once_is_told(tree: Path, text: str, found: str) -> None:
    outcome = try_mutation(tree, replace(MUTATION, text=text), 60)
    assert outcome.verdict == "place not found" and found in outcome.detail
