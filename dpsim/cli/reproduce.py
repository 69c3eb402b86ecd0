"""``dpsim reproduce``: whether training gives the same bits in every configuration, and if not, where and why."""

from __future__ import annotations

from pathlib import Path

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim reproduce --model cnn --devices 1,2,3,4,8
  dpsim reproduce --batch-norm leaf,global,local --algorithm all --overlap all
  dpsim reproduce --leaves 0 --algorithm ring --output plain
  dpsim reproduce --wire-dtype float16 --algorithm all
  dpsim reproduce --output saved; dpsim reproduce --against saved"""

_ALL = "all"
_PLURAL = {"fusion_threshold_bytes": "fusion_thresholds_bytes", "strategy": "strategies"}


class ReproduceFlags(
    flags.Flags,
    of="model dataset devices... fusion_threshold_bytes... algorithm... overlap... batch_norm... steps leaves"
    " global_batch accumulate... optimizer learning_rate seed against across_machines output wire_dtype compute_dtype"
    " strategy...",
):
    """The flags of what is compared, and of the record."""

    algorithm: str | None = flags.flag("all, or a list of dpsim's algorithms (auto).")
    overlap: str | None = flags.flag("all, or a list of off, inline, poll and thread (off).")
    batch_norm: str | None = flags.flag("List of leaf, global and local (leaf); local is trained without leaves.")
    steps: int | None = flags.flag("Steps to train in each run (50).")
    leaves: int | None = flags.flag(
        "Parts of a global batch whose gradients are added in a fixed order (8); 0: plain training."
    )
    accumulate: str | None = flags.flag("List of numbers of micro-batches a device and step (1).")
    learning_rate: flags.LearningRate = None
    against: Path | None = flags.flag("Compare with the record in this folder, from an earlier dpsim reproduce.")
    across_machines: bool = flags.flag("With --against: allow a record from another type of machine.", default=False)
    output: Path | None = flags.flag("Folder for the record with all digests, and the report.")
    strategy: str | None = flags.flag("all, or a list of strategies as dpsim train has them (data-parallel).")
    json: flags.Json = False


def reproduce(*, given: ReproduceFlags) -> int:
    """Train in every combination, and compare the bits with those on one device.

    Reports that they are identical, or the first step, tensor and element that
    differ, and the cause. Where identical bits are not promised, it measures the
    divergence and compares it with a prediction. Exits with 1 if bits differ
    that should be identical.
    """
    from dpsim import codec
    from dpsim.algorithms import RUNNABLE, algorithms_in
    from dpsim.folder_lock import locked
    from dpsim.harness.load import KINDS
    from dpsim.harness.reproduce.against import check_comparable, compare_with_saved
    from dpsim.harness.reproduce.measure import measure
    from dpsim.optimizer import changed
    from dpsim.plan import OVERLAPS
    from dpsim.records.reproduce import PREDICTIONS, RECORD, Reproduction
    from dpsim.report.saved import SavedResult
    from dpsim.strategy import SYNCHRONOUS

    against, output = given.against, given.output
    flags.writable(output, folder=True)
    fields = given.values()
    every = {"algorithm": algorithms_in(*RUNNABLE), "overlap": OVERLAPS, "strategy": SYNCHRONOUS}
    fields |= {name: values for name, values in every.items() if fields.get(name) == (_ALL,)}
    if fields.get("leaves") == 0:
        fields.setdefault("batch_norm", ("local",))
    optimizer = changed(
        Reproduction().optimizer, fields.pop("optimizer", None), flags.provided(learning_rate=given.learning_rate)
    )
    known = Reproduction.__struct_fields__
    fields = {name if name in known else _PLURAL.get(name, f"{name}s"): value for name, value in fields.items()}
    reproduction = Reproduction(**fields, optimizer=optimizer)
    saved = None
    if against is not None:
        saved = check_comparable(against, reproduction, across_machines=given.across_machines)
    with locked(output):
        with show.progress() as progress:
            record = measure(reproduction, None if output is None else output / PREDICTIONS, progress)
        if saved is not None and against is not None:
            record = compare_with_saved(record, saved, against)
        if output is not None:
            codec.write_record(output / RECORD, record)
        show.result(SavedResult(KINDS["reproduce"], record), output, json=given.json, command="reproduce")
    return 0 if record.kept_promises else 1
