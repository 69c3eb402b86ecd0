"""Runs a user's own Python script, a module of a package, or a function of a file. Loads the standard library alone."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from dpsim.errors import ConfigError, is_missing

FUNCTION = "::"
"""Between the path of a Python file and the name of a function in it, as pytest writes them."""
PATH_VARIABLE = "DPSIM_FUNCTION_PATH"
"""The environment variable with more folders from which a function's file imports, as ``PYTHONPATH`` lists them."""


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
    """Raise ``ConfigError`` unless ``program`` is an existing Python script, or may name a module or a function."""
    path, _, function = program.partition(FUNCTION)
    if FUNCTION in program and not function.isidentifier():
        raise ConfigError(
            f"{program}: {function!r} cannot be called by name",
            allowed="FILE.py::FUNCTION, a function at the top level of the file",
            remedy="give the training loop a def of its own there",
        )
    if not is_module(program):
        check_script(path)


def main_module(program: str) -> str:
    """Return the name of the module whose code is the program: ``__main__``, or that of the file of a function."""
    if FUNCTION not in program:
        return "__main__"
    path = Path(program.partition(FUNCTION)[0]).absolute()
    return ".".join([*path.relative_to(_import_folder(path)).parent.parts, path.stem])


def _import_folder(path: Path) -> Path:
    """Return the folder from which a file is imported: that of the file, or the one that holds its packages."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def run_as_main(program: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, and a module as ``python -m MODULE ARGUMENTS``.

    A function, ``FILE.py::FUNCTION``, is called without arguments once its file has been imported. Raises
    ``ConfigError`` where there is no such module or function.
    """
    sys.argv = [program, *arguments]
    if FUNCTION in program:
        _call(program)
        return
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


def _call(program: str) -> None:
    """Import the file of a function by its name, so that it can be pickled, and call the function.

    Raises ``ConfigError``.
    """
    file, _, name = program.partition(FUNCTION)
    sys.path[:0] = [str(_import_folder(Path(file).absolute())), os.getcwd()]
    sys.path += os.environ.get(PATH_VARIABLE, "").split(os.pathsep)
    function = getattr(importlib.import_module(main_module(program)), name, None)
    if not callable(function):
        raise ConfigError(
            f"{file} has no function {name!r} at its top level",
            allowed="the name of a function that the file defines when it is imported",
            remedy="move the training loop there",
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"{program}: {error}",
            allowed="a function that is called without arguments",
            remedy="give its parameters defaults",
        ) from error
    function()
