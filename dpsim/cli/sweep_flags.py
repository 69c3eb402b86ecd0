"""The flags of ``dpsim sweep`` that a sweep of dpsim's own training and one of a script have in common."""

from __future__ import annotations

from pathlib import Path

from dpsim.cli import flags


class SweepFlags(
    flags.Flags,
    of="model dataset devices... global_batch... local_batch... fusion_threshold_bytes..."
    " algorithm... batch_norm... network... compute",
    by_set="fusion_rule overlap leaves wire_dtype compute_dtype seed runtime...",
):
    """The flags of what is compared, and of the run."""

    devices: str | None = flags.flag("Numbers of devices: 1,2,4, or layouts: 2x4.")
    global_batch: str | None = flags.flag(
        "Samples per step, the same on all numbers of devices: strong scaling; some questions take a list."
    )
    local_batch: str | None = flags.flag(
        "Samples that a device has at once, the same on all: weak scaling; some questions take a list."
    )
    batch_norm: str | None = flags.flag(
        "Batch norm's statistics: local, leaf, global. The question batch-norm takes a list, and none, group, instance "
        "or layer in its place."
    )
    steps: int | None = flags.flag("With devices: steps to train on each number, to see the divergence (50).")
    target_loss: float | None = flags.flag(
        "With local-batch: train to this loss on the training set too: how many steps, how much time?"
    )
    seeds: int | None = flags.flag(
        "With batch-norm: also train from so many seeds (10 or more; 0: train nothing): what do small batches do?"
    )
    epochs: int | None = flags.flag("With batch-norm: epochs of these trainings (8).")
    budget: str | None = flags.flag(
        "Time to spend on measuring, like 60s; up to 30s more, if 6 rounds of all settings need it: then 3 are "
        "measured, and fewer settings. Profile and calibration get as much as the budget, 2 to 12s for each "
        "computation, and twice that where the machine is not steady."
    )
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag("Folder of the report [reports/NAME, or the next that is free].")
    array: str | None = flags.flag(
        "Measure in a job array: slurm or pbs, with what to ask for, like slurm:time=01:00:00,queue=short,at-once=4 "
        "(docs/cluster.md). Jobs of the array have task:NUMBER or last."
    )
    dry_run: bool = flags.flag("With array: print the script instead of submitting it.", default=False)
    json: flags.Json = False
    verbose: flags.AllTables = False
