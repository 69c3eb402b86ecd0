"""Runs gpu_check on what a machine's own Python has, and on a folder of wheels for the rest. It needs no network.

``PYTHON experiments/gpu_check/machine_python.py VENV [--wheels FOLDER] [-- ARGUMENTS OF gpu_check]``

VENV becomes an environment without packages of its own, in which the packages of PYTHON are found as well. Wheels are
installed into it, never into PYTHON. It is made once: a later call with the same Python and wheels uses it as it is, so
that all tasks of ``srun`` can make this call. It runs before anything is installed: it imports the standard library
alone.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
LINK = "packages_of_the_machine.pth"
_STAMP = "made_from.json"
_LIBRARIES = ("libmpi.so*", "libmpi_abi.so*")

NEEDED = ("msgspec", "numba", "numpy", "psutil", "threadpoolctl")
"""The packages without which gpu_check does not start. It probes by itself for those that only parts of it need."""


def package_folders(path: list[str]) -> list[str]:
    """Return the folders of ``path`` (this Python's ``sys.path``) into which packages are installed."""
    return [entry for entry in path if Path(entry).name in ("site-packages", "dist-packages") and Path(entry).is_dir()]


def make(venv: Path, wheels: Path | None) -> None:
    """Make the environment, unless it was made from the same things. Raises ``SystemExit`` with a message."""
    files = [] if wheels is None else sorted(wheels.glob("*.whl"))
    if wheels is not None and not files:
        _fail(f"there is no wheel in {wheels}", "give a folder of .whl files: WHEELS=FOLDER")
    made_from = {
        "python": [sys.executable, sys.version, *package_folders(sys.path)],
        "wheels": [[file.name, file.stat().st_size, file.stat().st_mtime] for file in files],
    }
    stamp = venv / _STAMP
    venv.parent.mkdir(parents=True, exist_ok=True)
    with (venv.parent / f"{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tasks of srun call this at the same moment
        if stamp.is_file() and stamp.read_text() == json.dumps(made_from):
            return
        _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(venv)], "install the module venv")
        (_own_packages(venv) / LINK).write_text(link(package_folders(sys.path)))
        if files:
            install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(_python(venv))]
            options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
            _run([*install, "install", *options, *map(str, files)], f"{sys.executable} needs pip 22.3 or newer")
        stamp.write_text(json.dumps(made_from))


def link(folders: list[str]) -> str:
    """Return the lines of a .pth file with which a Python finds what is installed in ``folders``.

    CUDA's libraries are no modules: cuda-pathfinder looks for them in ``site.getsitepackages()`` alone.
    """
    listed = f"lambda prefixes=None, own=site.getsitepackages: [*own(prefixes), *{folders!r}]"
    lines = [f"site.getsitepackages = {listed}", *(f"site.addsitedir({folder!r})" for folder in folders)]
    return "".join(f"import site; {line}\n" for line in lines)


def missing(venv: Path) -> list[str]:
    """Return the packages of ``NEEDED`` that the environment does not have."""
    folders = [str(_own_packages(venv)), *package_folders(sys.path)]
    names = (each.metadata["Name"] or "" for each in metadata.distributions(path=folders))
    present = {name.lower().replace("_", "-").replace(".", "-") for name in names}
    return [name for name in NEEDED if name not in present]


def environment(venv: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's variables for the check, with this checkout and the machine's MPI added to its paths."""
    added = dict(variables)
    _extend(added, "PYTHONPATH", str(ROOT), first=True)
    _extend(added, "PATH", str(Path(sys.executable).parent), first=False)  # an mpiexec beside the machine's Python
    libraries = Path(sys.prefix) / "lib"
    own = any(any((venv / "lib").glob(pattern)) for pattern in _LIBRARIES)
    if not own and sys.prefix not in ("/usr", sys.base_prefix) and any(map(any, map(libraries.glob, _LIBRARIES))):
        _extend(added, "LD_LIBRARY_PATH", str(libraries), first=False)
    return added


def _extend(variables: dict[str, str], name: str, folder: str, *, first: bool) -> None:
    present = [entry for entry in variables.get(name, "").split(os.pathsep) if entry and entry != folder]
    variables[name] = os.pathsep.join([folder, *present] if first else [*present, folder])


def main(arguments: list[str], execute: Callable[[str, list[str], dict[str, str]], object] = os.execve) -> None:
    """Make the environment, and become gpu_check in it."""
    usage = "PYTHON machine_python.py VENV [--wheels FOLDER] [-- ARGUMENTS OF gpu_check]"
    parser = argparse.ArgumentParser(prog="machine_python", usage=usage, description=__doc__)
    parser.add_argument("venv", type=Path, metavar="VENV")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of what this Python does not have")
    end = [*arguments, "--"].index("--")  # argparse refuses options after positional ones there
    options, passed_on = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if options.wheels is not None and not options.wheels.is_dir():
        _fail(f"{options.wheels} is no folder", "give a folder of .whl files: WHEELS=FOLDER")
    make(options.venv, options.wheels)
    if absent := missing(options.venv):
        download = f"python3 -m pip download --only-binary=:all: --no-deps -d FOLDER {' '.join(absent)}"
        version = ".".join(map(str, sys.version_info[:2]))
        _fail(
            f"{sys.executable} has no {', '.join(absent)}, and neither has the folder of wheels",
            f"on a machine with a network and Python {version}, {download}; then add WHEELS=FOLDER",
        )
    python = str(_python(options.venv))
    command = [python, "-m", "dpsim.experiments.gpu_check", *passed_on]
    sys.stdout.flush()
    execute(python, command, environment(options.venv, os.environ))


def _python(venv: Path) -> Path:
    return venv.absolute() / "bin" / "python"


def _own_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _run(command: list[str], remedy: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it printed nothing"]
        _fail(f"{' '.join(command[:4])} ... ended with exit code {done.returncode}: {last[0]}", remedy)


def _fail(given: str, remedy: str) -> NoReturn:
    print(f"gpu-check: {given}\n  to do:   {remedy}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
