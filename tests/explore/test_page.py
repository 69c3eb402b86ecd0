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
from dpsim.lowering import LOWERINGS
from dpsim.machine import AllreduceCost, Machine
from dpsim.predict import predict_points
from dpsim.predict.defaults import for_prediction
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
    points = predict_points(layers, for_prediction(layers, machine.read("10gbe"), [8, 12]), [8, 12], [])[0]
    before, after = (point["predicted_step_s"] for point in points)
    assert len(of_widths) == len(WIDTHS)
    for seen in of_widths:
        assert seen["labels"] > 15 and not seen["overlaps"] and not seen["unlabelled"] and seen["sideways"] <= 0
        assert seen["devices"] == 12
        assert [seen["before"], seen["after"]] == pytest.approx([before, after], rel=1e-6)


USED = """
const frame = document.querySelector("iframe").contentWindow;
const [find, pause] = [(id) => frame.document.getElementById(id), (ms) => new Promise((go) => setTimeout(go, ms))];
const seen = {opened: frame.eval("[setting.devices, setting.strategy]")};
await pause(3000);
seen.band = find("speedups").querySelectorAll(".area").length;
seen.best = find("best").textContent;
// without a window no frame is drawn: a timer stands for the display
frame.requestAnimationFrame = (draw) => frame.setTimeout(() => draw(frame.performance.now()), 16);
frame.cancelAnimationFrame = frame.clearTimeout;
find("play").click();
await pause(1500);
seen.playing = [find("play").textContent, find("moment").textContent];
seen.veiled = Number(find("timeline").querySelector(".later").getAttribute("width"));
await pause(7000);
seen.played = [find("play").textContent, find("moment").textContent];
seen.unveiled = Number(find("timeline").querySelector(".later").getAttribute("width"));
const slider = find("local_batch");
slider.focus();
seen.focused = frame.document.activeElement === slider && slider.tabIndex === 0 && slider.type === "range";
slider.stepUp(); // what an arrow key does to a range
slider.dispatchEvent(new Event("input"));
seen.moved = [frame.eval("setting.local_batch"), slider.getAttribute("aria-valuetext"), find("local_batch").value];
await pause(1000);
seen.address = frame.location.hash;
seen.said = find("status").textContent;
return JSON.stringify(seen);"""


@needs_browser
def test_a_shared_address_opens_its_setting_plays_its_step_and_follows_the_keys(tmp_path: Path) -> None:
    (tmp_path / "shown.html").write_text(example(), encoding="utf-8")
    frame = '<iframe src="shown.html#devices=12&strategy=zero1" style="width:1280px;height:900px"></iframe>'
    seen = json.loads(evaluated(tmp_path, USED, frame))
    assert seen["opened"] == [12, "zero1"]
    assert seen["band"] == 1 and seen["best"] != "Comparing."
    assert seen["playing"][0] == "Stop" and seen["playing"][1] and seen["veiled"] > 0
    assert seen["played"] == ["Play the step", ""] and seen["unveiled"] == 0
    batch, told, place = seen["moved"]
    assert seen["focused"] and str(batch) == told.replace(",", "") and int(place) > 0
    assert {"devices=12", "strategy=zero1", f"local_batch={batch}"} == set(seen["address"].lstrip("#").split("&"))
    assert seen["said"].startswith("Predicted step ")


CONTRASTS = """
const frame = document.querySelector("iframe").contentWindow;
const page = frame.document;
const numbers = (colour) => (colour.match(/[0-9.]+/g) ?? [0, 0, 0, 0]).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map((part) => part / 255)
  .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  const box = element.previousElementSibling;
  if (element.classList.contains("inside")) return frame.getComputedStyle(box).fill;
  for (let at = element; at; at = at.parentElement) {
    const colour = frame.getComputedStyle(at).backgroundColor;
    if ((numbers(colour)[3] ?? 1) > 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const weakest = () => {
  let least = [Infinity];
  for (const element of page.querySelectorAll("main *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || ["title", "OPTION"].includes(element.tagName)) continue;
    const style = frame.getComputedStyle(element);
    const text = luminance(numbers(element.namespaceURI.endsWith("svg") ? style.fill : style.color));
    const ground = luminance(numbers(behind(element)));
    const contrast = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (contrast < least[0]) least = [contrast, element.outerHTML.slice(0, 120)];
  }
  return least;
};
const light = weakest();
for (const sheet of page.styleSheets) {
  for (const rule of [...sheet.cssRules]) {
    if (!rule.media?.mediaText.includes("prefers-color-scheme: dark")) continue;
    for (const inner of rule.cssRules) sheet.insertRule(inner.cssText, sheet.cssRules.length);
  }
}
return JSON.stringify([light, weakest()]);"""


@needs_browser
def test_texts_stand_out_in_light_and_in_dark(tmp_path: Path) -> None:
    """By at least 4.5, of WCAG 2.2."""
    (tmp_path / "shown.html").write_text(example(), encoding="utf-8")
    frame = '<iframe src="shown.html" style="width:1280px;height:900px"></iframe>'
    light, dark = json.loads(evaluated(tmp_path, CONTRASTS, frame))
    assert light[0] >= 4.5, light
    assert dark[0] >= 4.5 and dark != light, dark


def test_a_study_shows_what_it_measured() -> None:
    data = re.search('<script type="application/json" id="world">(.*?)</script>', studied(ROOT / "reports" / "example"))
    assert data is not None
    known = json.loads(data[1])
    assert known["setting"]["devices"] == 2
    assert all(point["step_s"] > 0 for point in known["measured"]) and len(known["measured"]) > 3


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
    assert run(["explore"]) == 0 and run(["explore"]) == 0
    assert (tmp_path / "explore.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "notes.html").write_text("my notes")
    assert run(["explore", "--output", "notes.html"]) == 2
    assert run(["explore", "no-study"]) == 2
    assert run(["explore", str(ROOT / "reports" / "example"), "--machine", "10gbe"]) == 2
    assert "Traceback" not in capsys.readouterr().err
