"""The version of dpsim, where this copy of it is imported from, and how its optional packages are installed."""

from __future__ import annotations

import os
import shlex
import sysconfig
from pathlib import Path

VERSION = "0.1.0"
DISTRIBUTION = "dpsim-train"
"""The name of what pip installs. The package index has another program named dpsim, a simulator of power systems."""
INDEX: str | None = None
"""What a package index calls dpsim: nothing, as long as nobody has published it there."""


def checkout() -> Path | None:
    """Return the root of the checkout that dpsim is imported from; other processes need it on PYTHONPATH.

    None where dpsim is installed in site-packages: there every process of this Python finds it.
    """
    root = Path(__file__).resolve().parents[1]
    return None if root == _site_packages() else root


def install(extra: str) -> str:
    """The command that installs an optional group of packages, such as ``mpich``, beside this copy of dpsim.

    Outside of a checkout it names the packages themselves, unless an index has dpsim.
    """
    if checkout() is not None:
        return f"pip install -e '.[{extra}]'"
    if INDEX is not None:
        return f"pip install '{INDEX}[{extra}]'"
    from importlib.metadata import requires  # slow to load, and seldom needed

    lines = [line.partition(";") for line in requires(DISTRIBUTION) or ()]
    packages = [name.strip() for name, _, marker in lines if f"extra == '{extra}'" in marker.replace('"', "'")]
    return shlex.join(["pip", "install", *packages])


def other_program(folder: Path | None = None) -> str:
    """The name and version of the other program named dpsim, if ``folder`` (site-packages) has it; else nothing.

    Both have a package ``dpsim``, so that pip wrote the files of one over those of the other. What dpsim was called
    before it had a name of its own is no other program: its command is the same.
    """
    folder = folder or _site_packages()
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith("dpsim-") and name.endswith(".dist-info"):
            commands = folder / name / "entry_points.txt"
            if not (commands.is_file() and "dpsim.cli:main" in commands.read_text()):
                return name.removesuffix(".dist-info")
    return ""


def without_other_program() -> str:
    """The two commands that leave this dpsim alone in its environment."""
    again = "-e ." if checkout() is not None else "and the file that dpsim was installed from"
    return f"pip uninstall dpsim, then pip install --force-reinstall --no-deps {again}"


def _site_packages() -> Path:
    return Path(sysconfig.get_path("purelib")).resolve()


def check_torch(what: str) -> None:
    """Raise ``ConfigError`` where PyTorch is not installed, which ``what`` needs."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        from dpsim.errors import ConfigError

        raise ConfigError(
            f"{what} without PyTorch, which is not installed",
            allowed="PyTorch 2.4 or newer; its CPU build is enough on processors",
            remedy=install("torch"),
        ) from error
