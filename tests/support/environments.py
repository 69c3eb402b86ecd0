"""Environments of jobs, made on the spot: a Python with PyTorch that has nothing of what dpsim needs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def with_torch(folder: Path) -> Path:
    """Make an environment that has PyTorch and what it needs, as links to those of the tests; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in _needed("torch", set()):
        root = Path(str(distribution.locate_file("")))
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(root / name)
    (folder / "bin" / "torchrun").write_text(
        f"#!{folder}/bin/python\nfrom torch.distributed.run import main\nmain()\n", encoding="utf-8"
    )
    (folder / "bin" / "torchrun").chmod(0o755)
    return folder / "bin" / "python"


def _needed(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """The distribution of this name and all that it requires, as far as they are installed."""
    if name in seen:
        return
    seen.add(name)
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    yield distribution
    for line in distribution.requires or ():
        if "extra ==" not in line:
            yield from _needed(re.split(r"[^\w.-]", line)[0], seen)


def install(folder: Path, *requirements: str, needed: bool = False) -> str:
    """Install packages into an environment, and what they need; returns what pip says where that is not possible.

    Without ``needed`` they get nothing that they need.
    """
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-compile"]
    command += [*([] if needed else ["--no-deps"]), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.stderr.strip() if done.returncode else ""
