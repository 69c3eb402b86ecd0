"""``dpsim report``: write a report again from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dpsim.cli import bench, flags, reproduce, show

EXAMPLES = """\
Examples:
  dpsim report reports/fusion-threshold
  dpsim report reports/fusion-threshold --json"""


def report(
    folder: Annotated[Path, Parameter(help="The folder of a sweep, of bench allreduce or of reproduce.")],
    /,
    *,
    output: Annotated[Path | None, Parameter(help="Folder for the report (the same folder).")] = None,
    json: flags.Json = False,
) -> None:
    """Write a report again from its records; nothing is measured."""
    from dpsim.folder_lock import locked
    from dpsim.harness.sweep.compare import compare
    from dpsim.harness.sweep.drift import read_drift
    from dpsim.records import reproduce as reproductions
    from dpsim.records.bench import RECORD, read
    from dpsim.records.sweep import read_predictions, read_results
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.result import points_json, summary_json
    from dpsim.report.sweep.write import write_report

    target = folder if output is None else output
    flags.writable(target, folder=True)
    with locked(target):
        if (folder / RECORD).is_file():
            bench.show_record(read(folder / RECORD), target, json=json, command="report")
            return
        if (folder / reproductions.RECORD).is_file():
            reproduce.show_record(reproductions.read(folder), target, json=json, command="report")
            return
        predictions, results = read_predictions(folder / "predictions.json"), read_results(folder / "results.json")
        drift = read_drift(predictions, folder)
        comparison = compare(predictions, results, drift)
        write_report(target, predictions, results, comparison, drift)
        if json:
            show.print_json("report", points_json(comparison), summary_json(comparison))
            return
        show.rich(for_terminal(comparison))
        print(f"report: {target / 'index.html'}")
