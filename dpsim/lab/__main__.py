"""``python -m dpsim.lab``: the notebooks of a class."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dpsim.cli import flags, main, show
from dpsim.cli.app import single

EXAMPLES = """\
Examples:
  python -m dpsim.lab
  python -m dpsim.lab gradient-descent --output class"""


def lab(
    name: Annotated[str | None, Parameter(help="The notebook to copy; without a name, all are listed.")] = None,
    /,
    *,
    output: Annotated[Path, Parameter(help="Folder for the notebook; nothing in it is replaced.")] = Path("."),
    json: flags.Json = False,
) -> None:
    """List the notebooks of a class in data-parallel training, or copy one.

    Each has theory, code and questions, and runs in less than a minute on 2
    cores. Its solutions stay in the package.
    """
    from dpsim import lab as room

    chosen = list(room.notebooks().values()) if name is None else [room.find(name)]
    copied = [] if name is None else [str(path) for path in chosen[0].copy(output)]
    if json:
        points = [
            {"name": each.name, "sentence": each.sentence, "duration_s": each.seconds, "solutions": str(each.solutions)}
            for each in chosen
        ]
        show.print_json("lab", points, {"files": copied})
        return
    if name is None:
        for each in chosen:
            print(f"{each.name:<18} {each.seconds:>3} s  {each.sentence}")
        print("\npython -m dpsim.lab NAME copies one. A plan for 90 minutes is docs/teach.md.")
        return
    notebook, script = copied
    print(f"{notebook}, and as a script {script}: {chosen[0].sentence} It runs for about {chosen[0].seconds} s.")
    print("Open it in one of these ways, with the Python that has dpsim:")
    print(f"  jupyter lab {notebook}    (after pip install jupyterlab)")
    print(f"  code {notebook}    (VS Code, with its extensions Python and Jupyter)")
    print(f"  {sys.executable} {script}    (without Jupyter: every cell, one after the other)")
    print(f"Solutions: {chosen[0].solutions}")


def build() -> App:
    """Return the command by itself, as ``dpsim.cli.app.run`` takes it."""
    return single("python -m dpsim.lab", lab, EXAMPLES)


if __name__ == "__main__":
    main(app=build())
