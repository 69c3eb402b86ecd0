"""``tune`` of a script under DDP: profiles it at some local batches, calibrates here, and measures what is advised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, shards
from dpsim.harness.script.measure import ScriptStudy
from dpsim.launch.job_python import job_python
from dpsim.machine import Machine
from dpsim.model.ranking import Tuning, tune
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.comparison import Comparison
from dpsim.setting import Grid
from dpsim.torch.script.probe.endings import ENDED_EARLY, WITH_ACCUMULATE
from dpsim.torch.script.profile_script import profile_script
from dpsim.torch.script.recorded import joined
from dpsim.workload import Workload

_BATCHES = (2, 4)
"""The local batches that are compared where none are given: so many times the script's own."""
_PREDICTED, _MEASURED, _WITHOUT_ACCUMULATION = "predicted", "measured", "without-accumulation"


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A script's workload at its own local batch, which is the first of ``batches``, and at others.

    ``refusal`` says why no others, or no larger ones, were profiled where none were asked for. ``cannot_accumulate``
    says what the script has that keeps it from being made to accumulate, where that was tried.
    """

    workload: Workload
    batches: tuple[int, ...]
    refusal: ConfigError | None
    cannot_accumulate: str = ""


def profiled(
    study: ScriptStudy,
    local_batches: Sequence[int],
    progress: Progress,
    *,
    accumulates: bool = False,
    python: str | None = None,
) -> Profiled:
    """Profile the script with ``python`` at its own batch and at ``local_batches``, or at twice and four times its own.

    With ``accumulates`` it is tried whether the script can be made to accumulate. Raises ``ConfigError`` where the
    script cannot be profiled, or not at one of the given batches.
    """
    request, by = study.request, job_python(python)
    by.tell(request.name)
    progress(f"profiling {request.name} as rank 0 of {request.devices} in one process")
    refusal, cannot_accumulate = None, ""
    try:
        workloads = [profile_script(msgspec.structs.replace(request, accumulates=accumulates), python=by)]
    except ConfigError as error:
        if not error.given.startswith(WITH_ACCUMULATE):
            raise
        cannot_accumulate = error.given.removeprefix(WITH_ACCUMULATE)
        workloads = [profile_script(request, python=by)]
    own = workloads[0].local_batches[0]
    settings = completed(study.experiment, workloads[0])  # refuses what is not predicted
    if shards(settings):
        raise ConfigError(
            f"{request.name} shards its model by fully_shard, whose units are its buckets",
            allowed="a script with DistributedDataParallel, which has a bucket cap",
            remedy="dpsim sweep --torch-script predicts and measures it as it is",
        )
    for batch in local_batches or [times * own for times in _BATCHES]:
        if batch == own:
            continue
        progress(f"profiling {request.name} at a local batch of {batch}")
        try:
            workloads.append(profile_script(request, [batch], python=by))
        except ConfigError as error:
            if local_batches:
                raise
            refusal = error
            break
    batches = tuple(workload.local_batches[0] for workload in workloads)
    return Profiled(workload=joined(workloads), batches=batches, refusal=refusal, cannot_accumulate=cannot_accumulate)


def tune_here(
    study: ScriptStudy, known: Profiled, folder: Path, progress: Progress
) -> tuple[Tuning, Workload, Machine]:
    """Return what is best on this machine, and the workload and machine that say so; they are measured in turns.

    The experiment has one network. The predictions are those of the study, in a folder of ``folder``.
    """
    batches = known.batches[: len(known.batches) if len(known.batches) > 1 else 0]
    declared = study.experiment
    axes = declared.axes | ({"local_batch": tuple(sorted(batches))} if batches else {})
    batched = replace(study, experiment=msgspec.structs.replace(declared, axes=axes), seen=known.workload)
    predictions = batched.predict(folder / _PREDICTED, progress)
    (workload,), (machine,) = predictions.workloads, predictions.machines
    plan = predictions.points[-1].setting.plan
    grid = Grid.of(
        devices=declared.values("devices"), local_batch=known.batches, algorithm=plan.algorithm, overlap=plan.overlap
    )
    tuning = tune(workload, machine, grid)
    return tuning, workload, machine


def measure_advised(
    study: ScriptStudy, known: Profiled, plans: Sequence[Plan], folder: Path, progress: Progress
) -> Comparison:
    """Let DDP train with the caps, local batches and accumulations of some plans in turns, the first the default.

    Where the script ends too early for more micro-batches than the default's, those plans are left out, with a warning.
    """
    default, (case,), cases = plans[0], study.experiment.cases, []
    alike = [plan for plan in plans if plan.accumulate == default.accumulate]
    for plan in plans:
        fields: dict[str, Any] = {"local_batch": round(plan.local_batch)}
        if plan.fusion_threshold_bytes is not None:
            fields["fusion_threshold_bytes"] = plan.fusion_threshold_bytes
        if len(alike) < len(plans):
            fields["accumulate"] = plan.accumulate
        cases.append(case | fields)
    experiment = msgspec.structs.replace(
        study.experiment, name="tuned", axes={"devices": (default.devices,)}, cases=tuple(cases)
    )
    advised = replace(study, experiment=experiment, seen=known.workload)
    try:
        return advised.run(folder / _MEASURED, progress).comparison
    except ConfigError as error:
        if len(alike) in (1, len(plans)) or ENDED_EARLY not in error.given:
            raise
        progress(f"warning: accumulation is not measured, since {error.given}")
    return measure_advised(study, known, alike, folder / _WITHOUT_ACCUMULATION, progress)
