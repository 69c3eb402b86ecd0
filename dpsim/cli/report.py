"""``dpsim report``: a report again from its records, several of them compared, or a step of one as a trace."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, ledger, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.records.sweep import Predictions, Results
    from dpsim.setting import Setting

EXAMPLES = """\
Examples:
  dpsim report reports/fusion-threshold
  dpsim report reports/fusion-threshold --format csv,parquet
  dpsim report reports/fusion-threshold --check
  dpsim report before after --output reports/compared
  dpsim report reports/strategies --page meeting.html
  dpsim report --ledger
  dpsim report reports/fusion-threshold --trace --set fusion_threshold_bytes=inf"""

_EXIT_CODES = {"verified": 0, "damaged": 1, "of another model": 3}
_KINDS = "a sweep, of bench allreduce, of reproduce or of a study of quality"
_TRACE = Path("trace.json")
_USED = {
    "one folder": "output format json verbose",
    "several folders": "output label json",
    "--check": "check json verbose",
    "--page": "page",
    "--trace": "trace output json",
}
"""By what is asked for the flags that change it."""
_RECORDS = ("results", "predictions", "blind")


class ReportFlags(flags.Flags):
    """The flags of what is written and shown."""

    output: Path | None = flags.flag(
        "Folder for the report (the same folder; of several, none); with --trace the file (trace.json)."
    )
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
    label: str | None = flags.flag("Names of several runs, like before,after (those of the folders).")
    ledger: bool = flags.flag(
        "How right the predictions of dpsim predict, dpsim tune and pages were of the jobs that ran since: a page"
        " (reports/ledger). Without FOLDER.",
        default=False,
    )
    share: Path | None = flags.flag("With --ledger: write it into this file instead, without names.")
    page: Path | None = flags.flag(
        "Write instead a page with sliders into this file, as dpsim predict --page does, with what a sweep measured."
    )
    trace: bool = flags.flag(
        "Write instead a step of a sweep, as measured and as predicted, as a Chrome trace for Perfetto "
        "(ui.perfetto.dev): of the setting that trains fastest on the most devices, among those of --set.",
        default=False,
    )


class StepFlags(
    flags.Flags,
    by_set="network devices local_batch batch_norm fusion_threshold_bytes overlap",
):
    """The flags that choose a setting of a sweep."""


def report(
    *folders: Annotated[
        Path,
        Parameter(name="FOLDER", help=f"The folder of {_KINDS}; several of sweeps or of bench allreduce are compared."),
    ],
    given: ReportFlags,
    step: StepFlags,
) -> None:
    """Write a report again from its records; of several, compare all with the first.

    Nothing is measured. Several are compared by the settings that both
    measured. Other processors, versions of dpsim, MPI or BLAS are shown and
    not refused.
    """
    if given.ledger or given.share is not None:
        _ledger(folders, given)
        return
    if not folders:
        raise ConfigError("FOLDER is missing", allowed=f"the folder of {_KINDS}", remedy="see dpsim report --help")
    _refuse_unused(given, step, several=len(folders) > 1)
    if given.page is not None:
        _page(folders[0], given.page)
    elif given.trace:
        _trace(folders[0], given, step)
    elif len(folders) > 1:
        _compare(folders, given)
    elif not folders[0].is_dir():
        raise ConfigError(f"there is no folder {folders[0]}", allowed=f"the folder of {_KINDS}")
    elif given.check:
        _check(folders[0], json=given.json, verbose=given.verbose)
    else:
        _write(folders[0], given)


def _refuse_unused(given: ReportFlags, step: StepFlags, *, several: bool) -> None:
    """Raise ``ConfigError`` for flags that would change nothing."""
    chosen = next((f"--{name}" for name in ("page", "trace", "check") if getattr(given, name)), "one folder")
    answer = "several folders" if several else chosen
    used = (*_USED[answer].split(), *(step.several if answer == "--trace" else ()))
    if unused := [each.spelled(name) for each in (given, step) for name in each.given() if name not in used]:
        raise ConfigError(
            f"{', '.join(unused)} with {answer}",
            allowed=step.spelled(*used),
            remedy="leave it out: it would change nothing" + ", or add --trace" * bool(step.given()),
        )


def _ledger(folders: tuple[Path, ...], given: ReportFlags) -> None:
    """Say how right past predictions were. Raises ``ConfigError`` for what has no meaning beside it."""
    used = ("ledger", "json", "share" if given.share is not None else "output")
    unused = [*map(str, folders), *(given.spelled(name) for name in given.given() if name not in used)]
    if unused or not given.ledger:
        raise ConfigError(
            f"{' and '.join(unused)} with --ledger" if unused else "--share without --ledger",
            allowed="--ledger with --json and one of --output and --share",
            remedy="write dpsim report --ledger --share scores.json",
        )
    ledger.show_ledger(given.output, given.share, json=given.json)


def _write(folder: Path, given: ReportFlags) -> None:
    from dpsim.cli.outputs import RECORDS
    from dpsim.folder_lock import locked
    from dpsim.harness.load import load
    from dpsim.report.saved import check_tables, write_tables
    from dpsim.report.write import table_files

    target = folder if given.output is None else given.output
    pages, tables = _formats(given.format)
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
        scored = ledger.scored_sweep(saved.data) if saved.kind == "sweep" else None
        more, verbose = ledger.as_record(scored), given.verbose
        show.result(saved, target, json=given.json, command="report", pages=pages, verbose=verbose, more=more)
        if not given.json:
            ledger.print_scored(scored)
        if written and not given.json:
            print(f"tables: {', '.join(str(path) for path in written)}")


def _formats(text: str | None) -> tuple[list[str], list[str]]:
    """Return the formats of pages and those of tables in a list of both. Raises ``ConfigError``."""
    from dpsim.errors import unknown
    from dpsim.report.write import PAGES, TABLE_FORMATS

    formats = readers.listed("--format", text, str) or tuple(PAGES)
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


def _compare(runs: tuple[Path, ...], given: ReportFlags) -> None:
    from dpsim.folder_lock import locked
    from dpsim.harness.compare.ratios import compare_runs
    from dpsim.report.compare.content import for_terminal, points_json, summary_json, write_comparison

    folders = [run.parent if run.is_file() else run for run in runs]
    flags.writable(given.output, folders=("report",), inputs=folders)
    comparison = compare_runs(runs, readers.listed("--label", given.label, str))
    if given.output is not None:
        with locked(given.output):
            write_comparison(given.output, comparison)
    if given.json:
        show.print_json("compare", points_json(comparison), summary_json(comparison))
        return
    show.rich(for_terminal(comparison))
    if given.output is not None:
        print(f"report: {given.output / 'index.html'}")


def _trace(folder: Path, given: ReportFlags, step: StepFlags) -> None:
    from dpsim.report.trace import step_of, write_trace

    output = given.output or _TRACE
    flags.writable(output, "trace", inputs=tuple(folder / f"{name}.json" for name in _RECORDS))
    conditions = step.values()
    if "devices" in conditions:
        conditions["devices"] = conditions.pop("layout") or str(conditions["devices"])
    results, predictions, same_minutes = _scored(folder)
    setting, timelines = step_of(results, predictions, conditions)
    write_trace(output, timelines)
    if given.json:
        summary = {"trace": str(output), "timelines": [timeline.source for timeline in timelines]}
        show.print_json("trace", [_point(setting)], summary)
        return
    kinds = {"predicted": "predicted from the same minutes" if same_minutes else "predicted"}
    print(f"{' and '.join(kinds.get(each.source, each.source) for each in timelines)}: {_describe(setting)}")
    print(f"trace file: {output}; open it at https://ui.perfetto.dev")


def _scored(folder: Path) -> tuple[Results | None, Predictions, bool]:
    """Return what a sweep measured, if it has, with the predictions that its report compares with that.

    The last says whether these are of the same minutes. Raises ``ConfigError`` and ``FileFormatError``.
    """
    from dpsim.harness.sweep.packed import PACKED, read
    from dpsim.records.bench import RECORD
    from dpsim.records.sweep import read_predictions, read_results

    if (folder / RECORD).is_file():
        raise ConfigError(
            f"{folder} holds a benchmark of the allreduce, which keeps no timelines",
            allowed="a folder of dpsim sweep fusion-threshold or dpsim sweep devices",
            remedy="run a sweep with --output, and give its folder",
        )
    if (packed := folder / PACKED).is_file():
        swept = read(packed)
        return swept.results, swept.blind or swept.predictions, swept.blind is not None
    same_minutes = (folder / "blind.json").is_file()
    measured, predicted = folder / "results.json", folder / ("blind.json" if same_minutes else "predictions.json")
    has_results = measured.is_file() or not predicted.is_file()
    return read_results(measured) if has_results else None, read_predictions(predicted), same_minutes


def _page(folder: Path, page: Path) -> None:
    from dpsim.codec import write_text
    from dpsim.explore.studied import studied
    from dpsim.harness.sweep.sweep import read_swept

    flags.writable(page, "page", flag="--page", inputs=tuple(folder / f"{name}.json" for name in _RECORDS))
    write_text(page, studied(read_swept(folder)))
    print(f"Open  {page}")


def _point(setting: Setting) -> dict[str, Any]:
    """Return the setting as a flat point of ``--json``."""
    from dpsim.records.columns import run_values

    return run_values(setting) | {"local_batch": setting.plan.local_batch}


def _describe(setting: Setting) -> str:
    from dpsim.units import format_size

    plan = setting.plan
    return (
        f"network {setting.where}, {show.count_devices(plan.devices)}, local batch {plan.local_batch:g}, "
        f"batch norm {plan.batch_norm}, threshold {format_size(plan.threshold_bytes)}, overlap {plan.overlap}"
    )
