"""Closed streams, damaged records, names that a terminal would obey, cells that a spreadsheet would compute."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from published_files import EXPERIMENTS

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.launch.failure_report import JobState, failure
from dpsim.records import bench, reproduce
from dpsim.report.words import spreadsheet_text

REPORTS = EXPERIMENTS.parent / "reports"
Dpsim = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_ends_nothing(closed: str, tmp_path: Path) -> None:
    output = tmp_path / "trained.json"
    words = f"train --model mlp:4 --steps 2 --output '{output}'"
    done = subprocess.run(f"'{sys.executable}' -m dpsim {words} {closed}", shell=True, check=False, timeout=120)
    assert done.returncode == 0 and json.loads(output.read_text())["command"] == "train"


def test_a_trajectory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    raw = codec.read_raw(REPORTS / "reproducibility/plain/reproduce.json", "reproduce")
    raw["runs"][0]["trajectory"] = 99
    path = tmp_path / "reproduce.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(FileFormatError, match="trajectory 99"):
        reproduce.read(path)


def test_a_series_of_no_size_of_the_benchmark_is_refused(tmp_path: Path) -> None:
    raw = codec.read_raw(REPORTS / "allreduce/allreduce.json", "benchmark")
    raw["series"][-1]["size_bytes"] = 12
    path = tmp_path / "allreduce.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(FileFormatError, match="12 bytes"):
        bench.read(path)


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_read() -> None:
    assert codec.parse_json(r'["\ud83d\ude00"]') == ["\U0001f600"]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        codec.parse_json(r'["\ud800"]')


def test_messages_escape_what_a_terminal_would_obey() -> None:
    assert str(ConfigError("a\a\x1b[2J\u202eb")) == r"a\x07\x1b[2J\u202eb"


def test_sigint_that_mpiexec_reports_together_with_sigkill_is_named() -> None:
    state = JobState(pids={0: ("a", 1), 1: ("a", 2), 2: ("a", 3)}, first_ended=2)
    state.reported_signal = signal.SIGINT | signal.SIGKILL
    assert "rank 2 of 3 was killed by SIGINT" in str(failure(11, state, 3))


def test_an_argument_that_is_not_utf8_is_refused_before_training(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("train", "--steps", "2", "--checkpoint", f"{tmp_path}/ck\udcff")
    assert code == 2 and "not UTF-8" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("begin", "=+-@\t\r")
def test_no_cell_is_a_formula(begin: str) -> None:
    assert spreadsheet_text(f"{begin}1+1") == f"'{begin}1+1"
    assert (spreadsheet_text("ring"), spreadsheet_text(-1.0), spreadsheet_text("-inf")) == ("ring", -1.0, "-inf")


def test_a_label_that_is_a_formula_is_text_in_points_csv(dpsim: Dpsim, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(REPORTS / "devices", tmp_path / name)
    labels = ("--label", "=HYPERLINK(1),b")
    code, _, err = dpsim("report", tmp_path / "a", tmp_path / "b", *labels, "--output", tmp_path / "out")
    assert code == 0, err
    assert "\n'=HYPERLINK(1)," in (tmp_path / "out/points.csv").read_text()
