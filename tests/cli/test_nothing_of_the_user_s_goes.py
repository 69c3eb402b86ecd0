"""Every flag of every command that names a file or a folder to write: what the user has there stays as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from each_command import EACH, OF_COMMAND, STEPS, commands, started
from report_factory import sweep as records

from dpsim import codec
from dpsim.cli import app
from dpsim.cli.outputs import FOLDERS, drawable, writable
from dpsim.errors import ConfigError
from dpsim.launch import jobs
from dpsim.plan import Plan
from dpsim.runtime import checkpoint

Dpsim = Callable[..., tuple[int, str, str]]
READ = {
    *("--workload", "--machine", "--torch-script", "--from", "--hostfile", "--resume"),
    "--against",
}
"""Flags with a path that is read. Any other one is written."""
NEEDED = {"doctor": "--tune", "explain --json-line": "-- true", "report --share": "--ledger"}
FOREIGN = {
    "index.html": b"<!doctype html><title>my page about dpsim</title>",
    "report.md": b"# My report on dpsim\n",
    "machine.json": b'{"mine": "no machine"}',
    "workload.json": b'{"schema": "mine"}',
    "predictions.json": b"[1]",
    "results.json": b"{}",
    "inputs.json": b"{}",
    "samples.json": b"{}",
    "allreduce.json": b"{}",
    "reproduce.json": b"{}",
    "samples/cat.txt": b"a cat",
    "points.csv": b"my,own,points\n",
    "errors.png": b"\x89PNG\r\n\x1a\n mine",
    "skill.svg": b"<svg/>",
    "checkpoint-5.safetensors": b"\x02\0\0\0\0\0\0\0{}",
}
"""Files of the user's by names that dpsim writes, too."""
FILES = ("index.html", "machine.json", "skill.svg")


def _cases() -> Iterator[Any]:
    for command, application in commands(app.build()):
        for argument in application.assemble_argument_collection():
            flag, kinds = argument.names[0], get_args(argument.hint) or (argument.hint,)
            if not flag.startswith("--") or flag in READ or (Path not in kinds and flag != "--record"):
                continue
            beside = str(OF_COMMAND.get(f"{command} {flag}", "")).partition(" ")[2]
            needed = NEEDED.get(f"{command} {flag}") or NEEDED.get(command) or EACH[command]
            yield pytest.param(command, flag, f"{needed} {beside}", id=f"{command} {flag}")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("command", "flag", "needed"), list(_cases()))
def test_what_the_user_has_at_an_output_stays(
    command: str, flag: str, needed: str, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs.on_ranks, "__code__", started.__code__)
    for name, content in FOREIGN.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "notes.txt").write_text("notes")
    before = _digests(tmp_path)
    words = needed.replace(" --output again", "").replace(" --output merged.json", "")
    of_a_file = [f"mine/{name}" for name in FILES]
    for given in ("mine", "parent", *of_a_file):
        code, _, err = dpsim(*command.split(), flag, given, *words.split())
        assert code == 2 and ("cannot write" in err or "cannot draw" in err or "exists" in err), (given, err)
    assert _digests(tmp_path) == before


def test_a_new_path_is_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".predictions.json.ab12.partial").write_text("of a killed command")
    for kind in FOLDERS:
        writable(tmp_path / "new", folders=(kind,))
        writable(tmp_path / "empty", folders=(kind,))


def test_a_folder_is_written_again_by_what_made_it_and_by_nothing_else(tmp_path: Path) -> None:
    predictions, _ = records()
    codec.write_record(tmp_path / "predictions.json", predictions)
    writable(tmp_path, folders=("sweep",))
    for kind in (*FOLDERS.keys() - {"sweep"},):
        with pytest.raises(ConfigError, match=r"it holds predictions.json"):
            writable(tmp_path, folders=(kind,))
    (tmp_path / "inputs.json").write_text('{"schema": "mine"}')
    with pytest.raises(ConfigError, match=r"it holds inputs.json, predictions.json"):
        writable(tmp_path, folders=("sweep",))


def test_an_input_s_folder_is_not_written(tmp_path: Path) -> None:
    codec.write_record(tmp_path / "predictions.json", records()[0])
    with pytest.raises(ConfigError, match=r"this command reads train.py"):
        (tmp_path / "train.py").write_text("")
        writable(tmp_path, folders=("sweep",), inputs=(tmp_path / "train.py",))
    with pytest.raises(ConfigError, match="this command reads it"):
        writable(tmp_path, folders=("sweep",), inputs=(tmp_path,))


def test_profile_from_steps_writes_again_what_it_fitted_and_never_what_it_reads(
    dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = STEPS.split()
    assert [dpsim("profile", *words, "--output", "fitted")[0] for _ in range(2)] == [0, 0]
    before = _digests(tmp_path)
    words[words.index("--workload") + 1] = "fitted/workload.json"
    code, _, err = dpsim("profile", *words, "--output", "fitted")
    assert (code, _digests(tmp_path)) == (2, before)
    assert "this command reads workload.json" in err


def test_checkpoints_go_to_a_folder_of_checkpoints(tmp_path: Path) -> None:
    plan = Plan(devices=1, global_batch=1)
    header = checkpoint.Header(step=3, epoch=0, batch=3, seed=0, training_samples=7, plan=plan, run={})
    own = checkpoint.encode(checkpoint.Checkpoint(header=header, tensors={"losses": np.zeros(3)}))
    (tmp_path / "checkpoint-3.safetensors").write_bytes(own)
    writable(tmp_path, folders=("checkpoints",), flag="--checkpoint")
    (tmp_path / "checkpoint-2.safetensors").write_bytes(FOREIGN["checkpoint-5.safetensors"])
    with pytest.raises(ConfigError, match=r"cannot write --checkpoint .*it holds checkpoint-2"):
        writable(tmp_path, folders=("checkpoints",), flag="--checkpoint")


def test_pages_and_plots_of_dpsim_s_own_are_written_again(
    dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[2] / "reports" / "example"
    machine = OF_COMMAND["calibrate --show"]
    for words, again in (
        (("predict", "--page", "page.html"), lambda: writable(Path("page.html"), "page")),
        (("report", example, "--output", "r", "--format", "html"), lambda: writable(Path("r"), folders=("report",))),
        (("report", example, "--output", "m", "--format", "md"), lambda: writable(Path("m"), folders=("report",))),
        (("report", example, "--trace"), lambda: writable(Path("trace.json"), "trace")),
        (("calibrate", "--compare", f"{machine},{machine}", "--plot", "plot.svg"), lambda: drawable(Path("plot.svg"))),
        (("calibrate", "--compare", f"{machine},{machine}", "--plot", "plot.png"), lambda: drawable(Path("plot.png"))),
    ):
        code, _, err = dpsim(*words)
        assert code == 0, (words, err)
        again()
