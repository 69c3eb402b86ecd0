"""``dpsim report`` of several runs: the terminal, the JSON, and the files of the report."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from report_factory import PACED, sweep

from dpsim import codec

Dpsim = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two runs on two networks, and one on the first network alone."""
    path = tmp_path_factory.mktemp("runs")
    for name, seed, networks in (("old", 1, ("node", PACED)), ("new", 2, ("node", PACED)), ("node", 3, ("node",))):
        predictions, results = sweep(seed=seed, networks=networks, rounds=6, timelines=False)
        codec.write(path / name / "predictions.json", predictions)
        codec.write(path / name / "results.json", results)
    return path / "old", path / "new", path / "node"


def test_the_terminal_shows_ratios_means_and_warnings(folders: tuple[Path, ...], dpsim: Dpsim) -> None:
    code, out, err = dpsim("report", *folders[:2])
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert "Settings in common" in text and "64 KiB" in text and f"{PACED} (emulated network)" in text
    assert "were not measured in turns" in text and "of emulated networks" in text
    assert (
        "new takes" in text and "times as long as old in the geometric mean of 30 settings on real and emulated" in text
    )
    assert max(map(len, out.splitlines())) <= 100


def test_the_json_has_flat_points_and_a_summary(folders: tuple[Path, ...], dpsim: Dpsim) -> None:
    code, out, _ = dpsim("report", *folders, "--label", "before,after,other", "--json")
    shown = json.loads(out)
    assert code == 0 and (shown["schema"], shown["command"]) == ("dpsim.output/1", "compare")
    assert len(shown["points"]) == 30 + 15 and len(shown["summary"]["not_compared"]) == 15
    point = shown["points"][-1]
    assert (point["a"], point["b"], point["network"], point["fusion_threshold_bytes"]) == (
        "before",
        "other",
        "node",
        "inf",
    )
    assert point["ratio_low"] <= point["ratio"] <= point["ratio_high"] and point["a_time_s"] > 0
    assert [run["label"] for run in shown["summary"]["runs"]] == ["before", "after", "other"]
    assert not any(isinstance(value, dict | list) for point in shown["points"] for value in point.values())


def test_the_report_has_a_page_a_figure_and_a_table_of_points(
    folders: tuple[Path, ...], dpsim: Dpsim, tmp_path: Path
) -> None:
    output = tmp_path / "compared"
    assert dpsim("report", *folders, "--output", output)[0] == 0
    assert {path.name for path in output.iterdir()} == {
        "index.html",
        "report.md",
        "ratio.svg",
        "ratio.png",
        "points.csv",
    }
    with (output / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 45 and float(rows[0]["ratio"]) > 0 and rows[0]["fusion_threshold_bytes"] == ""
    page, text = (output / "index.html").read_text(), (output / "report.md").read_text()
    assert 'href="points.csv"' in page and "var(--series0)" in page and page.count("<svg") == 2
    assert "## Environments" in text and "## Not compared" in text and "only old measured it" in text
    drawn = (output / "ratio.svg").read_text()
    assert "2 devices, 64 KiB, no overlap, node" in drawn and "against old" in drawn


def test_a_report_is_not_written_over_a_run(folders: tuple[Path, ...], dpsim: Dpsim) -> None:
    code, _, err = dpsim("report", *folders[:2], "--output", folders[0])
    assert code == 2 and "this command reads it" in err
    assert not (folders[0] / "report.md").exists()
