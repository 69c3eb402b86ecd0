"""Results as tables: the fields of ``--json``, their data types, files of tables, figures, and damaged input."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.axes import Axes
from report_factory import sweep

from dpsim import codec, entry
from dpsim.columns import UNITS, AnyColumn, column
from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.harness.load import KINDS, load
from dpsim.harness.sweep.compare import compare
from dpsim.records.columns import FRAMES
from dpsim.records.comparison import SweepData
from dpsim.records.sweep import Predictions, Results, read_predictions
from dpsim.report.frames import table
from dpsim.report.saved import SavedResult, write_tables

Dpsim = Callable[..., tuple[int, str, str]]
REPORTS = Path(__file__).parents[2] / "reports"
FOLDERS = (
    "example",
    "devices",
    "allreduce/devices-8",
    "reproducibility/cnn",
    "reproducibility/plain",
    "reproducibility/mlp",
    "accuracy/quality",
)
TRAINED = {
    "schema": "dpsim.output/1",
    "command": "train",
    "model": "mlp",
    "dataset": "digits",
    "global_batch": 64,
    "seed": 0,
    "network": "node",
    "algorithm": "auto",
    "fusion_rule": "tarantella",
    "overlap": "off",
    "leaves": 0,
    "devices": 2,
    "steps": 3,
    "test_accuracy": 0.5,
    "final_loss": 2.0,
    "images_per_s": 6400.0,
    "step_s": 0.01,
    "exposed_communication_s": 0.001,
    "digest": "ab" * 32,
    "losses": [2.3, 2.1, 2.0],
    "first_step": 0,
    "checkpoint_failure": "",
}
"""The file of a training that never took place."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "result.json"
    path.write_text(json.dumps(TRAINED))
    return path


@pytest.fixture(scope="module", params=[*FOLDERS, "train"])
def saved(request: pytest.FixtureRequest, trained: Path) -> SavedResult:
    return load(trained if request.param == "train" else REPORTS / request.param)


@pytest.fixture(autouse=True)
def figures_are_closed() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


def saved_sweep(predictions: Predictions, results: Results) -> SavedResult:
    """A sweep whose records are not in a folder."""
    return SavedResult(KINDS["sweep"], SweepData(predictions, results, compare(predictions, results)))


def flat(point: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a point under the names of their columns."""
    fields: dict[str, Any] = {}
    for name, value in point.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{inner}": each for inner, each in flat(value).items()}
        else:
            fields[name] = value
    return fields


def same(cell: Any, value: Any) -> bool:
    """Whether a cell of a table holds the value of a point."""
    if value is None:
        return bool(pd.isna(cell))
    if isinstance(value, list):
        return bool(json.loads(cell) == value)
    return bool(cell == (math.inf if value == "inf" else value))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_frame_has_every_field_of_the_points_that_json_prints(folder: str, dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, err = dpsim("report", REPORTS / folder, "--output", tmp_path, "--format", "csv", "--json")
    assert code == 0, err
    printed = json.loads(out)["points"]
    points, frame = [flat(point) for point in printed], load(REPORTS / folder).frame()
    assert len(frame) == len(points) > 0
    nested = {name.partition(".")[0] for name in frame.columns if "." in name}
    names = list(dict.fromkeys(name for point in points for name in point if name not in nested))
    assert set(names) <= set(frame.columns)
    for name in names:
        cells = list(frame[name])
        assert all(same(cell, point.get(name)) for cell, point in zip(cells, points, strict=True)), name
    first = [name for name in printed[0] if name not in nested]
    assert [name for name in frame.columns if name in first] == first


def test_every_column_of_every_table_is_declared_and_has_its_data_type(saved: SavedResult) -> None:
    assert saved.tables == tuple(FRAMES[saved.kind])
    for name in saved.tables:
        frame = saved.table(name)
        assert len(frame) > 0
        order = []
        for title in frame.columns:
            declaration = declared(title, saved.columns(name))
            assert frame[title].dtype == declaration.dtype, (name, title)
            order.append(declaration)
        assert list(dict.fromkeys(order)) == [c for c in saved.columns(name) if c in order or not c.prefix]


def declared(title: str, columns: Sequence[AnyColumn]) -> AnyColumn:
    """The declaration of a column of a table."""
    (found,) = [c for c in columns if c.name == title or (c.prefix and title.startswith(c.prefix))]
    return found


@pytest.mark.parametrize("kind", FRAMES)
def test_every_column_has_a_description_and_a_unit(kind: str) -> None:
    for columns in FRAMES[kind].values():
        assert len({each.name for each in columns}) == len(columns)
        for each in columns:
            assert each.text.endswith(".") and each.unit in UNITS and not each.text[0].islower()


def test_a_column_whose_name_states_another_unit_is_refused() -> None:
    for name, unit in (
        ("step_s", "bytes"),
        ("size_bytes", "s"),
        ("null_step_s.*", "ratio"),
        ("busbw_bytes_per_s", "s"),
    ):
        with pytest.raises(ConfigError, match=f"column {re.escape(name)} in {unit}"):
            column(name, unit, "A text.")  # type: ignore[arg-type]


def test_tables_come_back_from_parquet_as_they_were(saved: SavedResult, tmp_path: Path) -> None:
    for path in write_tables(tmp_path, saved, ["parquet"]):
        pd.testing.assert_frame_equal(pd.read_parquet(path), without_empty_categories(saved.table(path.stem)))


def without_empty_categories(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with categories of no word as Parquet gives them back: it does not say that words are missing."""
    empty = [name for name in frame.columns if frame[name].dtype == "category" and not len(frame[name].cat.categories)]
    return frame.assign(**{name: pd.Categorical(frame[name], pd.Index([], dtype=object)) for name in empty})


def test_tables_come_back_from_csv_where_it_can_hold_them(saved: SavedResult, tmp_path: Path) -> None:
    for path in write_tables(tmp_path, saved, ["csv"]):
        frame = saved.table(path.stem)
        read = pd.read_csv(path, dtype=frame.dtypes.to_dict())
        for name in frame.columns:
            if frame[name].dtype == "string" or (frame[name].dtype == "category" and "" in frame[name].cat.categories):
                assert list(read[name].astype("string").fillna("")) == list(frame[name].astype("string").fillna(""))
            else:
                pd.testing.assert_series_equal(read[name], frame[name])


COLUMNS = (
    column("devices", "count", "A count."),
    column("threshold_bytes", "bytes", "A threshold."),
    column("ulps", "count", "A count, or nothing.", "Int64"),
    column("scored", "yes or no", "A choice, or nothing."),
    column("network", "name", "A word, or nothing."),
    column("digest", "text", "A text, or nothing."),
    column("null_s.*", "s", "Times."),
)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=["C"]), min_size=1)
POINTS = st.fixed_dictionaries(
    {
        "devices": st.integers(-(2**63), 2**63 - 1),
        "threshold_bytes": st.none() | st.just("inf") | st.floats(allow_nan=False, allow_infinity=False),
        "ulps": st.none() | st.integers(-(2**63), 2**63 - 1),
        "scored": st.none() | st.booleans(),
        "network": st.none() | WORDS,
        "digest": st.none() | WORDS,
        "null_s": st.dictionaries(st.sampled_from(["constant", "perfect"]), st.floats(0, 1)),
    }
)


@settings(max_examples=30)
@given(points=st.lists(POINTS, max_size=5))
def test_any_points_keep_their_values_and_types_in_a_table_and_in_parquet(points: list[dict[str, Any]]) -> None:
    frame, fields = table(points, COLUMNS), [flat(point) for point in points]
    for name in frame.columns:
        assert frame[name].dtype == declared(name, COLUMNS).dtype
        assert all(same(cell, point.get(name)) for cell, point in zip(frame[name], fields, strict=True))
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(buffer.getvalue())), without_empty_categories(frame))


@pytest.mark.parametrize("folder", ["example", "devices"])
def test_the_samples_of_a_sweep_give_the_medians_of_its_points(folder: str) -> None:
    result = load(REPORTS / folder)
    points, samples = result.frame(), result.samples()
    setting = [name for name in points.columns if name in samples.columns and name in _SETTING]
    assert setting == list(_SETTING)
    series = {"size": samples, "median": samples[samples["clean"] == 1]}
    joined = points
    for name, of in series.items():
        values = of.groupby(setting, observed=True, dropna=False)["exposed_communication_s"].agg([name])
        joined = joined.merge(values.reset_index(), on=setting, validate="one_to_one")
    assert len(joined) == len(points)
    assert list(joined["size"]) == list(points["samples"])
    assert np.allclose(joined["median"], points["exposed_communication_s"])


_SETTING = (
    "devices",
    "layout",
    "global_batch",
    "fusion_rule",
    "fusion_threshold_bytes",
    "network",
    "algorithm",
    "overlap",
)


def test_the_samples_of_a_benchmark_give_the_percentiles_of_its_points() -> None:
    result = load(REPORTS / "allreduce" / "devices-8")
    points, samples = result.frame(), result.samples()
    keys = ["size_bytes", "system", "algorithm", "in_place", "cached"]
    first = samples[(samples["repeat"] == 0) & (samples["algorithm"] != "scaling")]
    medians = first.groupby(keys, observed=True)["time_s"].agg(["median", "size"]).reset_index()
    joined = points.astype({"algorithm": str}).merge(medians.astype({"algorithm": str}), on=keys, validate="one_to_one")
    assert len(joined) == len(points)
    assert list(joined["size"]) == list(joined["samples"])
    assert np.allclose(joined["median"], joined["p50_s"], rtol=1e-12)


def test_the_timeline_of_a_sweep_has_every_event_measured_and_predicted() -> None:
    predictions, results = sweep(networks=("node",))
    result = saved_sweep(predictions, results)
    frame = result.timeline()
    kept = [p.timeline for p in (*results.points, *predictions.points) if p.timeline is not None]
    assert len(frame) == sum(len(timeline.step) for timeline in kept)
    assert set(frame["source"]) == {"measured", "predicted"} and set(frame["rank"]) == {0, 1}
    assert np.allclose(frame["end_s"].sum(), sum(sum(timeline.end_s) for timeline in kept))
    sent = frame[frame["lane"] == "communication"]
    assert set(sent["kind"]) == {"allreduce"} and (sent["size_bytes"] > 0).all()
    assert all(str(name).startswith(str(kind)) for name, kind in zip(frame["operation"], frame["kind"], strict=True))


def test_the_samples_of_a_training_are_its_losses(trained: Path) -> None:
    samples = load(trained).samples()
    assert list(samples["step"]) == [1, 2, 3] and list(samples["loss"]) == TRAINED["losses"]
    assert set(samples["model"]) == {"mlp"}


def test_only_sweeps_have_a_timeline_and_the_others_say_what_they_have(saved: SavedResult) -> None:
    if saved.kind == "sweep":
        assert len(saved.timeline()) > 0
        return
    with pytest.raises(ConfigError, match=f"the result of {saved.kind} has no timeline") as error:
        saved.timeline()
    assert error.value.allowed == "its tables: points, samples"


def test_a_result_shows_itself_as_text_and_as_a_table_for_notebooks(saved: SavedResult) -> None:
    text = repr(saved)
    assert text.startswith(saved.title) and ".frame()" in text and len(text.splitlines()) == 2
    page = saved._repr_html_()
    assert saved.frame().columns[0] in page and page.count("<table") == 1 and "&lt;" not in saved.title


def test_a_plot_is_drawn_on_new_axes_or_on_those_that_are_given(saved: SavedResult) -> None:
    if saved.kind == "reproduce" and not saved.frame()["parameter_drift"].notna().any():
        with pytest.raises(ConfigError, match="no drift was measured"):
            saved.plot()
        return
    alone = saved.plot()
    figure, (left, right) = pyplot.subplots(1, 2)
    assert isinstance(alone, Axes) and saved.plot(right) is right and saved.plot(ax=left) is left
    assert left.get_title(loc="left") == alone.get_title(loc="left") != ""
    figure.canvas.draw()


def test_a_plot_of_a_sweep_is_of_the_network_that_is_asked_for() -> None:
    result = load(REPORTS / "example")
    paced = "paced:50us,1gbit"
    assert paced in result.plot(network=paced, devices=2).get_title(loc="left")
    assert "node" in result.plot().get_title(loc="left")
    for wrong, text in (({"network": "wifi"}, "network 'wifi' was not swept"), ({"devices": 3}, "devices 3 was not")):
        with pytest.raises(ConfigError, match=text):
            result.plot(**wrong)


def test_a_file_of_a_sweep_loads_its_folder() -> None:
    for name in ("results.json", "predictions.json"):
        assert load(str(REPORTS / "devices" / name)).title == load(REPORTS / "devices").title


@pytest.mark.parametrize(
    ("files", "given"),
    [
        ({}, "holds no result of dpsim: it is empty"),
        ({"notes.txt": "mine", "a.json": "{}"}, "holds no result of dpsim: it has a.json, notes.txt"),
        ({"predictions.json": "{}"}, "is unfinished: it has no results.json yet"),
        ({"results.json": "{}"}, "cannot read the predictions file"),
        ({"predictions.json": "{}", "results.json": "{}"}, "is not a predictions file: its schema is None"),
        ({"allreduce.json": '{"schema": "dpsim.bench/1", "bench": '}, "is not valid JSON"),
        ({"allreduce.json": '{"schema": "dpsim.bench/1"}'}, "bad benchmark: Object missing required field"),
        ({"reproduce.json": "[]"}, "is not a reproduce file: its schema is 'list'"),
        ({"reproduce.json": ""}, "is not valid JSON"),
        (
            {"predictions.json": '{"schema": "dpsim.predictions/2"}', "results.json": "{}"},
            "has version 2 of the format of predictions files\n  allowed: version 3",
        ),
    ],
)
def test_a_folder_without_a_whole_result_is_refused_in_one_message(
    files: dict[str, str], given: str, tmp_path: Path, dpsim: Dpsim
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises((ConfigError, FileFormatError), match=re.escape(given)):
        load(tmp_path)
    code, out, err = dpsim("report", tmp_path, "--output", tmp_path.with_name("report"))
    assert (code, out) == (2, "") and given in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", "is not valid JSON"),
        (json.dumps(TRAINED)[:-20], "is not valid JSON"),
        ("[1, 2]", "is not a result of dpsim: its schema is None"),
        ('{"schema": "dpsim.results/2"}', "is unfinished: it has no results.json yet"),
        ('{"schema": "dpsim.workload/1"}', "is not a result of dpsim: its schema is 'dpsim.workload/1'"),
        (json.dumps(TRAINED | {"points": []}), "is what dpsim train prints with --json"),
        (json.dumps(TRAINED | {"points": [], "command": "predict"}), "read it with json.load"),
        (json.dumps(TRAINED | {"test_accuracy": 7}), "test_accuracy is 7"),
        (json.dumps(TRAINED | {"stpes": 3}), "unknown field `stpes`"),
        (json.dumps(TRAINED | {"losses": "none"}), "Expected `array`"),
    ],
)
def test_a_file_that_is_no_whole_result_is_refused_in_one_message(text: str, given: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(DpsimError, match=re.escape(given)):
        load(path)


@pytest.mark.slow
def test_a_sweep_that_is_complete_is_returned_and_not_measured_again(tmp_path: Path) -> None:
    folder, said = tmp_path / "swept", list[str]()
    shutil.copytree(REPORTS / "devices", folder)
    experiment = read_predictions(folder / "predictions.json").experiment
    codec.write(tmp_path / "experiment.json", experiment)
    before = (folder / "results.json").read_bytes()
    for declared_as in (experiment, str(tmp_path / "experiment.json")):
        result = entry.sweep(declared_as, str(folder), said.append)
        assert result.title == load(REPORTS / "devices").title and len(result.frame()) == len(
            load(REPORTS / "devices").frame()
        )
    assert (folder / "results.json").read_bytes() == before
    assert sum("nothing is measured again" in line for line in said) == 2


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("folder", ["example", "allreduce/devices-8", "reproducibility/plain"])
def test_records_that_are_cut_off_are_refused(folder: str, tmp_path: Path) -> None:
    for source in (REPORTS / folder).glob("*.json"):
        text = source.read_text()
        (tmp_path / source.name).write_text(text[: len(text) // 2])
    with pytest.raises(FileFormatError, match="is not valid JSON"):
        load(tmp_path)


def test_the_file_that_train_writes_is_loaded(dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, out, err = dpsim("train", "--model", "mlp:8", "--steps", "3", "--output", path, "--json")
    assert code == 0, err
    printed = json.loads(out)
    (row,) = load(path).frame().to_dict("records")
    fields = flat(printed["points"][0] | printed["summary"])
    assert all(same(cell, fields[name]) for name, cell in row.items())
    assert list(load(path).samples()["loss"]) == printed["points"][0]["losses"]


@pytest.mark.slow
def test_only_the_files_of_the_formats_that_are_asked_for_are_written(dpsim: Dpsim, tmp_path: Path) -> None:
    tables = {"points", "samples", "timeline"}
    figures = {
        f"{name}.{kind}" for name in ("speedup", "timeline", "where_time_goes", "drift") for kind in ("svg", "png")
    }
    expected = {
        "csv": {f"{name}.csv" for name in tables},
        "parquet": {f"{name}.parquet" for name in tables},
        "md": {"report.md"},
        "html": {"index.html"},
    }
    for formats, times in ((["csv", "parquet"], 2), (["md"], 1), (["html", "csv"], 1)):
        folder = tmp_path / "-".join(formats)
        for _ in range(times):  # the second time they are replaced
            code, out, err = dpsim("report", REPORTS / "devices", "--output", folder, "--format", ",".join(formats))
            assert code == 0, err
        names = set().union(*(expected[each] for each in formats))
        pages = [name for name in ("index.html", "report.md") if name in names]
        written = {path.name for path in folder.iterdir()}
        assert written - figures == names and bool(written & figures) == bool(pages)
        assert (f"Open  {folder}" in out) == bool(pages) and (not pages or str(folder / pages[0]) in out)
        assert any(line.startswith("tables:") for line in out.splitlines()) == any(
            name.startswith("points") for name in names
        )
    page = (tmp_path / "html-csv" / "index.html").read_text()
    assert 'href="points.csv"' in page and "report.md" not in page


def test_a_users_own_table_is_not_overwritten(dpsim: Dpsim, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("name,address\n")
    code, _, err = dpsim("report", REPORTS / "devices", "--output", tmp_path, "--format", "csv")
    assert code == 2 and "it holds points.csv" in err and [path.name for path in tmp_path.iterdir()] == ["points.csv"]


def test_parquet_without_its_library_is_refused_before_anything_is_written(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsim.report.saved.find_spec", lambda name: None)
    code, _, err = dpsim("report", REPORTS / "devices", "--output", tmp_path / "new", "--format", "csv,parquet")
    assert code == 2 and "pyarrow, which is not installed" in err and "'.[parquet]'" in err
    assert not (tmp_path / "new").exists()


def test_a_number_out_of_range_is_refused_and_results_without_samples_are_empty_tables() -> None:
    predictions, results = sweep(networks=("node",), timelines=False)
    first = results.points[0]
    far = msgspec.structs.replace(first, round=(2**64, *first.round[1:]))
    damaged = msgspec.structs.replace(results, points=(far, *results.points[1:]))
    result = saved_sweep(predictions, damaged)
    with pytest.raises(FileFormatError, match="a number out of range"):
        result.samples()
    bench, reproduction = load(REPORTS / "allreduce" / "devices-8"), load(REPORTS / "reproducibility" / "plain")
    record = bench.data.record
    untimed = tuple(msgspec.structs.replace(series, rounds_ns=()) for series in record.series)
    bare = msgspec.structs.replace(record, series=untimed)
    without = (
        replace(bench, data=msgspec.structs.replace(bench.data, record=bare)),
        replace(reproduction, data=msgspec.structs.replace(reproduction.data, runs=())),
    )
    for empty in without:
        samples = empty.samples()
        assert len(samples) == 0 and {c.name: c.dtype for c in empty.columns("samples")} == {
            name: str(samples[name].dtype) for name in samples.columns
        }


def test_an_earlier_record_without_losses_has_them_missing() -> None:
    predictions, results = sweep(networks=("node",), timelines=False)
    bare = [msgspec.structs.replace(point, losses=()) for point in results.points]
    old = msgspec.structs.replace(results, points=tuple(bare))
    result = saved_sweep(predictions, old)
    samples = result.samples()
    assert samples["loss"].isna().all() and samples["step_s"].notna().all()
    assert len(result.timeline()) == 0 and list(result.timeline().columns) == [
        c.name for c in result.columns("timeline")
    ]
