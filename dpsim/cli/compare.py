"""``dpsim compare``: the results of several runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim compare before after --output reports/compared
  dpsim compare one two three --label mpich,openmpi,intel
  dpsim compare before after --json"""


def compare(
    *runs: Annotated[Path, Parameter(help="Folders of sweeps, or of bench allreduce; the first is compared with.")],
    label: Annotated[str | None, Parameter(help="Names of the runs, like before,after (those of the folders).")] = None,
    output: Annotated[Path | None, Parameter(help="Folder for the report, its figure and points.csv.")] = None,
    json: flags.Json = False,
) -> None:
    """Compare the measurements of several runs with the first, by settings.

    A setting is compared where both runs measured it. Other processors,
    versions of dpsim, MPI or BLAS are shown and not refused. Nothing is measured.
    """
    from dpsim.folder_lock import locked
    from dpsim.harness.compare.ratios import compare_runs
    from dpsim.report.compare.content import for_terminal, points_json, summary_json, write_comparison

    folders = [run.parent if run.is_file() else run for run in runs]
    flags.writable(output, folders=("report",), inputs=folders)
    comparison = compare_runs(runs, flags.listed("--label", label, str))
    if output is not None:
        with locked(output):
            write_comparison(output, comparison)
    if json:
        show.print_json("compare", points_json(comparison), summary_json(comparison))
        return
    show.rich(for_terminal(comparison))
    if output is not None:
        print(f"report: {output / 'index.html'}")
