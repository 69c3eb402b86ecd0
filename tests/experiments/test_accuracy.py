"""``make accuracy``: what it declares, the lines it derives from comparisons, and the table it writes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from report_factory import sweep

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.experiments.accuracy.declared import experiments
from dpsim.experiments.accuracy.derive import finished, run_sweeps
from dpsim.experiments.accuracy.lines import Line, lines
from dpsim.experiments.accuracy.page import (
    BEGIN,
    END,
    FIGURE,
    into,
    markdown,
    note,
    points_by_environment,
    summary,
    write_page,
)
from dpsim.harness.sweep.check import checked
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.packed import SUFFIX, Swept, keep, read
from dpsim.harness.sweep.questions import completed
from dpsim.records.comparison import Comparison

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "reports/accuracy/sweeps").glob(f"*{SUFFIX}"))
QUICK = ("emulated-00", "real-00")
"""Committed records that every run of the tests predicts again; the others take a minute."""
SWEEPS = 10
"""As many as intervals of the others need."""


def test_every_experiment_has_a_name_of_its_own_and_can_be_run() -> None:
    declared = experiments()
    assert len({experiment.name for experiment in declared}) == len(declared)
    for experiment in declared:
        assert completed(completed(experiment)) == completed(experiment)
    assert {e.name for e in experiments(quick=True)} < {e.name for e in declared}
    of_eight = [e for e in declared if 8 in e.values("devices")]
    assert len(of_eight) >= 10 and all(e.value("compute") == "emulated" for e in of_eight)


def compared(factor: float = 1.0) -> Comparison:
    """A sweep whose measured steps are ``factor`` times as long as they were."""
    predictions, results = sweep()
    points = [
        msgspec.structs.replace(point, low_s=0.9 * point.step_s, high_s=1.1 * point.step_s, interval_level=0.9)
        for point in predictions.points
    ]
    predictions = msgspec.structs.replace(predictions, points=tuple(points))
    slower = [msgspec.structs.replace(run, step_s=tuple(factor * s for s in run.step_s)) for run in results.points]
    results = msgspec.structs.replace(results, points=tuple(slower), predictions_sha256=codec.digest(predictions))
    return compare(predictions, results)


def of(measured: tuple[Line, ...], where: str, quantity: str) -> Line:
    return next(line for line in measured if line.where == where and line.quantity.startswith(quantity))


def test_lines_hold_errors_coverage_and_shape_of_each_place() -> None:
    right, wrong = (tuple(lines(dict.fromkeys(map(str, range(SWEEPS)), compared(by)))) for by in (1.0, 2.0))
    place = "this machine, 2 devices"
    assert {line.where for line in right} - {"everywhere"} == {
        f"{network}, {devices}"
        for network in ("this machine", "emulated link")
        for devices in ("1 device", "2 devices")
    }
    assert [row.split(" | ")[0] for row in summary(right).splitlines()[2:]] == [
        "| emulated link, 2 devices",
        "| this machine, 1 device",
        "| this machine, 2 devices",
    ]
    first = of(right, place, "median error")
    assert first.calibrations == SWEEPS and first.points == SWEEPS * len(
        [p for p in compared().scored if p.network == "node" and p.devices == 2]
    )
    assert of(wrong, place, "median error").value == pytest.approx(0.5, abs=0.1)
    assert of(wrong, place, "median error").met is False
    assert of(right, place, "sweeps with a median error").value in (0.0, 1.0)
    assert of(wrong, place, "sweeps with a median error").value == 0.0
    for measured in (right, wrong):  # the errors of the other sweeps, which are the same, say how wide intervals are
        assert of(measured, place, "coverage").value > 0.7
        assert of(measured, "everywhere", "coverage").calibrations == SWEEPS
    assert not [line for line in lines({"a": compared(), "b": compared()}) if line.quantity.startswith("coverage")]
    assert of(wrong, place, "skill on the shape").value == pytest.approx(of(right, place, "skill on the shape").value)


def test_the_table_is_put_between_the_marks(tmp_path: Path) -> None:
    table = markdown([*lines({"a": compared()})], note([], "a processor"))
    assert "| this machine, 2 devices | median error of the step (made beforehand " in table and "a processor" in table
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    into(readme, table)
    into(readme, table)
    assert readme.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"
    readme.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no place for the table"):
        into(readme, table)


def test_a_finished_sweep_is_kept_with_all_samples_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    predictions, results = sweep()
    experiment = msgspec.structs.replace(predictions.experiment, name="kept")
    keep(tmp_path / f"kept{SUFFIX}", Swept(predictions=predictions, results=results))
    ((name, comparison),) = finished([experiment], tmp_path)
    assert name == "kept" and comparison == compare(predictions, results)
    run_sweeps([experiment], tmp_path, lambda _: pytest.fail("a finished sweep ran again"))
    (tmp_path / f"kept{SUFFIX}").write_bytes(b"cut off")
    with pytest.raises(FileFormatError, match="cannot be read"):
        list(finished([experiment], tmp_path))


def test_the_readmes_table_is_that_of_the_committed_report() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split(BEGIN)[1].split(END)[0].strip()
    report = (ROOT / "reports" / "accuracy" / "report.md").read_text(encoding="utf-8")
    assert table and table in report


def test_headline_cards_and_table_of_the_page_share_one_coverage(tmp_path: Path) -> None:
    comparisons = dict.fromkeys(map(str, range(SWEEPS)), compared(2.0))
    measured = tuple(lines(comparisons))
    shown, _ = write_page(tmp_path, comparisons, measured, "a processor", "a note")
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html", f"{FIGURE}.png", f"{FIGURE}.svg", f"{FIGURE}-dark.svg"
    }  # fmt: skip
    everywhere = of(measured, "everywhere", "coverage")
    points = [point for where in points_by_environment(comparisons).values() for point in where]
    stated = sum(point.predicted_low_s <= point.measured_step_s <= point.predicted_high_s for point in points)
    assert f"{everywhere.value:.1%}" != f"{stated / len(points):.1%}"
    assert shown.answers[1].startswith(f"{everywhere.value:.1%} of {everywhere.points} measured steps lie inside")
    for card in shown.cards:
        of_places = [n for n in measured if n.quantity.startswith("coverage") and n.where.startswith(card.title)]
        held = sum(line.value * line.points for line in of_places)
        assert card.tiles[1].value == f"{held / sum(line.points for line in of_places):.1%}"
    assert "other sweeps" in shown.answers[1] and all("other sweeps" in card.tiles[1].label for card in shown.cards)
    assert "more sweeps are undecided: two runs of one setting differ" in (tmp_path / "index.html").read_text()
    assert "#fefefe" not in (tmp_path / f"{FIGURE}-dark.svg").read_text()


def test_a_page_of_too_few_sweeps_states_no_coverage(tmp_path: Path) -> None:
    comparisons = {"a": compared(), "b": compared(2.0)}
    shown, _ = write_page(tmp_path, comparisons, [*lines(comparisons)], "a processor", "a note")
    assert len(shown.answers) == 1 and all(len(card.tiles) == 2 for card in shown.cards)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=() if path.name.removesuffix(SUFFIX) in QUICK else pytest.mark.slow)
        for path in RECORDS
    ],
)
def test_no_committed_record_is_damaged(path: Path) -> None:
    found = checked(read(path))
    assert found.damage == "" and all(record.points for record in found.records[1:])


def test_a_record_that_was_edited_is_damaged() -> None:
    swept = read(RECORDS[-1])
    inputs = swept.inputs
    assert inputs is not None
    faster = [msgspec.structs.replace(each, value=tuple(0.9 * s for s in each.value)) for each in inputs.rows]
    edited = msgspec.structs.replace(swept, inputs=msgspec.structs.replace(inputs, rows=tuple(faster)))
    assert "inputs.json has another SHA-256" in checked(edited).damage
