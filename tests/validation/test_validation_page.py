"""What ``dpsim validate`` prints and writes: every set's line, whoever predicts, and the files of the report."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from published_files import EXPERIMENTS

from dpsim import codec
from dpsim.validation import page
from dpsim.validation.case import read_cases
from dpsim.validation.judge import judged
from dpsim.validation.published import read_sets
from dpsim.validation.run import Validation, with_constants

EXAMPLE = EXPERIMENTS / "validation_example"
Dpsim = Callable[..., tuple[int, str, str]]


def small() -> Validation:
    """Two cases of the package's own: collectives, and the large-batch records."""
    sets = read_sets()
    cases = [
        case for case in read_cases(sets) if case.name in ("cs336-allreduce", "records", "bcaffe-steps", "nccl-layouts")
    ]
    rows = with_constants(judged(cases, sets))
    return Validation(sets=sets, cases=cases, assumed={}, rows=rows, as_shipped=rows)


def test_all_files_are_written_and_the_page_has_every_set_and_its_source(tmp_path: Path) -> None:
    result = small()
    written = {path.name for path in page.write_validation(tmp_path, result)}
    figures = {f"{name}.{kind}" for name in ("skill", "predicted_over_measured") for kind in ("svg", "png")}
    assert written == {"points.csv", "report.md", "index.html", *figures}
    text = (tmp_path / "report.md").read_text()
    assert all(each.provenance.source.split(",")[0] in text for each in result.sets.values())
    assert all(f"| {name} |" in text for name in ("bcaffe_steps", "records", "cs336_allreduce", "all steps"))
    with (tmp_path / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.rows)
    assert float(rows[0]["error"]) == result.rows[0].predicted / result.rows[0].measured - 1


def test_the_records_are_explained_by_rate_efficiency_and_parts() -> None:
    table = next(t for t in page.tables(small()) if t.title == "The large-batch records")
    heads = [column.head for column in table.columns]
    (row,) = (row for row in table.sections[0].rows if row[0].startswith("Goyal"))
    shown = dict(zip(heads, row, strict=True))
    assert (shown["devices"], shown["steps"], shown["minutes"]) == ("256", "14075", "60")
    assert (shown["images/s a device"], shown["one device alone"], shown["efficiency"]) == ("125", "219", "57%")
    parts = [int(shown[head].rstrip("%")) for head in ("computation", "waiting", "communication")]
    assert abs(sum(parts) - 100) <= 1


def test_everything_is_plain_numbers_for_programs() -> None:
    result = small()
    points = json.loads(codec.to_json([row.values() for row in result.rows]))
    lines = json.loads(codec.to_json(result.summary()))["datasets"]
    assert {"between tables", "free communication"} <= {name for point in points for name in point["null_s"]}
    assert [line["dataset"] for line in lines][-2:] == ["all collectives", "all steps"]


def test_a_submission_is_named_and_scored_beside_dpsim(dpsim: Dpsim, tmp_path: Path) -> None:
    files = ("--submission", EXAMPLE / "submission.json", "--outcomes", EXAMPLE / "outcomes.json")
    code, out, err = dpsim("validate", "--sets", EXAMPLE, *files, "--output", tmp_path)
    assert code == 0 and "predicted by a line by hand" in out, err
    text = (tmp_path / "report.md").read_text()
    assert "| set | a line by hand | Calculon | PyTorch Inductor | dpsim |" in text


@pytest.mark.slow
def test_the_readme_names_the_pooled_lines(dpsim: Dpsim) -> None:
    code, out, _ = dpsim("validate", "--json")
    summary = json.loads(out)["summary"]
    lines = {line["dataset"]: line for line in summary["datasets"]}
    collectives, steps = lines["all collectives"], lines["all steps"]
    (shipped,) = (line for line in summary["as_shipped"] if line["dataset"] == "all steps")

    def shown(name: str) -> str:
        return " and ".join(f"{each[name] * 100:.1f} %" for each in (collectives, steps))

    text = " ".join((EXPERIMENTS.parent / "README.md").read_text(encoding="utf-8").split())
    assert code == 0 and f"{collectives['rows']} allreduces and {steps['rows']} steps of {len(lines) - 2} sets" in text
    assert f"{shown('median_abs_error')} off" in text and f"{shown('null_median_abs_error')} off" in text
    assert f"{collectives['coverage'] * 100:.0f} % and {steps['coverage'] * 100:.0f} % lie inside" in text
    shares = f"{shipped['median_abs_error'] * 100:.1f} % off, and {shipped['too_fast'] * 100:.0f} %"
    assert f"steps are {shares} of them predicted too fast" in text


def test_sealed_rows_are_named(dpsim: Dpsim) -> None:
    code, out, _ = dpsim("validate", "--sets", EXAMPLE)
    assert code == 0 and "2 rows are sealed" in out


def test_a_set_whose_outcomes_are_all_sealed_is_predicted_and_has_a_page(dpsim: Dpsim, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "own"))
    table = folder / "sets" / "example.csv"
    sealed = re.sub(r"^([48],.*),[0-9.e-]+$", r"\1,sha256:" + "0" * 64, table.read_text(), flags=re.MULTILINE)
    table.write_text(sealed)
    own, report = tmp_path / "own.json", tmp_path / "report"
    code, out, err = dpsim("validate", "--sets", folder, "--predictions", own, "--output", report)
    assert code == 0 and "6 rows are sealed" in out, err
    assert len(json.loads(own.read_text())["predictions"]["example/devices 8"]) == 3
    assert "6 rows are sealed" in (report / "report.md").read_text()


def test_a_folder_without_sets_is_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("validate", "--sets", tmp_path)
    assert code == 2 and "has no published sets" in err and "sets/NAME.toml" in err
