"""The files of a user beside which dpsim runs: whatever happens, none is changed, replaced or removed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

NOTES = ("notes.txt", "data/best.pt", "reports/index.html")
"""Files that no command has to do with, though dpsim writes some of these names elsewhere."""


def add_notes(folder: Path) -> None:
    """Write the files of ``NOTES``."""
    for name in NOTES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"what I wrote in {name}\n", encoding="utf-8")


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, by its relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changes(before: Mapping[str, str], folder: Path, outputs: Collection[str] = ()) -> str:
    """Say which files of ``before`` are not what they were, but for those in ``outputs``; empty if none."""
    now = contents(folder)
    kept = {name: digest for name, digest in before.items() if not {name, name.partition("/")[0]} & {*outputs}}
    removed = sorted(name for name in kept if name not in now)
    changed = sorted(name for name, digest in kept.items() if now.get(name, digest) != digest)
    told = (("removed", removed), ("changed", changed))
    return "; ".join(f"{what} of the user's files: {', '.join(names)}" for what, names in told if names)
