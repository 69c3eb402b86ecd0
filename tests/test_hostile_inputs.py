"""Inputs that would take all memory, hang, or end in a traceback: each is refused in words, at once."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsim import codec
from dpsim.cli import app
from dpsim.collective import parse_devices
from dpsim.data import load_dataset
from dpsim.data.sharding import check_batch
from dpsim.errors import ConfigError, DpsimError, FileFormatError, printable
from dpsim.harness.doctor_gpu import Finding
from dpsim.imports import ImportConfig, import_machine
from dpsim.launch import failure_report
from dpsim.launch.failure_report import JobState
from dpsim.launch.hosts import read_hostfile
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.records import bench
from dpsim.records.train import TrainConfig
from dpsim.report.page import markdown_cell
from dpsim.runtime import checkpoint
from dpsim.units import parse_duration

Dpsim = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]


def written(folder: Path, step: int, name: str = "") -> Path:
    header = checkpoint.Header(
        step=step, epoch=0, batch=step, seed=0, training_samples=7, plan=Plan(devices=1, global_batch=1), run={}
    )
    path = folder / (name or f"checkpoint-{step}.safetensors")
    path.write_bytes(checkpoint.encode(checkpoint.Checkpoint(header=header, tensors={"losses": np.zeros(step)})))
    return path


@pytest.mark.parametrize("depth", [101, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_record_that_is_nested_deeply_is_refused(depth: int, opening: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(opening * depth + "1" + ("]" if opening == "[" else "}") * depth)
    with pytest.raises(FileFormatError, match="nested"):
        codec.read_raw(path, "workload")


@pytest.mark.parametrize("header", ["", "no JSON", "[" * 5000, "9" * 5000, "NaN", "[]"])
def test_a_checkpoint_with_its_hash_right_and_its_header_wrong_is_refused(
    header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(codec, "to_json", lambda *_, **__: header)
        path = written(tmp_path, 3)
    with pytest.raises(FileFormatError):
        checkpoint.read(path)


def test_a_checkpoint_that_was_renamed_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, 6)
    written(tmp_path, 7, "checkpoint-99.safetensors")
    path, actual, wrong = checkpoint.newest(tmp_path)
    assert (path.name, actual.header.step) == ("checkpoint-6.safetensors", 6)
    assert "its name was changed" in str(wrong[0])


def test_a_checkpoint_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint-1.safetensors")
    with pytest.raises(FileFormatError, match="no ordinary file"):
        checkpoint.newest(tmp_path)


def test_a_small_archive_that_would_be_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsim.data.arrays._LARGE_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", b"\0" * 10_000_000)
    with pytest.raises(FileFormatError, match="would be 10,000,000 bytes"):
        load_dataset(f"npz:{tmp_path}/bomb.npz")


@pytest.mark.timeout(30)
def test_a_line_of_spaces_in_a_benchmarks_output_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "osu.txt"
    log.write_text("# OSU MPI Allreduce Latency Test v7.5\n# Size " + " " * 300_000 + "x\n")
    with pytest.raises(DpsimError, match="line 2: 300,008 characters"):
        import_machine(ImportConfig(files=(str(log),), devices=(2,)))


@pytest.mark.parametrize(
    "refused",
    [
        lambda: build_model("mlp:99999999999", (8, 8, 1), 3),
        lambda: build_model("mlp:999999x9999", (8, 8, 1), 3),
        lambda: build_model("mlp:" + "9" * 5000, (8, 8, 1), 3),
        lambda: build_model("cnn:" + "9" * 5000, (8, 8, 1), 3),
        lambda: load_dataset("synthetic:99999x99999x3,classes=10"),
        lambda: load_dataset("synthetic:4x4x3,train=" + "9" * 5000),
        lambda: load_dataset("synthetic:" + "9" * 5000 + "x4x3"),
        lambda: parse_devices("9" * 5000),
        lambda: parse_devices("2x" + "9" * 5000),
        lambda: TrainConfig.of(leaves=99_999_999),
        lambda: TrainConfig.of(seed=-1),
        lambda: parse_duration("1." + " " * 300_000 + "x"),
        lambda: TrainConfig.of(seed=2**64),
        lambda: check_batch(10, 11),
    ],
)
def test_numbers_that_are_too_large_are_refused(refused: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        refused()


@pytest.mark.parametrize("line", ["localhost:99999999999999999999", "node1 slots=" + "9" * 5000, "no\0de", "a;b"])
def test_a_hostfile_line_that_makes_no_sense_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"node0:2\n{line}\n")
    with pytest.raises(ConfigError, match="line 2 of"):
        read_hostfile(path)


def test_a_host_that_cannot_be_reached_is_named(dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = tmp_path / "mpiexec"
    stranger.write_text('#!/bin/sh\n[ "$1" = --version ] && echo HYDRA && exit\nexit 255\n')
    stranger.chmod(0o755)
    monkeypatch.setattr("dpsim.launch.jobs.mpiexec_path", lambda: str(stranger))
    (tmp_path / "hosts").write_text("nowhere.invalid:2\n")
    code, _, said = dpsim("train", "--model", "mlp:4", "--steps", "1", "--hostfile", tmp_path / "hosts")
    assert (code, "no rank could be started on the hosts nowhere.invalid" in said) == (2, True)


def test_reproducible_without_leaves_is_refused(dpsim: Dpsim) -> None:
    code, _, said = dpsim("train", "--reproducible", "--set", "leaves=0")
    assert (code, "--reproducible with --set leaves=0" in said) == (2, True)


def test_a_crash_names_shared_memory_as_a_possible_reason() -> None:
    assert "/dev/shm" in str(failure_report.failure(11, JobState(first_ended=0, reported_signal=11), 2))


def test_a_rank_killed_before_it_said_hello_is_not_taken_for_another_one() -> None:
    seen = JobState(first_ended=0, reported_signal=9, pids={0: ("here", 1)})
    assert str(failure_report.failure(9, seen, 2)).startswith("one of 2 ranks was killed by SIGKILL")


def test_control_characters_reach_no_report() -> None:
    assert printable("a\x1b[31mb\0\x9b\ud800\u202e\n") == r"a\x1b[31mb\x00\x9b\ud800\u202e" + "\n"
    assert markdown_cell("a | b\x1b <script>*") == r"a \| b\x1b &lt;script>\*"


@pytest.mark.parametrize(("redirected", "code"), [(">&-", 0), ("> /dev/full", 2)])
def test_a_stdout_that_is_closed_or_full_ends_in_words(redirected: str, code: int) -> None:
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f"{sys.executable} -m dpsim launch slurm --dry-run -- doctor {redirected}"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_letters_that_the_output_cannot_show_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    finding = Finding(name="numba", state="ok", found="caf\xe9")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown)
        patch.setattr("dpsim.harness.doctor.examine", lambda _: iter([finding]))
        assert app.run(["doctor"]) == 0
    shown.seek(0)
    assert "caf?" in shown.read()


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (MemoryError("Unable to allocate 480. GiB"), "there is not enough memory: Unable to allocate 480. GiB"),
        (OSError(36, "File name too long", "x" * 300), "x: File name too long"),
    ],
)
def test_what_the_system_refuses_is_told_in_words(
    raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("dpsim.harness.doctor.examine", broken)
    assert app.run(["doctor"]) == 2
    assert said in capsys.readouterr().err


def test_long_file_names_are_refused(dpsim: Dpsim) -> None:
    for flag in ("--output", "--resume", "--hostfile", "--checkpoint"):
        code, _, said = dpsim("train", flag, "a" * 300)
        assert code == 2, json.dumps(said)


def test_a_benchmark_with_a_series_of_an_unknown_system_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.json"
    raw = codec.read_raw(ROOT / "reports/allreduce/allreduce.json", "benchmark")
    raw["series"][0]["system"] = "x"
    codec.write_record(path, raw)
    with pytest.raises(FileFormatError, match="a series is of system 'x'"):
        bench.read(path)
