"""The notebooks of the lab: their cells run without Jupyter, and ``python -m dpsim.lab`` copies them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from python_path import extended_path

from dpsim import lab
from dpsim.lab.__main__ import build
from dpsim.launch import child_process

Dpsim = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
NOTEBOOKS = lab.notebooks()
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(cells: Iterable[str], folder: Path, timeout_s: float) -> str:
    """Run the cells in one namespace, in a process of its own in ``folder``, and return what they print."""
    program = folder / "cells.py"
    program.write_text("\n".join(cells), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": extended_path(ROOT)}
    done = child_process.run([sys.executable, program.name], env=env, cwd=folder, timeout_s=timeout_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def code(notebook: lab.Notebook) -> list[lab.Cell]:
    return [cell for cell in notebook.cells if cell.kind == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_the_first_cells_of_a_notebook_run(notebook: lab.Notebook, tmp_path: Path) -> None:
    cells = code(notebook)
    long = [number for number, cell in enumerate(cells) if lab.LONG in cell.tags]
    assert long and long[0] >= 2, "two quick cells or more come first, and then one that measures"
    assert run([cell.source for cell in cells[: long[0]]], tmp_path, 60)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_all_cells_of_a_notebook_and_its_solutions_run(notebook: lab.Notebook, tmp_path: Path) -> None:
    solutions = _PYTHON.findall(notebook.solutions.read_text(encoding="utf-8"))
    assert solutions
    assert run([*(cell.source for cell in code(notebook)), *solutions], tmp_path, 600)


@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_a_notebook_is_small_without_outputs_and_as_jupyter_writes_it(notebook: lab.Notebook) -> None:
    text = notebook.file.read_text(encoding="utf-8")
    content = json.loads(text)
    assert text == json.dumps(content, indent=1, ensure_ascii=False) + "\n" and len(text) < 30_000
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    stored = {(cell["execution_count"], *cell["outputs"]) for cell in content["cells"] if cell["cell_type"] == "code"}
    assert stored == {(None,)}
    assert notebook.seconds < 60
    questions = next(cell.source for cell in notebook.cells if cell.source.startswith("## Questions"))
    numbers = re.findall(r"^(\d)\. ", questions, re.MULTILINE)
    assert numbers == re.findall(r"^\*\*(\d)\. ", notebook.solutions.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_the_script_has_the_cells_of_the_notebook(notebook: lab.Notebook) -> None:
    script = notebook.script()
    compile(script, notebook.name, "exec")
    assert [part.partition("\n")[0] for part in script.split("# %%")[1:]] == [
        "" if cell.kind == "code" else " [markdown]" for cell in notebook.cells
    ]
    assert all(cell.source in script for cell in code(notebook))


def test_all_notebooks_are_listed_in_the_order_of_the_class(dpsim: Dpsim) -> None:
    code, out, _ = dpsim(application=build())
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[: len(NOTEBOOKS)]] == list(NOTEBOOKS)
    assert [notebook.lesson for notebook in NOTEBOOKS.values()] == [*range(1, len(NOTEBOOKS) + 1)]
    assert all(notebook.sentence in out for notebook in NOTEBOOKS.values())


def test_a_notebook_is_copied_and_never_replaced(dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, _ = dpsim("gradient-descent", "--output", tmp_path / "new", application=build())
    notebook, script = (tmp_path / "new" / f"gradient-descent.{kind}" for kind in ("ipynb", "py"))
    assert code == 0 and all(f"{path}" in out for path in (notebook, script))
    assert str(NOTEBOOKS["gradient-descent"].solutions) in out
    assert notebook.read_bytes() == NOTEBOOKS["gradient-descent"].file.read_bytes()
    notebook.unlink()
    script.write_text("# my answers")
    code, _, err = dpsim("gradient-descent", "--output", tmp_path / "new", application=build())
    assert code == 2 and f"{script} exists" in err
    assert script.read_text() == "# my answers" and not notebook.exists()


def test_an_unknown_notebook_and_a_folder_that_is_a_file_are_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("gradient-decent", "--output", tmp_path, application=build())
    assert code == 2 and "did you mean 'gradient-descent'?" in err and not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    code, _, err = dpsim("gradient-descent", "--output", tmp_path / "file", application=build())
    assert code == 2 and f"{tmp_path / 'file'}" in err


def test_what_was_copied_is_told_to_programs(dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, _ = dpsim("scaling", "--output", tmp_path, "--json", application=build())
    shown = json.loads(out)
    assert code == 0 and [point["name"] for point in shown["points"]] == ["scaling"]
    assert shown["summary"]["files"] == [str(tmp_path / f"scaling.{kind}") for kind in ("ipynb", "py")]
