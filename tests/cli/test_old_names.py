"""Commands of earlier versions answer with the line to type today, which this version understands."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from dpsim.cli import app, old_names

Dpsim = Callable[..., tuple[int, str, str]]
LINES = [
    ("compare a b --label one,two", "dpsim report a b --label one,two"),
    ("trace 'my sweep' --devices 2", "dpsim report 'my sweep' --devices 2 --trace"),
]


@pytest.mark.parametrize(("old", "new"), LINES)
def test_an_old_command_answers_with_the_line_to_type(old: str, new: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim(*shlex.split(old))
    assert (code, out) == (2, "")
    assert "has another name in this version" in err and "allowed: " in err
    assert err.endswith(f"to do:   type: {new}\n")


def test_every_new_line_begins_with_a_command_of_this_version() -> None:
    commands = list(app.build())
    lines = [line.split() for line in old_names.NEW_LINES.values()]
    assert all(words[1] in commands or words[:2] == ["python", "-m"] for words in lines)
