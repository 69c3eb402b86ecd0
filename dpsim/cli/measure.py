"""``dpsim measure``: predict what PyTorch's DDP or FSDP does with a user's own script, then measure it, and compare."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.sweep import Predictions

EXAMPLES = f"""\
Examples:
  dpsim measure --torch-script train.py --devices 2 -- --batch-size 32
  dpsim measure --torch-script train.py --workload train.json --predict-only
  dpsim measure --torch-script train.py --local-batch 8,16,32 --devices 1,2
  dpsim measure --torch-script train.py --accumulate 1,2,4
  dpsim measure --torch-script train.py --communication gloo,hook
  dpsim measure --torch-script train.py --strategy zero3 --devices 1,2
  dpsim measure --torch-script train.py --communication mpi
    --network node,paced:200us,1gbit --bucket-cap 0,64KiB,1MiB,inf
  dpsim measure --torch-script train.py --network paced:200us,1gbit
    --communication mpi --runtime torch-ddp,dpsim{flags.WORDS}"""


class ScriptFlags(
    flags.Flags,
    of="torch_script torch_module workload machine ranks strategy bucket_cap local_batch... accumulate..."
    " communication network... runtime predict_only script_may_write budget seed",
):
    """The flags of a script that is measured."""

    torch_script: str | None = flags.flag(
        "Your own PyTorch script, which trains with DistributedDataParallel or fully_shard."
    )
    torch_module: flags.TorchModule = None
    workload: Path | None = flags.flag("Predict from this profile of the script (profiled now if left out).")
    machine: Path | None = flags.flag("With nccl: a machine with its times, from dpsim calibrate --format nccl-tests.")
    ranks: str | None = flags.flag("Numbers of ranks, all on this machine: 2, or 1,2 (2).", name="--devices")
    strategy: str | None = flags.flag(
        "data-parallel (what the script does), or zero3: the model that it wraps in DDP is sharded by FSDP instead."
    )
    bucket_cap: str | None = flags.flag(
        "List of sizes for DDP's bucket_cap_mb: 0,1MiB,25MiB,inf (up to seven that matter)."
    )
    local_batch: str | None = flags.flag("List of batch sizes for the script's data loaders: 8,16,32 (its own).")
    accumulate: str | None = flags.flag(
        "List of micro-batches a step that the script is made to have: 1,2,4 (its own). Each is one pass of its loop."
    )
    communication: str | None = flags.flag(
        "How DDP reduces: gloo (on node alone), mpi (a hook, over dpsim's transports), or both (default); gloo,hook: "
        "also what dpsim.torch.allreduce_hook() gains over gloo; or nccl (a GPU a rank)."
    )
    runtime: str | None = flags.flag(
        "torch-ddp, or torch-ddp,dpsim: beside DDP dpsim's own runtime, with emulated computation."
    )
    predict_only: bool = flags.flag("Print and write the predictions, and measure later.", default=False)
    script_may_write: flags.ScriptMayWrite = None
    budget: str | None = flags.flag(
        "Time for which DDP trains, in turns with profiles and calibrations, like 60s (45s); up to 30s more, "
        "if 6 rounds of all settings need it: then 3 are measured, and fewer settings. "
        "First rounds before it take 10 to 20 s for each way to communicate on each network."
    )
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag("Folder of the report [reports/ddp-NAME].")
    json: flags.Json = False


_LISTS = {"local_batch": "local_batches", "accumulate": "accumulates", "network": "networks"}
"""What ``script_experiment`` calls several values of a setting's field."""


def measure(
    *arguments: Annotated[str, Parameter(name="ARGUMENTS", help="Arguments of the script, after --.")],
    given: ScriptFlags,
) -> None:
    """Predict and measure your own PyTorch script under DDP or FSDP, unchanged.

    Every setting is predicted from one-process profiles and a calibration of
    the collectives alone. Then PyTorch trains on local ranks, all settings in
    turns with more of both, from which it is predicted once more, blind.
    After an interruption the same command goes on where it stopped.
    """
    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.harness.torch_ddp import measure as harness
    from dpsim.harness.torch_ddp.experiment import script_experiment
    from dpsim.launch.user_script import is_module
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.saved import points, summary

    script = flags.program(given.torch_script, given.torch_module)
    fields = given.values()
    for name in ("runtime", "strategy"):  # read below
        fields.pop(name, None)
    plural = {_LISTS[name]: fields.pop(name) for name in _LISTS if name in fields}
    experiment = script_experiment(
        script,
        arguments=arguments,
        **(fields | plural),
        **flags.provided(
            devices=flags.listed("--devices", given.ranks, flags.whole("--devices")),
            strategy=given.strategy,
            caps_bytes=flags.listed("--bucket-cap", given.bucket_cap, flags.threshold),
            communication=flags.listed("--communication", given.communication, str),
            runtimes=flags.listed("--runtime", given.runtime, str),
            budget_s=flags.budget(given.budget),
        ),
    )
    folder = given.output or Path("reports") / f"ddp-{script if is_module(script) else Path(script).stem}"
    flags.writable(folder, folders=("sweep",), inputs=(Path(script), given.workload, given.machine))
    known = harness.Known(
        workload=None if given.workload is None else workloads.read(given.workload),
        machine=None if given.machine is None else machines.read(given.machine),
        script_may_write=bool(given.script_may_write),
    )
    with show.measuring(given.wait_until_quiet) as progress:
        if given.predict_only:
            predictions = harness.predict(experiment, known, folder, progress)
        else:
            swept, ready_errors = harness.measure(experiment, known, folder, progress)
    if given.predict_only:
        _print_predictions(predictions, folder, json=given.json)
        return
    errors = list(map(abs, ready_errors))
    ready = {"ready_median_abs_error": statistics.median(errors) if errors else None, "ready_buckets": len(errors)}
    if given.json:
        show.print_json("measure", points(swept), summary(swept) | ready)
        return
    show.rich(for_terminal(swept.comparison))
    if errors:
        error = f"{ready['ready_median_abs_error']:.1%} (median of {len(errors)} buckets)"
        print(f"buckets were ready when they were predicted to be within {error}")
    print(f"report: {folder / 'index.html'}")


def _print_predictions(predictions: Predictions, folder: Path, *, json: bool) -> None:
    """Print a row for every predicted setting, a verdict for each number of devices, and what is assumed."""
    from dpsim.constraints import HOOK
    from dpsim.model.cautions import cautions
    from dpsim.model.points import rows_of_plans
    from dpsim.model.rows import best_of
    from dpsim.report.prediction import band, best_sentence, declared, faster_with_fewer, verdicts
    from dpsim.report.table import Column
    from dpsim.report.words import interval_name, interval_sentence
    from dpsim.units import format_size

    predicted = [point for point in predictions.points if point.setting.repeat == 0]
    studies = min(point.interval_studies for point in predicted)
    level = predicted[0].interval_level if studies else None
    rows: list[dict[str, Any]] = []
    best: dict[str, list[dict[str, Any]]] = {}
    assumed: dict[str, None] = {}
    for point in predicted:
        plan = point.setting.plan
        names = ("step_s", "low_s", "high_s", "exposed_communication_s")
        rows.append(
            {"devices": plan.devices, "network": point.setting.network, "runtime": point.setting.runtime}
            | {
                "local_batch": plan.local_batch,
                "accumulate": plan.accumulate,
                "buckets": point.buckets,
                "extrapolated": point.extrapolated,
            }
            | {"fusion_threshold_bytes": plan.threshold_bytes if plan.devices > 1 else None}
            | {"predicted_samples_per_s": plan.global_batch / point.step_s}
            | {f"predicted_{name}": getattr(point, name) for name in names}
        )
    for where in dict.fromkeys(point.setting.where for point in predicted):
        points = [point for point in predicted if point.setting.where == where]
        workload, machine = predictions.workloads[points[0].workload], predictions.machines[points[0].machine]
        plans = [point.setting.plan for point in points]
        best[where] = best_of(rows_of_plans(workload, machine, plans))
        assumed |= dict.fromkeys(cautions(machine, plans, workload))
    if json:
        summary: dict[str, Any] = {"predicted_at": predictions.predicted_at, "folder": str(folder)}
        summary |= {"interval_level": level, "interval_studies": studies}
        summary["best"] = [each | {"where": where} for where, of_place in best.items() for each in of_place]
        show.print_json("measure", rows, summary)
        return
    accumulates = len({row["accumulate"] for row in rows}) > 1
    show.table(
        (
            Column(head="network", cell=lambda row: row["network"], left=True),
            Column(head="runtime", cell=lambda row: row["runtime"], left=True),
            Column(head="devices", cell=lambda row: str(row["devices"])),
            Column(head="local batch", cell=lambda row: f"{row['local_batch']:g}"),
            *([Column(head="micro-batches", cell=lambda row: str(row["accumulate"]))] if accumulates else []),
            Column(
                head="bucket cap",
                cell=lambda row: "" if (size := row["fusion_threshold_bytes"]) is None else format_size(size),
            ),
            *declared("buckets"),
            Column(head="samples/s", cell=lambda row: f"{row['predicted_samples_per_s']:,.0f}"),
            *declared("predicted_step_s"),
            Column(head=interval_name(level), cell=lambda row: band(row["predicted_low_s"], row["predicted_high_s"])),
            *declared("predicted_exposed_communication_s"),
            Column(head="", cell=lambda row: "extrapolated" * row["extrapolated"]),
        ),
        rows,
    )
    for where, of_place in best.items():
        for each in of_place:
            faster = faster_with_fewer(each, of_place, "local_batch")
            print(f"{where}: {best_sentence(each, faster, weak=True, cap='bucket cap')}")
        for sentence in verdicts({"best": of_place}, weak=True):
            print(f"{where}: {sentence}")
    if HOOK in predictions.experiment.other_runtimes:
        assumed["dpsim.torch.allreduce_hook() is measured, and not predicted"] = None
    for sentence in (interval_sentence(level, studies), *assumed):
        print(f"Note: {sentence}.")
    print(f"predictions: {folder / 'predictions.json'}; the same command without --predict-only measures them")
