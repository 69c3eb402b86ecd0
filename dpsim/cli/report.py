"""``dpsim report``: write a report again from its records."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim report reports/fusion-threshold
  dpsim report reports/fusion-threshold --json
  dpsim report reports/fusion-threshold --format csv,parquet
  dpsim report reports/fusion-threshold --check"""

_EXIT_CODES = {"verified": 0, "damaged": 1, "of another model": 3}
_KINDS = "a sweep, of bench allreduce, of reproduce or of a study of quality"


class ReportFlags(flags.Flags):
    """The flags of what is written and shown."""

    output: Path | None = flags.flag("Folder for the report (the same folder).")
    format: str | None = flags.flag(
        "List of html, md (both the default), csv and parquet: all points, samples and events as tables."
    )
    json: flags.Json = False
    verbose: flags.AllTables = False
    check: bool = flags.flag(
        "Write nothing; hold a sweep's files against the SHA-256 that its results state, and predict it again from "
        "what was profiled and calibrated alone. The exit code is 0 if that gives the stated predictions, 3 if they "
        "are by another version of the model, 1 if a file is damaged.",
        default=False,
    )


def report(
    folder: Annotated[Path, Parameter(help=f"The folder of {_KINDS}.")],
    /,
    *,
    given: ReportFlags,
) -> None:
    """Write a report again from its records; nothing is measured."""
    from dpsim.cli.outputs import RECORDS
    from dpsim.errors import ConfigError
    from dpsim.folder_lock import locked
    from dpsim.harness.load import load
    from dpsim.report.saved import check_tables, write_tables
    from dpsim.report.write import table_files

    target = folder if given.output is None else given.output
    pages, tables = _formats(given.format)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", allowed=f"the folder of {_KINDS}")
    if given.check:
        _check(folder, json=given.json, verbose=given.verbose)
        return
    if target.exists() and target.samefile(folder):
        flags.writable(target, folders=RECORDS)
    else:
        flags.writable(target, folders=("report",), inputs=(folder,))
    check_tables(tables)
    for file in table_files(target, tables):
        flags.writable(file)
    with locked(target):
        saved = load(folder)
        written = write_tables(target, saved, tables)
        if not pages and not given.json:
            print(f"tables: {', '.join(str(path) for path in written)}")
            return
        show.result(saved, target, json=given.json, command="report", pages=pages, verbose=given.verbose)
        if written and not given.json:
            print(f"tables: {', '.join(str(path) for path in written)}")


def _formats(text: str | None) -> tuple[list[str], list[str]]:
    """Return the formats of pages and those of tables in a list of both. Raises ``ConfigError``."""
    from dpsim.errors import unknown
    from dpsim.report.write import PAGES, TABLE_FORMATS

    formats = flags.listed("--format", text, str) or tuple(PAGES)
    for each in formats:
        if each not in (*PAGES, *TABLE_FORMATS):
            raise unknown("format", each, (*PAGES, *TABLE_FORMATS))
    return [each for each in PAGES if each in formats], [each for each in TABLE_FORMATS if each in formats]


def _check(folder: Path, *, json: bool, verbose: bool) -> None:
    from dpsim.columns import Column
    from dpsim.harness.sweep.check import check
    from dpsim.report.sweep import checked as words

    checked = check(folder)
    if json:
        show.print_json("report", words.points(checked), words.summary(checked))
    else:
        print("\n".join(words.sentences(checked)))
        if rows := [words.cells(*each) for each in words.shown_points(checked, every=verbose)]:
            heads = ("predicted", "setting", "step as stated", "today", "difference")
            show.table([Column(head=head, cell=itemgetter(number)) for number, head in enumerate(heads)], rows)
    if code := _EXIT_CODES[checked.verdict]:
        raise SystemExit(code)
