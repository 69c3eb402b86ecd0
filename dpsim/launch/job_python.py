"""The Python of the environment in which a user's job runs, which may be another one than dpsim's."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dpsim.errors import ConfigError
from dpsim.installation import install

LEAST_TORCH = (2, 4)
_ANSWER = "dpsim asked: "
_QUESTION = f"""
import sys
del sys.path[0]
import importlib.util, json, os, platform, re
spec = importlib.util.find_spec("torch")
torch = "" if spec is None else "unknown"
for folder in (spec.submodule_search_locations or []) if spec else []:
    with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
        torch = re.search("__version__ *= *['\\"]([^'\\"]*)", file.read()).group(1)
print({_ANSWER!r} + json.dumps([platform.python_version(), torch]))
"""
"""Finds PyTorch without importing it, which takes seconds."""
_LONGEST_S = 60.0


class JobPython(NamedTuple):
    """A Python by its path, its version, and that of the PyTorch which it finds (empty: none)."""

    path: str
    version: str
    torch: str

    @property
    def is_own(self) -> bool:
        """Whether it is the Python that runs dpsim."""
        return self.path == sys.executable

    def tell(self, script: str) -> None:
        """Say on stderr what ``script`` runs with, unless it is dpsim's own Python."""
        if not self.is_own:
            versions = f"Python {self.version}, PyTorch {self.torch}"
            print(f"dpsim: {script} runs with {self.path} ({versions})", file=sys.stderr, flush=True)

    def environment(self) -> dict[str, str]:
        """Return the variables of its processes: those of this process, without what is of dpsim's environment."""
        return dict(os.environ) if self.is_own else _without_own(dict(os.environ))


OWN = JobPython(sys.executable, "", "")
"""dpsim's own Python, which was not asked for its versions."""
_OWN_FOLDER = os.path.dirname(sys.executable)


def job_environment(program: str) -> dict[str, str]:
    """Return the variables of a job that is started as it is: of the active environment, if that is not dpsim's.

    Tools that run dpsim in an environment of its own put its programs first on PATH, and ``python`` would be that one.
    Where the job's ``program`` is among those alone, the variables stay as they are.
    """
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    others = _without_own(dict(os.environ))
    is_there = shutil.which(program, path=others["PATH"]) is not None
    return others if active and not _same(active, sys.prefix) and is_there else dict(os.environ)


def _without_own(variables: dict[str, str]) -> dict[str, str]:
    """Return these variables without what dpsim's environment puts into them."""
    folders = variables.get("PATH", "").split(os.pathsep)
    others = {"PATH": os.pathsep.join(each for each in folders if not _same(each, _OWN_FOLDER))}
    own = {"VIRTUAL_ENV"} if _same(variables.get("VIRTUAL_ENV", ""), sys.prefix) else set()
    return {name: value for name, value in (variables | others).items() if name not in own}


def job_python(named: str | None = None) -> JobPython:
    """Return the Python that a job's PyTorch script runs with.

    That is the one that was ``named``; else that of the active environment, ``$VIRTUAL_ENV`` or ``$CONDA_PREFIX``, if
    it has PyTorch; else the one beside the first ``torchrun`` on PATH that is not dpsim's own; else dpsim's. Raises
    ``ConfigError`` where it has no PyTorch, or one that is too old.
    """
    if named is not None:
        python = _asked(_path_of(named))
        if not python.torch:
            raise ConfigError(
                f"--python {named} is Python {python.version} without PyTorch",
                allowed="the Python of the environment in which the script trains",
                remedy="name that one, or install PyTorch there",
            )
        return _checked(python, f"--python {named}")
    for path in _candidates():
        python = _asked(path)
        if python.torch:
            return _checked(python, path)
    raise ConfigError(
        "PyTorch is neither installed beside dpsim nor in an active environment",
        allowed="PyTorch 2.4 or newer, for --torch-script and --torch alone",
        remedy="activate the environment in which the script trains, or name its Python by --python PATH; or"
        f" {install('torch')}, beside dpsim",
    )


def _checked(python: JobPython, name: str) -> JobPython:
    numbers = python.torch.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < LEAST_TORCH:
        raise ConfigError(
            f"{name} has PyTorch {python.torch}",
            allowed=f"PyTorch {'.'.join(map(str, LEAST_TORCH))} or newer",
            remedy="install a newer one there, or name another Python by --python PATH",
        )
    return python


def _candidates() -> Iterator[str]:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := os.environ.get(variable):
            path = Path(folder) / "bin" / "python"
            if _same(path.parent, _OWN_FOLDER):
                yield sys.executable
            elif path.is_file():
                yield str(path)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        python = Path(folder) / "python3"
        if folder and not _same(folder, _OWN_FOLDER) and (Path(folder) / "torchrun").is_file() and python.is_file():
            yield str(python)
            break
    yield sys.executable


def _path_of(named: str) -> str:
    path = shutil.which(os.path.expanduser(named))
    if path is None:
        raise ConfigError(
            f"--python {named}: there is no such program",
            allowed="the path of a Python, such as .venv/bin/python",
            remedy="correct the path",
        )
    return sys.executable if _same(os.path.dirname(path), _OWN_FOLDER) else path


@functools.cache
def _asked(path: str) -> JobPython:
    """Ask a Python for its version and PyTorch's. Raises ``ConfigError`` for what does not answer as a Python does."""
    try:
        done = subprocess.run(
            [path, "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
        output, reason = done.stdout, f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:  # OSError: also a program for another architecture
        output, reason = "", getattr(error, "strerror", None) or str(error)
    answers = [line.removeprefix(_ANSWER) for line in output.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        raise ConfigError(
            f"{path} does not run as Python does: {reason}",
            allowed="a Python for this machine's processor, 3.9 or newer",
            remedy="name the Python of the environment in which the script trains by --python PATH",
        )
    version, torch = json.loads(answers[-1])
    return JobPython(path, version, torch)


def _same(one: str | Path, other: str | Path) -> bool:
    return bool(one) and os.path.realpath(one) == os.path.realpath(other)
