"""The page that lists all reports: they are drawn again from their records, whatever was drawn before."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest
from published_files import EXPERIMENTS
from report_factory import sweep

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.experiments import reports_page
from dpsim.experiments.reports_page import ACCURACY, SERVED, committed, write_reports
from dpsim.harness.load import load
from dpsim.report.sweep.summary import verdicts
from dpsim.validation.page import content as validation_content
from dpsim.validation.run import validate


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Two folders: the records of a sweep, and the page of an experiment that has served."""
    predictions, results = sweep()
    codec.write(tmp_path / "thresholds" / "predictions.json", predictions)
    codec.write(tmp_path / "thresholds" / "results.json", results)
    (served,) = SERVED
    (cost := tmp_path / served).mkdir(parents=True)
    (cost / "index.html").write_text("<h1>Same &amp; slower?</h1>")
    (cost / "report.md").write_text("# cost\n\nHow much slower?\n\n- By 3 %.\n- By 5 %.\n\n## Steps\n")
    (cost / "cost.svg").write_text("<svg/>")
    return tmp_path


def test_reports_are_drawn_again_and_listed_with_question_verdict_and_figure(reports: Path) -> None:
    (served,) = SERVED
    folders = [reports / served, reports / "thresholds"]
    stale = folders[1] / "report.md"
    stale.write_text("of an earlier version")
    page = write_reports(reports, folders)
    assert "## " in stale.read_text() and "of an earlier version" not in stale.read_text()
    text = html.unescape(page.read_text())
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert links == ["thresholds/index.html", "thresholds/step_time.svg", f"{served}/index.html", f"{served}/cost.svg"]
    assert all((reports / link).is_file() for link in links)
    verdict = next(verdicts(load(folders[1]).data.comparison))
    for expected in ("Same & slower?", "How much slower?", "By 3 %.", verdict):
        assert expected in text
    assert "By 5 %." not in text and (folders[0] / "cost.svg").read_text() == "<svg/>"
    assert text.index("Sweeps") < text.index("The same bits") and "The allreduce" not in text


def test_the_report_on_published_measurements_is_predicted_again(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = validate(EXPERIMENTS / "validation_example")
    monkeypatch.setattr(reports_page, "validate", lambda: example)
    folder = reports / "validation"
    folder.mkdir()
    text = html.unescape(write_reports(reports, [folder]).read_text())
    listed = validation_content(example)
    assert all(words in text for words in (ACCURACY, listed.heading, listed.question, listed.answers[0]))
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert links == ["validation/index.html", "validation/skill.svg"] and (folder / "points.csv").is_file()


def test_only_reports_that_git_knows_are_drawn(reports: Path) -> None:
    with pytest.raises(ConfigError, match="git does not list the reports"):
        committed(reports / "missing")
    subprocess.run(["git", "init", "--quiet", str(reports)], check=True)
    (served,) = SERVED
    (reports / "thresholds" / "report.md").write_text("")
    subprocess.run(["git", "-C", str(reports), "add", f"{served}/report.md"], check=True)
    assert committed(reports) == [reports / served / "report.md"]


def test_a_report_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no result of dpsim"):
        write_reports(tmp_path, [tmp_path / "empty"])
