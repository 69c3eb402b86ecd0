"""The what-if page: what is in the file, and what a reader does with it in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from browser import evaluated, needs_browser

from dpsim import machine, workload
from dpsim.cli.app import run
from dpsim.errors import ConfigError
from dpsim.explore.page import EXPLORED, page
from dpsim.explore.studied import studied
from dpsim.explore.world import EXAMPLE_WORKLOAD, MOST_LAYERS
from dpsim.explore.written import DIVIDED
from dpsim.harness.sweep.sweep import read_swept
from dpsim.lowering import LOWERINGS
from dpsim.machine import AllreduceCost, Machine
from dpsim.model import predict_points
from dpsim.model.defaults import for_prediction
from dpsim.records.sweep import read_predictions
from dpsim.setting import Grid
from dpsim.strategy import parse_strategy

ROOT = Path(__file__).parents[2]
WIDTHS = (360, 768, 1280, 1920)

SEEN_AND_MOVED = """
const crossing = (a, b) =>
  a.left < b.right - 0.5 && b.left < a.right - 0.5 && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5;
return JSON.stringify([...document.querySelectorAll("iframe")].map((frame) => {
  const page = frame.contentDocument.documentElement;
  const all = (selector) => [...page.querySelectorAll(selector)];
  const labels = all(".chart text").map((each) => [each.textContent, each.getBoundingClientRect()]);
  const overlaps = labels.flatMap(([one, a], i) =>
    labels.slice(i + 1).filter(([, b]) => crossing(a, b)).map(([other]) => [one, other]));
  const sideways = page.scrollWidth - page.clientWidth;
  const unlabelled = all("input, select").filter((each) => !each.labels.length).map((each) => each.id);
  const before = frame.contentWindow.eval("shown.step_s");
  const [slider] = all("#devices");
  slider.value = Number(slider.value) + 1;
  slider.dispatchEvent(new Event("input"));
  const [devices, after] = frame.contentWindow.eval("[setting.devices, shown.step_s]");
  return {labels: labels.length, overlaps, sideways, unlabelled, before, devices, after};
}));"""


def example() -> str:
    return page(workload.read(EXAMPLE_WORKLOAD), machine.read("10gbe"), "--workload w --machine 10gbe")


def test_the_page_is_one_small_file_that_loads_nothing() -> None:
    written = example()
    assert len(written.encode()) < 1e6
    assert not re.search(r"""(src|href)=|@import|url\(|fetch\(|XMLHttpRequest""", written)


@needs_browser
def test_labels_keep_apart_and_a_slider_predicts_as_python_at_every_width(tmp_path: Path) -> None:
    (tmp_path / "shown.html").write_text(example(), encoding="utf-8")
    frames = "".join(f'<iframe src="shown.html" style="width:{width}px;height:900px"></iframe>' for width in WIDTHS)
    of_widths = json.loads(evaluated(tmp_path, SEEN_AND_MOVED, frames))
    layers = workload.read(EXAMPLE_WORKLOAD)
    points = predict_points(layers, for_prediction(layers, machine.read("10gbe")), Grid.of(devices=[8, 12]))[0]
    before, after = (point["predicted_step_s"] for point in points)
    assert len(of_widths) == len(WIDTHS)
    for seen in of_widths:
        assert seen["labels"] > 15 and not seen["overlaps"] and not seen["unlabelled"] and seen["sideways"] <= 0
        assert seen["devices"] == 12
        assert [seen["before"], seen["after"]] == pytest.approx([before, after], rel=1e-6)


def of_report(study: str) -> str:
    return studied(read_swept(ROOT / "reports" / study))


def test_a_study_shows_what_it_measured() -> None:
    data = re.search('<script type="application/json" id="world">(.*?)</script>', of_report("example"))
    assert data is not None
    known = json.loads(data[1])
    assert known["setting"]["devices"] == 2
    assert all(point["step_s"] > 0 for point in known["measured"]) and len(known["measured"]) > 3


@pytest.mark.parametrize("study", ["example", "devices"])
def test_the_interval_on_the_page_of_a_study_is_as_wide_as_in_its_report(study: str) -> None:
    data = re.search('<script type="application/json" id="world">(.*?)</script>', of_report(study))
    first = next(
        point
        for point in read_predictions(ROOT / "reports" / study / "blind.json").points
        if point.setting.plan.devices > 1
    )
    assert data is not None
    assert json.loads(data[1])["machine"]["interval_factor"]["several"] == first.interval_factor


def test_the_page_of_a_study_has_no_command_for_files_that_nobody_has_and_says_what_its_numbers_are() -> None:
    of_study, of_files = of_report("example"), example()
    assert 'id="command"' not in of_study and 'id="command"' in of_files
    assert "the interval is that of its report" in of_study and "of its report" not in of_files
    assert "w.json" not in of_study and "speedup, weak scaling" in of_study


def test_every_synchronous_strategy_is_explored() -> None:
    assert {parse_strategy(text).name for text in (*EXPLORED, *DIVIDED)} == {*LOWERINGS}


def test_what_a_workload_lacks_for_a_strategy_is_said() -> None:
    assert re.search(
        r"Left out: pipeline[^<]*possible: workloads whose layers state output_bytes_per_sample", example()
    )


def test_a_machine_without_a_link_keeps_its_tables_and_says_so() -> None:
    table = AllreduceCost(algorithm="ring", devices=2, sizes_bytes=(1, 10**6), time_s=(1e-5, 1e-3))
    written = page(workload.read(EXAMPLE_WORKLOAD), Machine(name="tables", allreduce=(table,)), "", 2)
    assert "Left out: latency and bandwidth" in written


def test_what_a_page_cannot_hold_is_refused() -> None:
    layers = workload.read(EXAMPLE_WORKLOAD)
    many = tuple(msgspec.structs.replace(layers.layers[0], name=str(i), tensors=()) for i in range(MOST_LAYERS + 1))
    with pytest.raises(ConfigError, match="layers"):
        page(msgspec.structs.replace(layers, layers=many), machine.read("10gbe"), "")
    slow = msgspec.structs.replace(machine.read("10gbe"), slow_devices=(2.0,))
    with pytest.raises(ConfigError, match="slow"):
        page(layers, slow, "")


def test_the_command_writes_a_page_and_refuses_to_replace_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written = ["predict", "--page", "explore.html"]
    assert run(written) == 0 and run(written) == 0
    assert (tmp_path / "explore.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "notes.html").write_text("<!doctype html><p>my notes")
    assert run(["predict", "--page", "notes.html"]) == 2
    assert (tmp_path / "notes.html").read_text() == "<!doctype html><p>my notes"
    named = tmp_path / "a b;touch pwned.toml"
    named.write_bytes(EXAMPLE_WORKLOAD.read_bytes())
    assert run(["predict", "--workload", named.name, "--page", "named.html"]) == 0
    assert "--workload 'a b;touch pwned.toml' --machine" in (tmp_path / "named.html").read_text(encoding="utf-8")
    study = tmp_path / "study.html"
    assert run(["report", str(ROOT / "reports" / "example"), "--page", str(study)]) == 0
    assert study.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run(["report", "no-study", "--page", "explore.html"]) == 2
    assert run([*written, "--json"]) == 2
    assert "Traceback" not in capsys.readouterr().err
