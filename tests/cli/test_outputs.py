"""What a command writes over: its own kind of file, never a device, a pipe, a link or somebody's input."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from report_factory import sweep as records

from dpsim import codec
from dpsim.cli.outputs import writable
from dpsim.errors import ConfigError, FileFormatError
from dpsim.folder_lock import locked
from dpsim.harness.sweep.pairing import joined
from dpsim.harness.sweep.sweep import declared, sweep

Dpsim = Callable[..., tuple[int, str, str]]


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    writable(pipe)
    codec.write_text(pipe, "content")
    reader.join()
    assert (got, pipe.is_fifo()) == ([b"content"], True)


def test_a_device_is_written_into_and_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    for path in (link, Path("/dev/null")):
        writable(path)
        codec.write_text(path, "content")
        assert path.is_char_device()
    assert link.is_symlink()


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one_and_its_target_is_written(exists: bool, tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere" / "target.json", tmp_path / "link.json"
    target.parent.mkdir()
    if exists:
        target.write_text("")
    link.symlink_to("elsewhere/target.json")
    writable(link)
    codec.write_text(link, "[]")
    assert (link.is_symlink(), target.read_text()) == (True, "[]")


@pytest.mark.parametrize(
    ("name", "kind", "content", "refused"),
    [
        ("a.json", "output", b"", False),
        ("a.json", "output", b'{"of": "before"}', True),
        ("a.json", "output", b'{"schema": "dpsim.output/1"}', False),
        ("a", "machine", b'{"name": "m", "schema": "dpsim.machine/1"}', False),
        ("a.json", "machine", b'{"name": "w", "schema": "dpsim.workload/1"}', True),
        ("a.json", "output", b"[1]", True),
        ("a.json", "output", b"\xff", True),
        ("a.json", "output", b"[" * 100_000, True),
        ("checkpoint-3.safetensors", "output", b'{\0\0\0\0\0\0\0{"a": 1}', True),
        ("notes.txt", "output", b"my notes", True),
        ("w.toml", "workload", b"[[layers]]", True),
        ("page.html", "page", b"<!doctype html><title>mine</title>", True),
        ("figure.png", "", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", True),
        ("figure.png", "", b"\x89PNG\r\n\x1a\n\0\0\0\rtEXtSoftware\0dpsim", False),
        ("points.csv", "", b"devices,layout,global_batch\n", False),
        ("points.csv", "", b"size_bytes,count,dtype\n", False),
        ("points.csv", "", b"name,address\n", True),
        ("points.parquet", "", b"PAR1\x15\0\x15", False),
        ("points.parquet", "", b"mine", True),
        ("figure.png", "", b'{"a": 1}', True),
        ("figure.svg", "", b"<svg>", True),
        ("figure.svg", "", b"<svg></svg><!-- dpsim -->\n", False),
        ("figure", "", b"mine", True),
    ],
)
def test_a_file_that_dpsim_did_not_make_is_not_overwritten(
    name: str, kind: str, content: bytes, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if refused:
        with pytest.raises(ConfigError, match=r"it exists, and is no .* file that dpsim made"):
            writable(path, kind)
    else:
        writable(path, kind)


def test_an_input_is_not_overwritten_under_any_of_its_names(tmp_path: Path) -> None:
    given, link = tmp_path / "w.json", tmp_path / "link.json"
    given.write_text("{}")
    link.symlink_to(given)
    for path in (given, link, tmp_path / ".." / tmp_path.name / "w.json"):
        with pytest.raises(ConfigError, match="this command reads it"):
            writable(path, inputs=(None, given))
    writable(tmp_path / "other.json", inputs=(None, given))


def test_predict_does_not_write_over_its_workload(dpsim: Dpsim, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "experiments" / "machines"
    workload = tmp_path / "w.json"
    codec.write(workload, codec.read_raw(folder / "googlenet_k80.toml", "workload"))
    before = workload.read_bytes()
    code, _, said = dpsim(
        "predict",
        "--workload",
        workload,
        "--machine",
        folder / "k80_10gbe.toml",
        "--devices",
        "2",
        "--global-batch",
        "64",
        "--output",
        workload,
    )
    assert (code, workload.read_bytes()) == (2, before)
    assert "this command reads it" in said


def test_a_page_that_is_no_report_is_not_overwritten(dpsim: Dpsim, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>my home page</h1>")
    code, _, said = dpsim("report", Path(__file__).parents[2] / "reports" / "devices", "--output", tmp_path)
    assert (code, (tmp_path / "index.html").read_text()) == (2, "<h1>my home page</h1>")
    assert "it holds index.html" in said


def test_a_second_command_is_kept_out_of_a_folder_and_the_first_one_s_files_are_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with locked(folder):
        with pytest.raises(ConfigError, match="another command is writing into"):
            sweep(declared("devices"), folder, lambda _: None)
        assert list(folder.iterdir()) == []
    with locked(folder):
        pass


def test_predictions_made_after_the_measurement_are_refused() -> None:
    predictions, results = records()
    late = msgspec.structs.replace(predictions, predicted_at="2025-01-01T10:00:06.000Z")
    matching = msgspec.structs.replace(results, predictions_sha256=codec.digest(late))
    with pytest.raises(FileFormatError, match="allowed: predictions that were made before"):
        joined(late, matching)
    with pytest.raises(FileFormatError, match="allowed: predictions that were made before"):
        joined(late, msgspec.structs.replace(matching, predicted_at=late.predicted_at))
