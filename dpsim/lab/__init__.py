"""The lab: notebooks for a class, each with its solutions beside it. They are read and run without Jupyter.

A notebook is a JSON file (nbformat 4). Its metadata say, under ``dpsim``, which lesson of the class it is, what
it shows in a sentence, and how many seconds it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpsim.errors import ConfigError, unknown

_FOLDER = Path(__file__).parent
LONG = "long"
"""The tag of cells that start ranks or train for seconds."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a notebook: ``kind`` is ``code`` or ``markdown``."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Notebook:
    """A notebook of the lab: its name, a sentence on what it shows, the seconds that it runs, and its cells."""

    name: str
    lesson: int
    sentence: str
    seconds: int
    cells: tuple[Cell, ...]

    @property
    def file(self) -> Path:
        """The notebook, in the package."""
        return _FOLDER / f"{self.name}.ipynb"

    @property
    def solutions(self) -> Path:
        """Its solutions, in the package: Markdown, with Python that goes on from its last cell."""
        return _FOLDER / f"{self.name}-solutions.md"

    def script(self) -> str:
        """Return a program of all its code, with its text as comments, in cells that editors know (``# %%``)."""
        return "\n\n".join(_as_script(cell) for cell in self.cells) + "\n"

    def copy(self, folder: Path) -> tuple[Path, Path]:
        """Write the notebook, and the same as a script, into a folder. Raises ``ConfigError`` rather than replace."""
        paths = folder / f"{self.name}.ipynb", folder / f"{self.name}.py"
        for path in paths:
            if path.exists():
                raise ConfigError(
                    f"{path} exists, and may hold your answers",
                    allowed="a folder without it",
                    remedy="choose another folder with --output, or move the file away",
                )
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (self.file.read_text(encoding="utf-8"), self.script()), strict=True):
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        return paths


def notebooks() -> Mapping[str, Notebook]:
    """Return the notebooks of the lab by name, in the order of the class."""
    read = sorted((_read(path) for path in _FOLDER.glob("*.ipynb")), key=lambda notebook: notebook.lesson)
    return {notebook.name: notebook for notebook in read}


def find(name: str) -> Notebook:
    """Return the notebook of this name. Raises ``ConfigError``."""
    known = notebooks()
    if name not in known:
        raise unknown("notebook", name, known, remedy="python -m dpsim.lab lists them")
    return known[name]


def _read(path: Path) -> Notebook:
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = (
        Cell(
            kind=cell["cell_type"],
            source="".join(cell["source"]),
            tags=tuple(cell["metadata"].get("tags", ())),
        )
        for cell in content["cells"]
    )
    return Notebook(name=path.stem, cells=tuple(cells), **content["metadata"]["dpsim"])


def _as_script(cell: Cell) -> str:
    if cell.kind == "code":
        return f"# %%\n{cell.source}"
    return "\n".join(["# %% [markdown]", *(f"# {line}".rstrip() for line in cell.source.split("\n"))])
