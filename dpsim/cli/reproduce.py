"""``dpsim reproduce``: whether training gives the same bits in every configuration, and if not, where and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.reproduce import ReproduceRecord

EXAMPLES = """\
Examples:
  dpsim reproduce --model cnn --devices 1,2,3,4,8
  dpsim reproduce --batch-norm leaf,global,local --algorithm all --overlap all
  dpsim reproduce --leaves 0 --algorithm ring --output plain
  dpsim reproduce --wire-dtype float16 --algorithm all
  dpsim reproduce --output saved; dpsim reproduce --against saved"""

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
        str | None,
        Parameter(name="--batch-norm", help="List of leaf, global and local (leaf); local is trained without leaves."),
    ] = None,
    steps: Annotated[int | None, Parameter(help="Steps to train in each run (50).")] = None,
    leaves: Annotated[
        int | None,
        Parameter(help="Parts of a global batch whose gradients are added in a fixed order (8); 0: plain training."),
    ] = None,
    global_batch: flags.GlobalBatch = None,
    accumulate: Annotated[str | None, Parameter(help="List of numbers of micro-batches a device and step (1).")] = None,
    optimizer: flags.Optimizer = None,
    learning_rate: flags.LearningRate = None,
    seed: flags.Seed = None,
    against: Annotated[
        Path | None, Parameter(help="Compare with the record in this folder, from an earlier dpsim reproduce.")
    ] = None,
    across_machines: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="With --against: allow a record from another type of machine."),
    ] = False,
    output: Annotated[Path | None, Parameter(help="Folder for the record with all digests, and the report.")] = None,
    wire_dtype: flags.WireDtype = None,
    compute_dtype: flags.ComputeDtype = None,
    strategy: Annotated[
        str | None, Parameter(name="--strategy", help="all, or a list of data-parallel (the default) and zero1.")
    ] = None,
    json: flags.Json = False,
) -> int:
    """Train in every combination, and compare the bits with those on one device.

    Reports that they are identical, or the first step, tensor and element that
    differ, and the cause. Where identical bits are not promised, it measures the
    divergence and compares it with a prediction. Exits with 1 if bits differ
    that should be identical.
    """
    from dpsim import codec
    from dpsim.algorithms import RUNNABLE, algorithms_in
    from dpsim.folder_lock import locked
    from dpsim.harness.reproduce.against import check_comparable, compare_with_saved
    from dpsim.harness.reproduce.measure import measure
    from dpsim.optimizer import changed
    from dpsim.plan import OVERLAPS, STRATEGIES
    from dpsim.records.reproduce import RECORD, Reproduction

    flags.writable(output, folder=True)
    settings = flags.provided(learning_rate=learning_rate)
    fields = flags.provided(
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
        accumulates=flags.listed("--accumulate", accumulate, flags.whole("--accumulate")),
        seed=seed,
        wire_dtype=wire_dtype,
        compute_dtype=compute_dtype,
        strategies=STRATEGIES if strategy == _ALL else flags.listed("--strategy", strategy, str),
    )
    if leaves == 0:
        fields.setdefault("batch_norms", ("local",))
    reproduction = Reproduction(**fields, optimizer=changed(Reproduction().optimizer, optimizer, settings))
    saved = None
    if against is not None:
        saved = check_comparable(against, reproduction, across_machines=across_machines)
    with locked(output):
        with show.progress() as progress:
            record = measure(reproduction, output, progress)
        if saved is not None and against is not None:
            record = compare_with_saved(record, saved, against)
        if output is not None:
            codec.write_text(output / RECORD, codec.to_json(record, indent=None) + "\n")
        show_record(record, output, json=json, command="reproduce")
    return 0 if record.kept_promises else 1


def show_record(
    record: ReproduceRecord, folder: Path | None, *, json: bool, command: str, pages: Sequence[str] = ("html", "md")
) -> None:
    """Print the result of a record, and write the ``pages`` of its report into ``folder`` if there is one."""
    from dpsim.report.reproduce.content import content
    from dpsim.report.reproduce.result import points_json, summary_json
    from dpsim.report.reproduce.tables import ALL_RUNS
    from dpsim.report.reproduce.write import write_reproduce_report
    from dpsim.report.terminal import TerminalReport
    from dpsim.report.write import PAGES

    if folder is not None and pages:
        write_reproduce_report(folder, record, pages)
    if json:
        show.print_json(command, points_json(record), summary_json(record))
        return
    report, many = content(record), len(record.runs) > _MOST_SHOWN
    tables = [table for table in report.tables if table.title != ALL_RUNS or not many]
    show.rich(TerminalReport(tables=tables, warnings=report.warnings, answers=report.answers))
    if many:
        print(
            f"each of the {len(record.runs)} runs: "
            + ("see the report" if folder and pages else "use --output FOLDER or --json")
        )
    if folder is not None and pages:
        print(f"report: {folder / PAGES[pages[0]]}")
