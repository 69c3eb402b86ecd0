"""What users see stays as it is while the code moves: two committed reports, all help; and what counts as a change."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dpsim.experiments import command, golden
from dpsim.experiments.reports_page import write_reports
from dpsim.report.figures import style


@pytest.mark.parametrize(
    ("old", "new", "differing"),
    [
        ("a 1.0 b\nc", "a 1.00000000000001 b\nc", []),
        ("a 1.0 b\nc", "a 1.000001 b\nc", ["- a 1.0 b", "+ a 1.000001 b"]),
        ("0.0", "1e-300", ["- 0.0", "+ 1e-300"]),
        ("a\nb\nc", "a\nc", ["- b"]),
        ("a\nc", "a\nb\nc", ["+ b"]),
        ("5 ms", "5 s", ["- 5 ms", "+ 5 s"]),
        ("1 2", "1", ["- 1 2", "+ 1"]),
    ],
)
def test_words_differ_exactly_and_numbers_beyond_rounding(old: str, new: str, differing: list[str]) -> None:
    assert golden.lines_that_differ(old, new) == differing


def test_numbers_of_least_squares_may_differ_in_their_last_digits() -> None:
    assert golden.lines_that_differ("1.0 b", "1.0000005 b", golden.FITTED_TOLERANCE) == []
    assert golden.compared({"validation/points.csv": "1.0"}, {"validation/points.csv": "1.0000005"}) == 0
    assert golden.compared({"example/points.csv": "1.0"}, {"example/points.csv": "1.0000005"}) == 1


def test_figures_are_left_out_of_pages_and_pages_that_appear_or_go_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text("before<svg width=3>\n<path/></svg>after")
    assert golden.pages(tmp_path, figures=False) == {"index.html": "before<svg/>after"}
    assert golden.compared({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == 2
    assert "b: 1 lines differ\n  - 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["reproducibility/mlp", "devices"])
def test_committed_reports_are_drawn_again_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "_svg", lambda figure: "<svg></svg>\n")
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    committed = command.ROOT / "reports" / name
    shutil.copytree(committed, tmp_path / name, ignore=shutil.ignore_patterns("*.html", "*.md", "*.png", "*.svg"))
    write_reports(tmp_path, [tmp_path / name])
    drawn = golden.pages(tmp_path / name, figures=False)
    assert len(drawn) == 2
    for page, text in golden.pages(committed, figures=False).items():
        assert golden.lines_that_differ(text, drawn[page]) == []


def test_help_reads_as_it_did(dpsim: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of words is a commit of its own, in which ``python -m dpsim.experiments.golden --write-help`` is run."""
    monkeypatch.setenv("COLUMNS", "100")
    texts = golden.help_pages(lambda line: dpsim(*line.split())[1])
    assert golden.lines_that_differ(golden.HELP.read_text(encoding="utf-8"), golden.help_words(texts)) == []


def test_a_line_in_an_older_spelling_runs_as_it_is_typed_today(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def python(_: golden.Tree, *words: str) -> subprocess.CompletedProcess[str]:
        old = "--overlap" in words
        said = "  to do:   type: dpsim predict --set overlap=off" if old else ""
        return subprocess.CompletedProcess(words, 2 if old else 0, " ".join(words[2:]), said)

    monkeypatch.setattr(golden.Tree, "python", python)
    assert golden.Tree(tmp_path, tmp_path).shown("predict --overlap off") == "predict --set overlap=off"
