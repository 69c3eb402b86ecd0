"""Runs a user's own Python script, or a module of a package, as ``python`` would. Loads the standard library alone."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from dpsim.errors import ConfigError, is_missing


def is_module(program: str) -> bool:
    """Return whether ``program`` is the name of a module, such as ``pack.train``, and no path of a script."""
    return not program.endswith(".py") and all(map(str.isidentifier, program.split(".")))


def module_name(script: str) -> str:
    """Return the module name of a script in the current folder; ``PACKAGE.MODULE`` where that is not known."""
    path = Path(os.path.relpath(script)).with_suffix("")
    return ".".join(path.parts) if all(map(str.isidentifier, path.parts)) else "PACKAGE.MODULE"


def check_script(path: str) -> None:
    """Raise ``ConfigError`` unless ``path`` is an existing Python script."""
    if not path.endswith(".py") or not Path(path).is_file():
        missing = "it is a folder" if Path(path).is_dir() else "there is no such file"
        reason = missing if path.endswith(".py") else "it does not end in .py"
        raise ConfigError(f"cannot run {path!r}: {reason}", allowed="the path of a Python script")


def check_program(program: str) -> None:
    """Raise ``ConfigError`` unless ``program`` is an existing Python script, or may name a module."""
    if not is_module(program):
        check_script(program)


def run_as_main(program: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, and a module as ``python -m MODULE ARGUMENTS``.

    Raises ``ConfigError`` where there is no such module.
    """
    sys.argv = [program, *arguments]
    if not is_module(program):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        return
    sys.path.insert(0, os.getcwd())
    try:
        exists = importlib.util.find_spec(program) is not None  # imports the packages around the module
    except ModuleNotFoundError as error:
        if not is_missing(program, error):
            raise
        exists = False
    if not exists:
        raise ConfigError(
            f"there is no module {program!r}",
            allowed="a module that Python can import here",
            remedy="start dpsim in the folder that has its package, or install the package",
        )
    runpy.run_module(program, run_name="__main__", alter_sys=True)
