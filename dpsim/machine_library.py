"""The links and machines that come with dpsim, by name: each a machine file with its source, its date and its doubt."""

from __future__ import annotations

import re
from pathlib import Path

from dpsim.errors import ConfigError, unknown

_FOLDER = Path(__file__).parent / "machines"


def library() -> dict[str, Path]:
    """Return the files by their names, in the order of the numbers in these: ``25gbe`` before ``100gbe-roce``."""
    paths = sorted(_FOLDER.glob("*.toml"), key=lambda path: [part.zfill(6) for part in re.split(r"(\d+)", path.stem)])
    return {path.stem: path for path in paths}


def files_of(path: Path | str) -> list[Path]:
    """Return the files that a machine is read from: its own, or those of the names that are joined by ``+``.

    What has a suffix, a folder or is there is a file. Raises ``ConfigError`` for other names than those of the library.
    """
    path, machines = Path(path), library()
    if path.suffix or len(path.parts) != 1 or path.exists():
        return [path]
    names = path.name.split("+")
    for name in names:
        if name not in machines:
            raise unknown("machine", name, machines, remedy="give one of these, or a machine file that exists")
    if len(names) > 2:
        raise ConfigError(f"machines {path.name}", allowed="one, or the one inside nodes and the one between them: a+b")
    return [machines[name] for name in names]
