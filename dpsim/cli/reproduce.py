"""``dpsim reproduce``: whether training comes to the same bits however it is run, and where and why it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.reproduce import ReproduceRecord

EXAMPLES = """\
Examples:
  dpsim reproduce --model cnn --devices 1,2,3,4,8
  dpsim reproduce --batch-norm leaf,global,local --algorithm all --overlap all
  dpsim reproduce --leaves 0 --algorithm ring --output drift
  dpsim reproduce --wire-dtype float16 --algorithm all
  dpsim reproduce --output here; dpsim reproduce --against here"""

_ALL = "all"
_MOST_SHOWN = 40


def reproduce(
    *,
    model: flags.Model = None,
    dataset: flags.DataSet = None,
    devices: flags.DevicesList = None,
    fusion_threshold: flags.Thresholds = None,
    algorithm: Annotated[
        str | None, Parameter(name="--algorithm", help="all, or a list of dpsim's algorithms (auto).")
    ] = None,
    overlap: Annotated[str | None, Parameter(help="all, or a list of off, inline, poll and thread (off).")] = None,
    batch_norm: Annotated[
        str | None, Parameter(name="--batch-norm", help="List of leaf, global and local; local has no leaves (leaf).")
    ] = None,
    steps: Annotated[int | None, Parameter(help="Steps to train each time (50).")] = None,
    leaves: Annotated[
        int | None, Parameter(help="Parts of a global batch that are added in one fixed order (8); 0: plain training.")
    ] = None,
    global_batch: flags.GlobalBatch = None,
    optimizer: flags.Optimizer = None,
    learning_rate: flags.LearningRate = None,
    seed: flags.Seed = None,
    against: Annotated[Path | None, Parameter(help="Compare with a saved run: the folder of another one.")] = None,
    across_machines: Annotated[
        bool, Parameter(negative="", show_default=False, help="Compare with a run of another machine type.")
    ] = False,
    output: Annotated[Path | None, Parameter(help="Folder for the record, all digests in it, and a report.")] = None,
    wire_dtype: flags.WireDtype = None,
    json: flags.Json = False,
) -> int:
    """Train in every combination and compare the bits, against one device.

    Says identical, or the first step, tensor and element that differ, and why.
    Where nothing is promised it measures the drift beside a prediction. Exits
    with 1 where something that should be identical is not.
    """
    from dpsim import codec
    from dpsim.algorithms import RUNNABLE, algorithms_in
    from dpsim.folder_lock import locked
    from dpsim.harness.reproduce.against import check_comparable, compare_with_saved
    from dpsim.harness.reproduce.measure import measure
    from dpsim.optimizer import changed
    from dpsim.plan import OVERLAPS
    from dpsim.records.reproduce import RECORD, Reproduction

    flags.writable(output, folder=True)
    settings = flags.given(learning_rate=learning_rate)
    chosen: dict[str, Any] = flags.given(
        model=model,
        dataset=dataset,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        fusion_thresholds_bytes=flags.listed("--fusion-threshold", fusion_threshold, flags.threshold),
        algorithms=algorithms_in(*RUNNABLE) if algorithm == _ALL else flags.listed("--algorithm", algorithm, str),
        overlaps=OVERLAPS if overlap == _ALL else flags.listed("--overlap", overlap, str),
        batch_norms=flags.listed("--batch-norm", batch_norm, str),
        steps=steps,
        leaves=leaves,
        global_batch=global_batch,
        seed=seed,
        wire_dtype=wire_dtype,
    )
    if leaves == 0:
        chosen.setdefault("batch_norms", ("local",))
    reproduction = Reproduction(**chosen, optimizer=changed(Reproduction().optimizer, optimizer, settings))
    saved = None
    if against is not None:
        saved = check_comparable(against, reproduction, across_machines=across_machines)
    with locked(output):
        with show.progress() as tell:
            record = measure(reproduction, output, tell)
        if saved is not None and against is not None:
            record = compare_with_saved(record, saved, against)
        if output is not None:
            codec.write_text(output / RECORD, codec.to_json(record, indent=None) + "\n")
        show_record(record, output, json=json, command="reproduce")
    return 0 if record.kept_promises else 1


def show_record(record: ReproduceRecord, folder: Path | None, *, json: bool, command: str) -> None:
    """Print what was found, and write its report where a folder is given."""
    from dpsim.report.reproduce.content import content
    from dpsim.report.reproduce.result import points_json, summary_json
    from dpsim.report.reproduce.tables import ALL_RUNS
    from dpsim.report.reproduce.write import write_reproduce_report
    from dpsim.report.terminal import TerminalReport

    if folder is not None:
        write_reproduce_report(folder, record)
    if json:
        show.as_json(command, points_json(record), summary_json(record))
        return
    shown, many = content(record), len(record.runs) > _MOST_SHOWN
    tables = [table for table in shown.tables if table.title != ALL_RUNS or not many]
    show.rich(TerminalReport(tables=tables, warnings=shown.warnings, answers=shown.answers))
    if many:
        print(
            f"each of the {len(record.runs)} runs: "
            + ("in the report" if folder else "with --output FOLDER, or --json")
        )
    if folder is not None:
        print(f"report: {folder / 'index.html'}")
