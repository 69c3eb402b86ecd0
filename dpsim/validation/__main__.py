"""``python -m dpsim.validation``: predictions of other people's published measurements, scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dpsim.cli import flags, main, show
from dpsim.cli.app import single

EXAMPLES = """\
Examples:
  python -m dpsim.validation
  python -m dpsim.validation --output reports/validation"""


def validation(
    *,
    sets: Annotated[
        Path | None, Parameter(help="Folder of your own with sets and cases, in place of those of dpsim.")
    ] = None,
    executor: flags.Executor = "1",
    output: Annotated[Path | None, Parameter(help="Folder for the report, its figures and points.csv.")] = None,
    json: flags.Json = False,
) -> None:
    """Predict what other people measured and published, and score that.

    Sets of measurements come with dpsim. No row is predicted from itself. Nulls
    know what the prediction knows.
    """
    from dpsim.folder_lock import locked
    from dpsim.launch import workers
    from dpsim.validation import page
    from dpsim.validation.published import FOLDER
    from dpsim.validation.run import validate

    flags.writable(output, folders=("report",), inputs=(sets,))
    with workers.executor(executor) as held:
        result = validate(sets or FOLDER, executor=held)
    if output is not None:
        with locked(output):
            page.write_validation(output, result)
    if json:
        show.print_json("validation", [row.values() for row in result.rows], result.summary())
        return
    show.rich(page.for_terminal(result))
    if output is not None:
        print(f"report: {output / 'index.html'}")


def build() -> App:
    """Return the command by itself, as ``dpsim.cli.app.run`` takes it."""
    return single("python -m dpsim.validation", validation, EXAMPLES)


if __name__ == "__main__":
    main(app=build())
