"""What ``python -m dpsim.validation`` prints and writes: every set's line, and the files of the report."""

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
from dpsim import machine as machines
from dpsim.errors import DpsimError
from dpsim.experiments import golden
from dpsim.experiments.validation_page import BEGIN, FOLDER, README, readme_lines
from dpsim.launch.workers import executor
from dpsim.model.defaults import DEFAULTS, WIDTHS
from dpsim.validation import page
from dpsim.validation.__main__ import build
from dpsim.validation.case import read_cases
from dpsim.validation.defaults import NOBODY
from dpsim.validation.judge import judged
from dpsim.validation.published import read_sets
from dpsim.validation.records import split
from dpsim.validation.run import Validation, validate, with_constants

EXAMPLE = EXPERIMENTS / "validation_example"
Dpsim = Callable[..., tuple[int, str, str]]


def small() -> Validation:
    """Two cases of the package's own: collectives, and the large-batch records."""
    sets = read_sets()
    cases = [
        case for case in read_cases(sets) if case.name in ("cs336-allreduce", "records", "bcaffe-steps", "nccl-layouts")
    ]
    rows = with_constants(judged(cases, sets))
    return Validation(sets=sets, cases=cases, assumed={NOBODY: DEFAULTS}, rows=rows, raw=rows)


def changed_example(tmp_path: Path, name: str, old: str, new: str) -> Path:
    """A copy of the example with one change."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "own"))
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    return folder


def test_all_files_are_written_and_the_page_has_every_set_and_its_source(tmp_path: Path) -> None:
    result = small()
    written = {path.name for path in page.write_validation(tmp_path, result)}
    figures = {f"{name}.{kind}" for name in ("skill", "errors") for kind in ("svg", "png")}
    assert written == {"points.csv", "report.md", "index.html", *figures}
    text = (tmp_path / "report.md").read_text()
    assert all(each.provenance.source.split(",")[0] in text for each in result.sets.values())
    assert all(f"| {name} |" in text for name in ("bcaffe_steps", "records", "cs336_allreduce", "all steps"))
    with (tmp_path / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.rows)
    assert float(rows[0]["error"]) == pytest.approx(result.rows[0].predicted / result.rows[0].measured - 1, rel=1e-6)


def test_the_records_are_explained_by_rate_efficiency_and_parts() -> None:
    table = next(t for t in page.tables(small()) if t.title == "The large-batch records")
    heads = [column.head for column in table.columns]
    (row,) = (row for row in table.sections[0].rows if row[0].startswith("Goyal"))
    shown = dict(zip(heads, row, strict=True))
    assert (shown["devices"], shown["steps"], shown["time"]) == ("256", "14,075", "1 h")
    assert (shown["images/s a device"], shown["one device alone"], shown["efficiency"]) == ("125", "219", "57%")
    assert re.fullmatch(r"[\d.]+ (min|h) \([\d.]+ to [\d.]+\)", shown["predicted time"])


def test_the_parts_of_a_records_step_add_up_and_lie_inside_their_intervals() -> None:
    rows = [row for row in small().rows if row.dataset == "records"]
    assert rows
    for row in rows:
        parts = split(row)
        assert sum(part.share for part in parts.values()) == pytest.approx(1.0)
        assert all(0 <= part.low <= part.share <= part.high for part in parts.values())
        assert parts["communication"].low < parts["communication"].high


def test_everything_is_plain_numbers_for_programs() -> None:
    result = small()
    points = json.loads(codec.to_json([row.values() for row in result.rows]))
    lines = json.loads(codec.to_json(result.summary()))["datasets"]
    assert {"between tables", "free communication"} <= {name for point in points for name in point["null_s"]}
    assert [line["dataset"] for line in lines][-2:] == ["all collectives", "all steps"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_is_committed_is_what_is_predicted_now(tmp_path: Path) -> None:
    """The lines of README, the report (numbers to 1e-6: least squares end in other last digits on another processor),
    and the defaults and widths that come with dpsim. One test, since predicting all cases takes minutes."""
    with executor("2") as pool:
        fresh = validate(executor=pool)
    lines = readme_lines(json.loads(codec.to_json(fresh.summary())))
    assert BEGIN + lines in README.read_text(encoding="utf-8"), "run make validate"

    page.write_validation(tmp_path, fresh)
    committed = golden.pages(FOLDER, figures=False)
    for name, text in golden.pages(tmp_path, figures=False).items():
        assert golden.lines_that_differ(committed[name], text, golden.FITTED_TOLERANCE) == [], "run make validate"

    shipped = {default.field: default.value for default in DEFAULTS}
    assert {each.field: each.value for each in fresh.assumed[NOBODY]} == shipped
    for width in WIDTHS:
        implied = fresh.widths.get(width.group)
        if implied is None:  # nobody has published this: as wide as what is most alike
            assert width.clusters == 0
            continue
        assert (implied.clusters, implied.factor) == (width.clusters, pytest.approx(width.factor, abs=0.01))


def test_the_command_prints_the_same_with_several_processes(dpsim: Dpsim) -> None:
    one, two = (dpsim("--sets", EXAMPLE, "--json", "--executor", count, application=build()) for count in (1, 2))
    assert one[0] == two[0] == 0, two[2]
    first, second = (json.loads(out) for _, out, _ in (one, two))
    assert first["points"] == second["points"] and first["summary"] == second["summary"]


def test_a_report_is_written_again_into_its_folder(dpsim: Dpsim, tmp_path: Path) -> None:
    for _ in range(2):
        code, _, err = dpsim("--sets", EXAMPLE, "--output", tmp_path / "report", application=build())
        assert code == 0, err


def test_an_error_in_a_process_is_the_same_error(dpsim: Dpsim, tmp_path: Path) -> None:
    folder = changed_example(tmp_path, "cases/example.toml", '"nccl"', '"ncl"')
    said = [dpsim("--sets", folder, "--executor", count, application=build()) for count in (1, 2)]
    assert said[0] == said[1] and said[0][0] == 2
    assert "case example/devices 4: unknown algorithm 'ncl'" in said[0][2] and "did you mean 'nccl'" in said[0][2]


def test_a_folder_without_sets_is_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("--sets", tmp_path, application=build())
    assert code == 2 and "has no published sets" in err and "sets/NAME.toml" in err


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("sets/example.csv", "2,1x2,65536", ",1x2,65536", "line 2: devices is ''"),
        ("sets/example.csv", "2,1x2,65536", "2,1x2,", "line 2: size_bytes is ''"),
        ("sets/example.csv", "4,1x4,65536", "4,1x4,0", "line 5: size_bytes is '0'"),
        ("sets/example.csv", "4,1x4,65536", "4,1x4,65536.5", "line 5: size_bytes is '65536.5'"),
        ("sets/example.csv", "4,1x4,65536", "-4,1x4,65536", "line 5: devices is '-4'"),
        ("sets/example.csv", "4,1x4,65536", "4,2x4,65536", "line 5: layout 2x4 is 8 devices, and devices is 4"),
        ("sets/example.csv", "2,1x2,65536", "2,two,65536", "line 2: layout is 'two'"),
        ("sets/example.csv", "time_s", "tiem_s", "line 1: columns devices, layout, size_bytes, tiem_s"),
        ("sets/example.toml", 'unit = "s"', 'unit = "ms"', "allowed: s, bytes,"),
        ("cases/example.toml", "devices = [2]", "devices = [3]", "no row of example has 3 in the column devices"),
        ("cases/example.toml", "devices = [2]", 'devices = ["2"]', "no row of example has '2' in the column devices"),
        ("cases/example.toml", "schema", "free = { compute = 1.0 }\nschema", "collectives has free numbers: compute"),
        ("cases/example.toml", '"held out"', '"heldout"', "allowed: development, held out"),
        ("cases/example.toml", "hold_out", "holdout", "did you mean 'hold_out'"),
    ],
)
def test_what_a_set_or_a_case_gets_wrong_is_refused_with_its_place(
    dpsim: Dpsim, tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    folder = changed_example(tmp_path, name, old, new)
    code, _, err = dpsim("--sets", folder, application=build())
    assert code == 2 and said in " ".join(err.split()) and name in err
    assert "allowed:" in err or "to do:" in err


def test_the_page_of_ones_own_sets_names_dpsims_defaults_and_a_message_of_one_byte_is_predicted(tmp_path: Path) -> None:
    folder = changed_example(tmp_path, "sets/example.csv", "4,1x4,65536", "4,1x4,1")
    result = validate(folder)
    page.write_validation(tmp_path / "page", result)
    text = (tmp_path / "page" / "report.md").read_text()
    assert "A set that is alone of its kind has no others" in text
    assert "is the default of dpsim" in text and "what the other sets imply" not in text
    assert "Every set, with the defaults" not in text and "dpsim/validation/sets" not in text
    (row,) = (row for row in result.rows if row.line == 5)
    assert 0 < row.low < row.predicted < row.high


def test_a_case_of_ones_own_takes_machines_from_its_folder_and_no_other_cases_name(tmp_path: Path) -> None:
    folder = changed_example(tmp_path, "cases/example.toml", '"collective"', '"step"')
    (folder / "machines").mkdir()
    shutil.copy(EXPERIMENTS / "machines" / "ethernet_10gbit.toml", folder / "machines" / "own.toml")
    path = folder / "cases" / "example.toml"
    text = path.read_text().replace('"nccl"', '"ring"')
    path.write_text(f'{text}\n[models.""]\nprofile = "resnet50"\n[machines.""]\nfile = "own"\n')
    assert {row.inputs.machine.link for row in validate(folder).rows} == {
        machines.read(folder / "machines/own.toml").link
    }
    shutil.copy(path, folder / "cases" / "other.toml")
    with pytest.raises(DpsimError, match=r"other.toml: a second case 'example'"):
        validate(folder)


def test_a_folder_with_sets_and_no_case_is_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "sets", tmp_path / "sets")
    code, _, err = dpsim("--sets", tmp_path, application=build())
    assert code == 2 and "has no cases" in err and "cases/NAME.toml" in err


@pytest.mark.parametrize(("count", "allowed"), [("0", "1 or more"), ("two", "a number of processes")])
def test_what_is_no_executor_is_refused(dpsim: Dpsim, count: str, allowed: str) -> None:
    code, _, err = dpsim("--sets", EXAMPLE, "--executor", count, application=build())
    assert code == 2 and "--executor is" in err and allowed in err


def test_names_of_the_user_s_are_text_in_every_file(dpsim: Dpsim, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "sets")
    case = tmp_path / "sets" / "cases" / "example.toml"
    text = case.read_text(encoding="utf-8").replace('name = "example"', 'name = "=HYPERLINK(A1)"', 1)
    script = "</script><script>alert(1)</script>"
    case.write_text(re.sub(r'question = ".*"', f'question = "{script}"', text), encoding="utf-8")
    code, _, err = dpsim("--sets", tmp_path / "sets", "--output", tmp_path / "out", application=build())
    assert code == 0, err
    with (tmp_path / "out" / "points.csv").open(newline="", encoding="utf-8") as file:
        names = {row["case"] for row in csv.DictReader(file)}
    assert names and all(name.startswith("'=HYPERLINK(A1)") for name in names)
    for page_name in ("report.md", "index.html"):
        page_text = (tmp_path / "out" / page_name).read_text(encoding="utf-8")
        assert "alert(1)" in page_text and "<script>alert" not in page_text


def test_points_and_summary_are_one_json_object_and_a_page_of_the_user_s_stays(dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, _ = dpsim("--sets", EXAMPLE, "--json", application=build())
    shown = json.loads(out)
    assert (code, shown["schema"], shown["command"]) == (0, "dpsim.output/1", "validation")
    assert {"dataset", "case", "role", "measured", "predicted", "error"} <= set(shown["points"][0])
    assert {(p["dataset"], p["role"]) for p in shown["points"]} == {("example", "held out")}
    assert {line["dataset"] for line in shown["summary"]["datasets"]} == {"example", "all collectives"}
    assert {"median_abs_error", "max_abs_error", "null_median_abs_error"} <= set(shown["summary"]["datasets"][0])
    (tmp_path / "index.html").write_text("my page")
    code, _, err = dpsim("--sets", EXAMPLE, "--output", tmp_path, application=build())
    assert code == 2 and "cannot write --output" in err and (tmp_path / "index.html").read_text() == "my page"
