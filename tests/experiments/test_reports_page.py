"""The page that lists all reports: they are drawn again from their records, whatever was drawn before."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest
from published_files import EXPERIMENTS
from report_factory import ENVIRONMENT, sweep

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.experiments import reports_page
from dpsim.experiments.cases import Measured, Record
from dpsim.experiments.reports_page import ACCURACY, committed, write_reports
from dpsim.experiments.reproducible_cost import AGAIN, PLAIN, RECORD, STUDY, Case, Mode, content
from dpsim.harness.load import load
from dpsim.report.sweep.summary import verdicts
from dpsim.validation.page import content as validation_content
from dpsim.validation.run import validate


def costs() -> Record[Case]:
    mode = Mode(leaves=8)
    cases = [
        Case(model="cnn:4", dataset="digits", devices=1, global_batch=batch, modes=(mode,), limit=1.1)
        for batch in (16, 32)
    ]
    step_s = {PLAIN: (0.010, 0.011, 0.012), mode.name: (0.011, 0.012, 0.013), AGAIN: (0.010, 0.012, 0.011)}
    measured = tuple(Measured(case=case, samples=step_s) for case in cases)
    return Record(
        environment=ENVIRONMENT, measured_from="a", measured_until="b", measured=measured, schema=STUDY.schema
    )


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Two folders with records: of a sweep, and of an experiment below another folder."""
    predictions, results = sweep()
    codec.write(tmp_path / "thresholds" / "predictions.json", predictions)
    codec.write(tmp_path / "thresholds" / "results.json", results)
    codec.write(tmp_path / "bits" / "cost" / RECORD, costs())
    return tmp_path


def test_reports_are_drawn_again_and_listed_with_question_verdict_and_figure(reports: Path) -> None:
    folders = [reports / "bits" / "cost", reports / "thresholds"]
    stale = folders[1] / "report.md"
    stale.write_text("of an earlier version")
    page = write_reports(reports, folders)
    assert "## " in stale.read_text() and "of an earlier version" not in stale.read_text()
    text = html.unescape(page.read_text())
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert links == ["thresholds/index.html", "thresholds/step_time.svg", "bits/cost/index.html", "bits/cost/cost.svg"]
    assert all((reports / link).is_file() for link in links)
    cost = content(costs())
    verdict = next(verdicts(load(folders[1]).data.comparison))
    for expected in (cost.heading, cost.question, cost.answers[0], verdict):
        assert expected in text
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
    for name in ("thresholds", "bits/cost"):
        (reports / name / "report.md").write_text("")
    subprocess.run(["git", "-C", str(reports), "add", "bits/cost/report.md"], check=True)
    assert committed(reports) == [reports / "bits" / "cost" / "report.md"]


def test_a_report_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no result of dpsim"):
        write_reports(tmp_path, [tmp_path / "empty"])
