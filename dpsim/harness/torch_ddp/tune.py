"""``tune`` of a script under DDP: profiles it at some local batches, calibrates here, and measures what is advised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from dpsim.errors import ConfigError
from dpsim.harness.torch_ddp.experiment import completed, shards
from dpsim.harness.torch_ddp.measure import Known, measure, predict, profile_request
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.tune import Tuning, tune
from dpsim.progress import Progress
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.recorded import joined
from dpsim.workload import Workload

_BATCHES = (2, 4)
"""The local batches that are compared where none are given: so many times the script's own."""
_PREDICTED, _MEASURED = "predicted", "measured"


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A script's workload at its own local batch, which is the first of ``batches``, and at others.

    ``refusal`` says why no others, or no larger ones, were profiled where none were asked for.
    """

    workload: Workload
    batches: tuple[int, ...]
    refusal: ConfigError | None


def profiled(declared: Experiment, local_batches: Sequence[int], progress: Progress, *, may_write: bool) -> Profiled:
    """Profile the script at its own batch and at ``local_batches``, or at twice and four times its own.

    Raises ``ConfigError`` where the script cannot be profiled, or not at one of the given batches.
    """
    request = profile_request(declared, script_may_write=may_write)
    progress(f"profiling {request.name} as rank 0 of {request.devices} in one process")
    workloads, refusal = [profile_script(request)], None
    own = workloads[0].local_batches[0]
    settings = completed(declared, workloads[0])  # refuses what is not predicted
    if shards(settings):
        raise ConfigError(
            f"{request.name} shards its model by fully_shard, whose units are its buckets",
            allowed="a script with DistributedDataParallel, which has a bucket cap",
            remedy="dpsim measure predicts and measures it as it is",
        )
    for batch in local_batches or [times * own for times in _BATCHES]:
        if batch == own:
            continue
        progress(f"profiling {request.name} at a local batch of {batch}")
        try:
            workloads.append(profile_script(request, [batch]))
        except ConfigError as error:
            if local_batches:
                raise
            refusal = error
            break
    batches = tuple(workload.local_batches[0] for workload in workloads)
    return Profiled(workload=joined(workloads), batches=batches, refusal=refusal)


def tune_here(
    declared: Experiment, known: Profiled, folder: Path, progress: Progress, *, may_write: bool
) -> tuple[Tuning, Workload, Machine]:
    """Profile and calibrate in turns on this machine; what is best, and the workload and machine that say so.

    ``declared`` has one network. The predictions are those of ``measure``, in a folder of ``folder``.
    """
    batches = known.batches[: len(known.batches) if len(known.batches) > 1 else 0]
    axes = declared.axes | ({"local_batch": tuple(sorted(batches))} if batches else {})
    seen = Known(seen=known.workload, script_may_write=may_write)
    predictions = predict(replace(declared, axes=axes), seen, folder / _PREDICTED, progress)
    (workload,), (machine,) = predictions.workloads, predictions.machines
    plan = predictions.points[-1].setting.plan
    devices = [int(count) for count in declared.values("devices")]
    tuning = tune(
        workload, machine, devices, local_batches=known.batches, algorithm=plan.algorithm, overlap=plan.overlap
    )
    return tuning, workload, machine


def measure_advised(
    declared: Experiment, known: Profiled, plans: Sequence[Plan], folder: Path, progress: Progress, *, may_write: bool
) -> Comparison:
    """Let DDP train with the caps and local batches of some plans in turns; the script decides its accumulation."""
    (case,), cases = declared.cases, []
    for plan in plans:
        cap = {} if plan.fusion_threshold_bytes is None else {"fusion_threshold_bytes": plan.fusion_threshold_bytes}
        cases.append(case | {"local_batch": round(plan.local_batch)} | cap)
    axes = {"devices": (plans[0].devices,)}
    experiment = replace(declared, name="tuned", axes=axes, cases=tuple(cases))
    seen = Known(seen=known.workload, script_may_write=may_write)
    return measure(experiment, seen, folder / _MEASURED, progress)[0].comparison
