"""What a script prints is shown once where it is repeated, and whole where the script fails."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch import script_output
from dpsim.launch.script_output import ScriptOutput, shown_once, written


@pytest.fixture(autouse=True)
def nothing_shown() -> Iterator[None]:
    script_output._shown.clear()
    yield
    script_output._shown.clear()


def test_lines_that_differ_by_numbers_are_shown_once_over_all_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for run in range(3):
        output = ScriptOutput()
        for line in (f"12:0{run} INFO loading", f"step {run}: loss 0.{run}", "", "done"):
            output.add(line)
    assert capsys.readouterr().err == "script: 12:00 INFO loading\nscript: step 0: loss 0.0\nscript: done\n"


def test_a_run_that_fails_shows_all_it_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), shown_once() as output:
        with written(tmp_path, output) as file:
            file.write(b"step 1\nstep 2\n\xffbroken\n")
        raise ConfigError("it ended")
    assert capsys.readouterr().err.endswith("step 1\nstep 2\n\ufffdbroken\n")


def test_a_run_that_succeeds_shows_nothing_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with shown_once() as output, written(tmp_path, output) as file:
        file.write(b"step 1\nstep 2\n")
    assert capsys.readouterr().err == "script: step 1\n"


def test_lines_are_shown_while_the_script_runs(tmp_path: Path) -> None:
    shown: queue.Queue[str] = queue.Queue()
    output = ScriptOutput()
    output.add = shown.put  # type: ignore[method-assign]
    with written(tmp_path, output) as file:
        file.write(b"step 1\nste")
        file.flush()
        assert shown.get(timeout=60) == "step 1"
        file.write(b"p 2\nend")
    assert [shown.get(timeout=60) for _ in range(2)] == ["step 2", "end"] and shown.empty()
