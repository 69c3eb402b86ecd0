"""``tune`` of a script under DDP: profiles it at some local batches, and calibrates here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, shards
from dpsim.harness.script.measure import ScriptStudy
from dpsim.machine import Machine
from dpsim.model.ranking import Tuning, tune
from dpsim.progress import Progress
from dpsim.setting import Grid
from dpsim.torch.script.probe.endings import WITH_ACCUMULATE
from dpsim.torch.script.profile_script import profile_script
from dpsim.torch.script.recorded import joined
from dpsim.workload import Workload

_BATCHES = (2, 4)
"""The local batches that are compared where none are given: so many times the script's own."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A script's workload at its own local batch, which is the first of ``batches``, and at others.

    ``refusal`` says why no others, or no larger ones, were profiled where none were asked for. ``cannot_accumulate``
    says what the script has that keeps it from being made to accumulate.
    """

    workload: Workload
    batches: tuple[int, ...]
    refusal: ConfigError | None
    cannot_accumulate: str = ""


def profiled(study: ScriptStudy, local_batches: Sequence[int], progress: Progress) -> Profiled:
    """Profile the script of a study at its own batch and at ``local_batches``, or at twice and four times its own.

    Raises ``ConfigError`` where the script cannot be profiled, or not at one of the given batches.
    """
    request = study.request
    progress(f"profiling {request.name} as rank 0 of {request.devices} in one process")
    refusal, cannot_accumulate = None, ""
    try:
        workloads = [profile_script(msgspec.structs.replace(request, accumulates=True), by=study.by)]
    except ConfigError as error:
        if not error.given.startswith(WITH_ACCUMULATE):
            raise
        cannot_accumulate = error.given.removeprefix(WITH_ACCUMULATE)
        workloads = [profile_script(request, by=study.by)]
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
            workloads.append(profile_script(request, [batch], by=study.by))
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
    """Return what is best on this machine, and the workload and machine that say so, both measured in turns.

    The experiment has one network. The predictions are those of the study, which writes them into ``folder``.
    """
    batches = known.batches[: len(known.batches) if len(known.batches) > 1 else 0]
    declared = study.experiment
    axes = declared.axes | ({"local_batch": tuple(sorted(batches))} if batches else {})
    batched = replace(study, experiment=msgspec.structs.replace(declared, axes=axes), seen=known.workload)
    predictions = batched.predict(folder, progress)
    (workload,), (machine,) = predictions.workloads, predictions.machines
    plan = predictions.points[-1].setting.plan
    grid = Grid.of(
        devices=declared.values("devices"), local_batch=known.batches, algorithm=plan.algorithm, overlap=plan.overlap
    )
    tuning = tune(workload, machine, grid)
    return tuning, workload, machine
