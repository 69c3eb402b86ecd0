"""Figures of reports in a real browser: at four widths and in print no labels collide, and a step plays."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import evaluated, needs_browser
from report_factory import sweep

from dpsim.experiments.reports_page import committed
from dpsim.harness.sweep.compare import compare
from dpsim.report.charts import Bars, Cell, Chart, Dot, Lines, Map, Mark, Panel, Rows, Series, Steps
from dpsim.report.content import Content, ReportFigure
from dpsim.report.figures import _DRAW
from dpsim.report.sweep.charts import step_chart
from dpsim.report.sweep.timelines import Timelines, buckets
from dpsim.report.write import write_content

ROOT = Path(__file__).parents[2]
WIDTHS = (360, 768, 1280, 1920)
PRINTED = 703
"""CSS pixels of the width of A4 within the margins of a page."""

LABELS = """
const crossing = (a, b) =>
  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
return JSON.stringify([...document.querySelectorAll("iframe")].map((frame) => {
  const page = frame.contentDocument;
  for (const each of page.querySelectorAll("details")) each.open = true;
  if (frame.className === "print") for (const rule of page.styleSheets[0].cssRules)
    if (rule.media) rule.media.mediaText = /print/.test(rule.media.mediaText) ? "all" : "not all";
  const figures = [...page.querySelectorAll("figure svg")].filter((svg) => svg.getBoundingClientRect().width);
  const wrong = figures.flatMap((svg) => {
    const all = svg.getBoundingClientRect(), scale = all.width / svg.viewBox.baseVal.width;
    const labels = [...svg.querySelectorAll("text")].filter((each) => each.textContent.trim());
    const boxes = labels.map((each) => [each.textContent, each.getBoundingClientRect()]);
    const crossed = boxes.flatMap(([one, a], i) =>
      boxes.slice(i + 1).filter(([, b]) => crossing(a, b)).map(([other]) => `${one} crosses ${other}`));
    const cut = boxes.filter(([, b]) => b.left < all.left - 0.5 || b.right > all.right + 0.5 ||
      b.top < all.top - 0.5 || b.bottom > all.bottom + 0.5).map(([text]) => `${text} is cut`);
    const small = labels.filter((each) => parseFloat(getComputedStyle(each).fontSize) * scale < 7.5);
    return [...crossed, ...cut, ...small.map((each) => `${each.textContent} is small`)];
  });
  const sideways = frame.className !== "print" && page.documentElement.scrollWidth > page.documentElement.clientWidth;
  return {figures: figures.length, wrong, sideways, players: page.querySelectorAll(".play button").length};
}));"""

PLAYED = """
const page = document.querySelector("iframe").contentDocument, [slider] = page.querySelectorAll(".play input");
const seen = (value) => {
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  const [svg] = page.querySelectorAll("figure .wide svg");
  return {
    hidden: [...page.querySelectorAll(".moving")].filter((each) => each.hasAttribute("clip-path")).length,
    shown: Number(page.querySelector("clipPath[id^=shown] rect").getAttribute("width")),
    dots: [...page.querySelectorAll(".bucket")].filter((each) => each.style.display !== "none").length,
    text: page.querySelector(".play li").textContent,
    labelled: slider.getAttribute("aria-valuetext").startsWith("after"),
  };
};
return JSON.stringify([0, 250, 600, 1000].map(seen));"""


def steps() -> Chart:
    """Steps of a made-up sweep, with buckets."""
    predictions, results = sweep(networks=("node",), rounds=1)
    comparison, timelines = compare(predictions, results), Timelines.of(predictions, results)
    chart = step_chart(comparison, timelines)
    assert chart is not None
    (panel,) = chart.panels
    assert isinstance(panel, Steps)
    both = (panel.measured, panel.predicted)
    filled = [buckets(step, {"dense2": int(step.size_bytes.sum())}) for step in both]
    return dataclasses.replace(chart, panels=[dataclasses.replace(panel, buckets=tuple(filled))])


def panels() -> Iterator[Panel]:
    """Panels of every kind, with labels that are long, many, or close to each other."""
    x, title = (1.0, 2.0, 4.0, 8.0), "2 devices on paced:50us,1gbit (emulated), PyTorch DDP by an MPI hook"
    close = [Series(name=f"baseline number {i}", x=x, y=(1.0, 2.0, 3.0, 4.0 + i / 99), look=i) for i in range(8)]
    common: dict[str, Any] = {"title": title, "subtitle": "ms per step", "x_label": "devices", "log_x": True}
    yield Lines(series=close, x_ticks={each: f"{each:g}\nMiB" for each in x}, **common)
    best = Mark(text="best measured", x=8.0, y=4.0, look="measured")
    measured = Series(name="measured", x=x, y=(1.0, 2.0, 3.0, 4.0), look="measured")
    yield Lines(series=[measured], marks=[best], names="legend", log_y=True, x_span=(1, 8), y_span=(1, 8), **common)
    names = [f"cnn:16,32,norm=group, batch norm {kind}, 2 leaves" for kind in ("local", "leaf", "global")]
    dots = [Dot(value=1.2, low=1.1, high=1.3, look="measured"), Dot(value=1.0, low=0.5, high=2.0, look="predicted")]
    for log in (False, True):
        yield Rows(title=title, subtitle=title, x_label=title, rows=dict.fromkeys(names, dots), log=log)
    parts = {"forward": 1.0, "exposed communication": 2.0}
    for labels in (names, ["64\nKiB", "inf"], [f"{i}" for i in range(14)]):
        yield Bars(title=title, subtitle="ms", x_label="threshold", bars=[(name, parts, parts) for name in labels])
    cells = {(a, b): Cell(share=0.5, text="10,000 ★", below="10,100 ◆") for a in "abcde" for b in ("0 B", "256 KiB")}
    yield Map(title=title, subtitle="", x_label="x", y_label="y", cells=cells, across="abcde", down=("0 B", "256 KiB"))
    yield from steps().panels


def content() -> Content:
    empty: dict[str, Any] = dict.fromkeys(("cards", "tables", "warnings", "rules", "facts", "environment"), ())
    return Content(name="made up", heading="made up", question="?", answers=("None.",), **empty)


def framed(folder: Path, page: Path) -> str:
    """Return a body that shows a page at all widths and as it is printed."""
    shutil.copy(page, folder / "shown.html")
    sizes = [*((width, "screen") for width in WIDTHS), (PRINTED, "print")]
    return "".join(
        f'<iframe src="shown.html" class="{kind}" style="border:0;width:{width}px;height:900px"></iframe>'
        for width, kind in sizes
    )


@needs_browser
def test_labels_of_every_kind_of_panel_keep_apart_at_every_width_and_in_print(tmp_path: Path) -> None:
    drawn = list(panels())
    assert {type(panel) for panel in drawn} == set(_DRAW)
    figures = [
        ReportFigure(name=f"figure{i}", title="?", caption="?", chart=Chart(panels=[panel] * 2, height_in=3.4))
        for i, panel in enumerate(drawn)
    ]
    write_content(tmp_path / "report", content(), figures, ("html",))
    of_widths = json.loads(evaluated(tmp_path, LABELS, framed(tmp_path, tmp_path / "report" / "index.html")))
    for width, seen in zip((*WIDTHS, "print"), of_widths, strict=True):
        assert seen["figures"] == len(drawn) and seen["players"] == 1
        assert not seen["wrong"] and not seen["sideways"], width


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    "page", [path.relative_to(ROOT).as_posix() for path in committed(ROOT / "reports", "index.html")]
)
def test_labels_of_committed_reports_keep_apart(tmp_path: Path, page: str) -> None:
    for seen in json.loads(evaluated(tmp_path, LABELS, framed(tmp_path, ROOT / page))):
        assert not seen["wrong"] and not seen["sideways"]


@needs_browser
def test_a_step_plays_and_is_complete_at_rest(tmp_path: Path) -> None:
    chart = steps()
    shown = ReportFigure(name="timeline", title="One step", caption="?", chart=chart)
    write_content(tmp_path / "report", content(), [shown], ("html",))
    page = tmp_path / "report" / "index.html"
    assert 'class="play" hidden' in page.read_text(encoding="utf-8")
    body = framed(tmp_path, page)
    begun, forward, later, ended = json.loads(evaluated(tmp_path, PLAYED, body))
    panel = chart.panels[0]
    assert isinstance(panel, Steps) and panel.buckets[0]
    assert begun["hidden"] and ended["hidden"] == 0 and ended["dots"] == 0
    assert begun["shown"] < forward["shown"] < later["shown"] < ended["shown"]
    assert "measured: forward, 0 of" in forward["text"] and "measured: done" in ended["text"]
    assert all(each["labelled"] for each in (begun, forward, later, ended))
