"""The what-if page as a reader uses it: keys, an address with a setting, Play, both schemes of colours, odd inputs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from browser import Page, needs_browser, opened

from dpsim import machine, workload
from dpsim.explore.page import MOST_BYTES, page
from dpsim.explore.page import script as joined_script
from dpsim.explore.world import EXAMPLE_WORKLOAD, MOST_LAYERS
from dpsim.workload import Workload

NODE = shutil.which("node")
AFTER_A_MOMENT = """new Promise((done) => {
  const look = () => (%s ? done() : setTimeout(look, 10));
  look();
})"""
PIPELINE = "devices=8&strategy=pipeline%3Astages%3D4&accumulate=4"

CONTRASTS = """(() => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parts = (colour) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const [r, g, b] = parts(colour).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const box = element.closest("svg g")?.querySelector("rect"); // the number on a bucket
    if (box) return getComputedStyle(box).fill;
    for (let each = element; each; each = each.parentElement) {
      const {backgroundColor} = getComputedStyle(each);
      if (parts(backgroundColor)[3] === 255) return backgroundColor;
    }
    return "white";
  };
  document.querySelectorAll("details").forEach((each) => each.setAttribute("open", ""));
  const withText = [...document.querySelectorAll("body *")].filter((each) =>
    each.checkVisibility() && !each.closest(".unseen, script, style, option") &&
    (each.tagName === "SELECT" || [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim())));
  return withText.map((each) => {
    const style = getComputedStyle(each);
    const colour = each.closest("svg") ? style.fill : style.color;
    const [low, high] = [luminance(colour), luminance(behind(each))].sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), each.textContent.trim().slice(0, 40), colour, behind(each)];
  });
})()"""


def example(devices: int = 8) -> str:
    return page(workload.read(EXAMPLE_WORKLOAD), machine.read("10gbe"), "--workload w --machine 10gbe", devices)


def of_layers(count: int) -> Workload:
    """A workload of so many layers, which state what a pipeline needs."""
    known = workload.read(EXAMPLE_WORKLOAD)
    layers = []
    for i in range(count):
        layer = known.layers[i % len(known.layers)]
        tensors = tuple(msgspec.structs.replace(each, name=f"{i} {each.name}") for each in layer.tensors)
        layers.append(
            msgspec.structs.replace(layer, name=f"layer {i}", tensors=tensors, output_bytes_per_sample=4096.0)
        )
    return msgspec.structs.replace(known, layers=tuple(layers))


def in_stages() -> str:
    """The page of a workload that pipelines divide."""
    return page(of_layers(12), machine.read("10gbe"), "")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    with opened(tmp_path) as shown:
        yield shown


def written(folder: Path, html: str, setting: str = "") -> str:
    """Write a page, and return its address with a setting."""
    path = folder / "explore.html"
    path.write_text(html, encoding="utf-8")
    return path.as_uri() + (f"#{setting}" if setting else "")


@needs_browser
def test_arrow_keys_move_a_slider_and_the_address_opens_the_same_setting(tmp_path: Path, browser: Page) -> None:
    browser.open(written(tmp_path, example()))
    seen = "[setting.devices, find('devices').getAttribute('aria-valuetext'), find('step').textContent,"
    seen += " find('timeline').innerHTML]"
    before = browser.value(seen)
    browser.value("find('devices').focus()")
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    after = browser.value(seen)
    assert [before[:2], after[:2]] == [[8, "8"], [16, "16"]]
    assert before[2] != after[2] and before[3] != after[3]
    browser.value(AFTER_A_MOMENT % "location.hash")
    address = browser.value("location.href")
    assert address.endswith("#devices=16")
    browser.open(address)
    assert browser.value(seen) == after
    browser.value("location.hash = 'devices=12&overlap=off&strategy=zero2&latency_s=0&threshold=nonsense'")
    browser.value(AFTER_A_MOMENT % "setting.devices === 12")
    chosen = browser.value("[...['devices', 'overlap', 'strategy', 'latency_s'].map((each) => find(each).value)]")
    assert chosen[1:3] == ["off", "zero2"]
    assert browser.value("[setting.devices, setting.latency_s]") == [12, 0]


@needs_browser
@pytest.mark.parametrize("setting", ["", PIPELINE])
def test_play_moves_says_what_runs_and_ends(tmp_path: Path, browser: Page, setting: str) -> None:
    browser.open(written(tmp_path, in_stages() if setting else example(), setting))
    state = (
        "[find('play').textContent, find('moment').textContent, document.querySelector('.cursor').getAttribute('x1')]"
    )
    moved = f"""(() => {{
      let next = null;
      performance.now = () => 0;
      window.requestAnimationFrame = (go) => (next = go, 1);
      const seen = [{state}];
      find('play').click();
      for (const share of [0, 0.4, 0.8, 1]) {{
        next(share * PLAY_MS);
        seen.push({state});
      }}
      find('play').click();
      next(0.5 * PLAY_MS);
      find('play').click();
      return [...seen, {state}];
    }})()"""
    still, begun, early, late, ended, stopped = browser.value(moved)
    assert still == ended == stopped == ["Play the step", "", "-9"]
    assert {begun[0], early[0], late[0]} == {"Stop"}
    assert "forward" in begun[1] and begun[1].startswith("0 s: ")
    assert float(begun[2]) < float(early[2]) < float(late[2])
    assert len({begun[1], early[1], late[1]}) == 3


@needs_browser
def test_every_text_can_be_read_in_light_and_in_dark(tmp_path: Path, browser: Page) -> None:
    for address in (written(tmp_path, example()), written(tmp_path, example(), "devices=12&algorithm=hierarchical")):
        backs = set()
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            browser.open(address)
            of_texts = browser.value(CONTRASTS)
            assert len(of_texts) > 30
            assert [each for each in of_texts if each[0] < 4.5] == []
            backs.add(browser.value("getComputedStyle(document.body).backgroundColor"))
        assert len(backs) == 2


@needs_browser
def test_the_band_of_the_speedup_follows_when_the_setting_rests(tmp_path: Path, browser: Page) -> None:
    browser.open(written(tmp_path, example()))
    browser.value(AFTER_A_MOMENT % "speedupBand.points.length")
    devices, low, high = browser.value("speedupBand.points.find(([devices]) => devices === setting.devices)")
    right = browser.value("""(() => {
      const one = predict(world, onOneDevice(forEngine(world, setting)));
      return [...speedupEnds(world, one, shown), shown.samples_per_s / one.samples_per_s];
    })()""")
    assert [devices, low, high] == [8, *right[:2]] and low < right[2] < high
    area = "find('speedups').querySelector('.area').getAttribute('d')"
    assert browser.value(f"{area}.length") > 100
    assert browser.value(f"change({{devices: 16}}), {area}") == ""


@needs_browser
def test_every_rank_class_has_its_lanes(tmp_path: Path, browser: Page) -> None:
    browser.open(written(tmp_path, in_stages(), PIPELINE))
    lanes = browser.value("[...document.querySelectorAll('#timeline text')].map((each) => each.textContent)")
    assert [each for each in lanes if "computation" in each] == [f"stage {i}: computation" for i in range(1, 5)]
    assert lanes.count("communication") == 4
    classes = browser.value("[...new Set(boxes(shown, world.workload.layers).map((box) => box.rank_class))].sort()")
    assert classes == [0, 1, 2, 3]
    named = browser.value("classNames({stages: 2, parts: 2})")
    assert named == ["stage 1, part 1", "stage 1, part 2", "stage 2, part 1", "stage 2, part 2"]


@needs_browser
def test_the_most_layers_make_a_page_that_works_and_says_what_it_leaves_out(tmp_path: Path, browser: Page) -> None:
    html = page(of_layers(MOST_LAYERS), machine.read("10gbe"), "")
    assert len(html.encode()) < MOST_BYTES
    assert re.search(r"Left out: pipeline[^<]*possible: workloads of up to \d+ layers", html)
    browser.open(written(tmp_path, html))
    assert browser.value("[find('refusal').textContent, shown.step_s > 0, world.workload.layers.length]") == [
        *("", True),
        MOST_LAYERS,
    ]


@needs_browser
def test_one_device_has_a_page_without_collectives(tmp_path: Path, browser: Page) -> None:
    browser.open(written(tmp_path, example(devices=1)))
    seen = browser.value(
        "[find('refusal').textContent, find('speedup').textContent, find('exposed').textContent,"
        " find('thresholds').hidden, find('timeline').querySelectorAll('.exposed').length]"
    )
    assert seen == ["", "1", "0 s", True, 0]


@pytest.mark.skipif(NODE is None, reason="needs Node.js: node")
def test_the_joined_script_has_no_name_twice_and_no_error_of_syntax(tmp_path: Path) -> None:
    path = tmp_path / "joined.js"
    path.write_text(f'"use strict";\n{joined_script()}', encoding="utf-8")
    checked = subprocess.run([str(NODE), "--check", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
