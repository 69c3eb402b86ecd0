"""``dpsim sweep --torch-script``: what PyTorch's DDP or FSDP does with a user's own script, predicted and measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.cli import flags, ledger, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.cli.sweep_flags import SweepFlags
    from dpsim.records.comparison import SweepData
    from dpsim.records.sweep import Experiment, Predictions

DEFAULT = "default"
"""What ``--fusion-threshold`` calls the bucket cap that the script has."""
_SHARED = (
    "devices local_batch fusion_threshold_bytes algorithm network seed runtime budget wait_until_quiet output json"
)
"""The flags of sweeps of built-in models that a script has too."""


class ScriptFlags(flags.Flags, of="torch_script python accumulate...", group="Your own PyTorch script"):
    """The flags of a script that is measured."""

    torch_script: str | None = flags.flag(
        "Your own PyTorch script, or module as python -m takes it, which trains with DistributedDataParallel or "
        "fully_shard. --fusion-threshold are sizes for DDP's bucket_cap_mb (up to seven that matter), or default (the "
        "script's own), --local-batch batch sizes for its data loaders, "
        "--devices ranks on this machine (2); --algorithm is how DDP reduces: gloo (on node, or a shaped network), mpi "
        "(a hook, over dpsim's transports), or both (default; gloo alone on shaped networks, or by another Python than "
        "dpsim's); gloo,hook: also what "
        "dpsim.torch.allreduce_hook() gains over gloo; or nccl (a GPU a rank)."
    )
    python: flags.Python = None
    accumulate: str | None = flags.flag(
        "List of micro-batches a step that the script is made to have: 1,2,4 (its own). Each is one pass of its loop."
    )
    workload: Path | None = flags.flag("Predict from this profile of the script (profiled now if left out).")
    machine: Path | None = flags.flag("With nccl: a machine with its times, from dpsim calibrate --format nccl-tests.")
    strategy: str | None = flags.flag(
        "data-parallel (what the script does), or zero3: the model that it wraps in DDP is sharded by FSDP instead, "
        "with zero3:replicas=2 in two copies (HSDP), and DDP is measured beside it."
    )
    predict_only: bool = flags.flag("Print and write the predictions, and measure later.", default=False)
    script_may_write: flags.ScriptMayWrite = None

    def is_named(self) -> bool:
        """Return whether there is a script. Raises ``ConfigError`` for its flags without one."""
        if self.torch_script is not None:
            return True
        if given := ", ".join(map(flags.flag_of, self.given())):
            raise ConfigError(f"{given} without --torch-script", remedy="name the script, or leave it out")
        return False


def measure(question: str | None, given: SweepFlags, of: ScriptFlags, arguments: tuple[str, ...]) -> None:
    """Predict and measure a script. Raises ``ConfigError``, also for flags that only built-in models have.

    Every setting is predicted from one-process profiles and a calibration of the collectives alone. Then PyTorch trains
    on local ranks, all settings in turns with more of both, from which it is predicted once more, blind.
    """
    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.harness.script.measure import ScriptStudy
    from dpsim.harness.sweep.runs import rows_of
    from dpsim.launch.job_python import job_python
    from dpsim.launch.user_program import is_module

    question, experiment = _experiment(question, given, of, arguments)
    script = experiment.script
    folder = given.output or Path("reports") / f"{question}-{script if is_module(script) else Path(script).stem}"
    flags.writable(folder, folders=("sweep",), inputs=(Path(script), of.workload, of.machine))
    workload = None if of.workload is None else workloads.read(of.workload)
    machine = None if of.machine is None else machines.read(of.machine)
    by = job_python(of.python)
    if not by.is_own and not {"algorithm", "network"} & {*given.given()}:
        _, experiment = _experiment(question, given, of, arguments, communication=("gloo",))
    study = ScriptStudy(
        experiment=experiment,
        workload=workload,
        machine=machine,
        script_may_write=bool(of.script_may_write),
        by=by,
    )
    by.tell(study.request.name)
    with show.measuring(given.wait_until_quiet) as progress:
        if of.predict_only:
            predictions = study.predict(folder, progress)
            ledger.keep("sweep --predict-only", rows_of(predictions), {"predictions": predictions})
        else:
            swept = study.run(folder, progress)
    if of.predict_only:
        _print_predictions(predictions, folder, json=given.json)
    else:
        _print_measured(swept, folder, json=given.json)


def _experiment(
    question: str | None,
    given: SweepFlags,
    of: ScriptFlags,
    arguments: tuple[str, ...],
    communication: Sequence[str] | None = None,
) -> tuple[str, Experiment]:
    """Return what is asked of the script, and what to measure. Raises ``ConfigError``."""
    from dpsim.harness.script.experiment import script_experiment
    from dpsim.launch.user_program import check_program

    shared = _SHARED.split()
    if unused := [name for name in given.given() if name not in shared]:
        raise ConfigError(
            f"{given.spelled(*unused)} with a script, which brings its own training",
            allowed=f"{given.spelled(*shared)}, {of.spelled(*vars(of))}",
            remedy="leave it out, or give the script its arguments after --",
        )
    values = given.values(fusion_threshold_bytes=_cap) | of.values()
    question, script = _question(question, values), of.torch_script or ""
    check_program(script)
    return question, script_experiment(
        script,
        arguments=arguments,
        **readers.provided(
            devices=readers.listed("--devices", given.devices, readers.whole_numbers("--devices")),
            caps_bytes=values.get("fusion_threshold_bytes"),
            local_batches=values.get("local_batch"),
            accumulates=values.get("accumulate"),
            communication=communication or values.get("algorithm"),
            networks=values.get("network"),
            runtimes=values.get("runtime"),
            strategy=of.strategy,
            seed=values.get("seed"),
            budget_s=readers.budget(given.budget),
        ),
    )


def _cap(text: str) -> float | None:
    """Return a bucket cap in bytes; ``None``: the script's own. Raises ``ConfigError``."""
    return None if text == DEFAULT else readers.threshold(text)


def _print_measured(swept: SweepData, folder: Path, *, json: bool) -> None:
    """Print what was measured, and how well it was known when buckets are ready."""
    from dpsim.harness.script.measure import ready_errors
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.saved import points, summary

    errors = list(map(abs, ready_errors(swept)))
    ready = {"ready_median_abs_error": statistics.median(errors) if errors else None, "ready_buckets": len(errors)}
    scored = ledger.scored_sweep(swept)
    if json:
        show.print_json("measure", points(swept), summary(swept) | ready | ledger.as_record(scored))
        return
    show.rich(for_terminal(swept.comparison))
    if errors:
        error = f"{ready['ready_median_abs_error']:.1%} (median of {len(errors)} buckets)"
        print(f"buckets were ready when they were predicted to be within {error}")
    ledger.print_scored(scored)
    print(f"report: {folder / 'index.html'}")


def _question(question: str | None, values: dict[str, Any]) -> str:
    """Return what is asked of a script; without a question what its flags compare. Raises ``ConfigError``."""
    lists = [name for name in ("local_batch", "accumulate") if name in values]
    if question is None:
        return "fusion-threshold" if not lists else "local-batch" if lists == ["local_batch"] else "settings"
    compared = {
        "fusion-threshold": not lists or "fusion_threshold_bytes" in values,
        "local-batch": "local_batch" in values,
    }
    if not compared.get(question):
        raise ConfigError(
            f"the question {question} of a script" + "".join(f" with {flags.flag_of(name)}" for name in lists),
            allowed="fusion-threshold, local-batch with --local-batch 8,16,32, or none: what flags list is compared",
            remedy="leave the question out",
        )
    return question


_COLUMNS = (
    "local_batch",
    "fusion_threshold_bytes",
    "buckets",
    "images_per_s",
    "predicted_step_s",
    "predicted_low_s",
    "predicted_high_s",
    "predicted_exposed_communication_s",
    "extrapolated",
)


def _print_predictions(predictions: Predictions, folder: Path, *, json: bool) -> None:
    """Print a row for every predicted setting, a verdict for each number of devices, and what is assumed."""
    from dpsim.constraints import HOOK
    from dpsim.model.cautions import cautions
    from dpsim.model.points import rows_of_plans
    from dpsim.model.rows import best_of
    from dpsim.report.prediction import best_sentence, faster_with_fewer, verdicts
    from dpsim.report.words import interval_sentence

    predicted = [point for point in predictions.points if point.setting.repeat == 0]
    studies = min(point.interval_studies for point in predicted)
    level = predicted[0].interval_level if studies else None
    rows: list[dict[str, Any]] = []
    best: dict[str, list[dict[str, Any]]] = {}
    assumed: dict[str, None] = {}
    for where in dict.fromkeys(point.setting.where for point in predicted):
        points = [point for point in predicted if point.setting.where == where]
        workload, machine = predictions.made_from(points[0])
        plans = [point.setting.plan for point in points]
        predicted_rows = rows_of_plans(workload, machine, plans)
        best[where] = best_of(predicted_rows)
        for point, row in zip(points, predicted_rows, strict=True):
            of_setting = {"network": point.setting.network, "runtime": point.setting.runtime}
            rows.append(of_setting | row.record(*_COLUMNS) | {"same_buckets": ", ".join(point.names[1:])})
        assumed |= dict.fromkeys(cautions(machine, plans, workload))
    if json:
        summary: dict[str, Any] = {"predicted_at": predictions.predicted_at, "folder": str(folder)}
        summary |= {"interval_level": level, "interval_studies": studies}
        summary["best"] = [each | {"where": where} for where, of_place in best.items() for each in of_place]
        show.print_json("measure", rows, summary)
        return
    _table(rows, level)
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


def _table(rows: list[dict[str, Any]], level: float | None) -> None:
    from dpsim.report.prediction import band, declared
    from dpsim.report.table import Column
    from dpsim.report.words import interval_name
    from dpsim.units import format_size

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
                cell=lambda row: (
                    ", ".join(filter(None, (format_size(size), row["same_buckets"])))
                    if (size := row["fusion_threshold_bytes"]) is not None
                    else ""
                ),
            ),
            *declared("buckets"),
            *declared("images_per_s", "predicted_step_s"),
            Column(head=interval_name(level), cell=lambda row: band(row["predicted_low_s"], row["predicted_high_s"])),
            *declared("predicted_exposed_communication_s"),
            Column(head="", cell=lambda row: "extrapolated" * row["extrapolated"]),
        ),
        rows,
    )
