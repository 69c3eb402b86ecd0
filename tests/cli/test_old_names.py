"""Commands of earlier versions answer with the line to type today, which this version understands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

import pytest

from dpsim.cli import app, old_names

Dpsim = Callable[..., tuple[int, str, str]]
LINES = [
    (
        "estimate --rows a.csv --overlap off --fusion-threshold=1MiB --row devices=1,step_s=2s",
        "dpsim profile --from-steps a.csv --set overlap=off --set fusion_threshold_bytes=1MiB"
        " --from-steps devices=1,step_s=2s",
    ),
    ("machine list", "dpsim calibrate --list"),
    ("machine show m.json --plot m.svg", "dpsim calibrate --show m.json --plot m.svg"),
    ("machine compare old.json 'new 2.json' --json", "dpsim calibrate --compare 'old.json,new 2.json' --json"),
    ("machine merge a.json b.json --output c.json", "dpsim calibrate --merge a.json,b.json --output c.json"),
    (
        "advise --workload w --machine m --devices 4 --json",
        "dpsim predict --workload w --machine m --devices 4 --json --rank strategy",
    ),
    ("explore", "dpsim predict --page explore.html"),
    ("explore --machine 25gbe --output 'my page.html'", "dpsim predict --machine 25gbe --page 'my page.html'"),
    ("explore reports/strategies", "dpsim report reports/strategies --page explore.html"),
    (
        "measure --torch-script t.py --bucket-cap=0,inf --communication gloo -- --bucket-cap 3",
        "dpsim sweep --torch-script t.py --fusion-threshold=0,inf --algorithm gloo -- --bucket-cap 3",
    ),
    ("launch slurm --devices 2 -- trace x", "dpsim report x --trace"),
    ("compare a b --label one,two", "dpsim report a b --label one,two"),
    ("trace 'my sweep' --devices 2", "dpsim report 'my sweep' --set devices=2 --trace"),
]


FLAGS = [
    (
        "predict --workload w --overlap poll,off --leaves=4",
        "predict --workload w --set overlap=poll,off --set leaves=4",
    ),
    ("predict --contention 2 --cycle 5ms", "predict --assume contention=2 --set cycle_s=5ms"),
    ("train --nesterov --momentum 0.8", "train --set nesterov=yes --set momentum=0.8"),
    (
        "sweep --torch-module a.b --runtime dpsim -- --runtime x",
        "sweep --torch-script a.b --set runtime=dpsim -- --runtime x",
    ),
    ("reproduce --global-batch 24", "reproduce --set global_batch=24"),
]


@pytest.mark.parametrize(("old", "new"), FLAGS)
def test_an_old_flag_answers_with_the_line_to_type(old: str, new: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim(*old.split())
    assert (code, out) == (2, "") and "another spelling in this version" in err
    assert err.endswith(f"to do:   type: dpsim {new}\n")


@pytest.mark.parametrize(("old", "new"), LINES)
def test_an_old_command_answers_with_the_line_to_type(old: str, new: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim(*shlex.split(old))
    assert (code, out) == (2, "")
    assert "has another name in this version" in err and "allowed: " in err
    assert err.endswith(f"to do:   type: {new}\n")


@pytest.mark.parametrize("command", ["explain", "watch"])
def test_a_job_runs_to_its_own_exit_code_under_both_names(command: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim(command, "--steps", "9", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert (code, out) == (7, "") and "nothing was learned of the job" in err
    line = f"another name in this version: dpsim explain --steps 9 -- {sys.executable} -c 'raise SystemExit(7)'"
    assert (line in err) == (command == "watch")


def test_every_new_line_begins_with_a_command_of_this_version() -> None:
    commands = list(app.build())
    lines = [line.split() for line in old_names.NEW_LINES.values()]
    assert all(words[1] in commands or words[:2] == ["python", "-m"] for words in lines)


@pytest.mark.parametrize("word", ["", " "])
def test_a_word_without_letters_is_an_unknown_command(dpsim: Dpsim, word: str) -> None:
    code, out, err = dpsim(word, "--devices", "2")
    assert (code, out) == (2, "") and f"unknown command {word!r}" in err
