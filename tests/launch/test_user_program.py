"""A script, a module or a function as the program that ranks run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch.user_program import check_program, main_module, run_as_main

TRAIN = """
import sys
from train_constants import SUM
ran = []
def train(times=2):
    ran.append((SUM, sys.argv))
THREE = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file that trains, and a folder of its own from which it imports."""
    for name, text in {
        "pack/__init__.py": "",
        "pack/train.py": TRAIN,
        "more/train_constants.py": "SUM = 5\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("DPSIM_FUNCTION_PATH", str(tmp_path / "more"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    for name in ("pack", "pack.train", "train_constants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_imported_by_the_name_of_its_package_and_called(package: Path) -> None:
    program = "pack/train.py::train"
    check_program(program)
    assert main_module(program) == "pack.train" and main_module("pack/train.py") == "__main__"
    run_as_main(program, ["--lr", "1"])
    assert importlib.import_module("pack.train").ran == [(5, [program, "--lr", "1"])]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pack/train.py::a.b", "'a.b' cannot be called by name"),
        ("pack/nowhere.py::train", "there is no such file"),
        ("pack/train.py::nothing", "has no function 'nothing' at its top level"),
        ("pack/train.py::THREE", "has no function 'THREE' at its top level"),
        ("pack/train.py::needs", "missing a required argument: 'rank'"),
    ],
)
def test_what_is_no_function_is_refused(program: str, words: str, package: Path) -> None:
    (package / "pack" / "train.py").write_text(TRAIN + "def needs(rank): ...\n")
    with pytest.raises(ConfigError, match=words):
        check_program(program)
        run_as_main(program, [])
