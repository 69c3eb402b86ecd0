"""The predictions of a measurement of DDP: from a one-process profile and a calibration of its allreduces alone."""

from __future__ import annotations

import tempfile
from typing import Any, TypeVar

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.calibrate.calibrate import machine
from dpsim.harness.measurement.environment import environment
from dpsim.harness.profile.slowdown import joined_slowdown
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.harness.sweep.prepare import Prepared, calibration_kind, profile_kind
from dpsim.harness.torch_ddp.contention import compute_slowdown, computed_s, profiled_on_cores
from dpsim.harness.torch_ddp.experiment import DdpConfig, experiment_of
from dpsim.harness.torch_ddp.task import CalibrationTask
from dpsim.launch.jobs import on_ranks
from dpsim.machine import ComputeSlowdown, Machine
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, Predictions
from dpsim.setting import Setting, setting_of
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.torch_ddp.tables import joined
from dpsim.workload import Workload

_CALIBRATION_S = 5.0
_REPEATS = 2
Value = TypeVar("Value")


def predicted(config: DdpConfig, workload: Workload | None, progress: Progress) -> Predictions:
    """Profile (unless there is a ``workload``), calibrate, and predict every setting. Raises ``ConfigError``."""
    own = ScriptRequest(script=config.script, arguments=config.arguments, devices=config.most_devices)
    batches = sorted(config.local_batches)
    if workload is not None:
        batches = _ends(batches)  # the profiles in between are there already
    requests = [msgspec.structs.replace(own, local_batch=batch) for batch in batches] or [own]
    progress(f"profiling {config.script} as rank 0 of {config.most_devices} in one process")
    alone = [[profiled_on_cores(request, 1)[0] for _ in range(_REPEATS)] for request in requests]
    _check_same_batch(workload, alone[0][0])
    workload = workload or joined([min(profiles, key=computed_s) for profiles in alone])
    experiment = experiment_of(config, workload)
    slowdowns = []
    for devices in sorted({*config.devices} - {1}):
        progress(f"profiling {devices} such processes at once")
        measured = [
            (min(map(computed_s, profiles)), compute_slowdown(request, profiles, devices))
            for request, profiles in _ends(list(zip(requests, alone, strict=True)))
        ]
        slowdowns.append(joined_slowdown(measured))
    return predict_experiment(experiment, _prepared(experiment, workload, tuple(slowdowns), progress), environment())


def _ends(values: list[Value]) -> list[Value]:
    """The first and the last value; all of them where there are fewer."""
    return values if len(values) < 2 else [values[0], values[-1]]


def _check_same_batch(workload: Workload | None, now: Workload) -> None:
    """Raises ``ConfigError`` unless the script trains now on a batch that the workload was profiled at."""
    if workload is not None and not {*now.local_batches} <= {*workload.local_batches}:
        raise ConfigError(
            f"the script trains on {now.local_batches[0]} samples at once, and the workload was profiled at "
            f"{', '.join(map(str, workload.local_batches))}",
            allowed="a profile of the same training",
            remedy="give the script the arguments that it was profiled with, or leave --workload out",
        )


def _prepared(
    experiment: Experiment, workload: Workload, slowdowns: tuple[ComputeSlowdown, ...], progress: Progress
) -> Prepared:
    """The workload, and a machine for each network and way to communicate."""
    settings = [setting_of(row) for row in experiment.rows]
    machines: list[Machine] = []
    places: dict[tuple[Any, ...], tuple[int, int]] = {}
    for setting in settings:
        kinds = profile_kind(setting), calibration_kind(setting)
        if kinds not in places:
            of_place = [each for each in settings if each.where == setting.where]
            calibrated = _calibrated(of_place, workload, progress)
            machines.append(msgspec.structs.replace(calibrated, compute_slowdown=slowdowns))
            places[kinds] = 0, len(machines) - 1
    return Prepared(workloads=(workload,), machines=tuple(machines), places=places)


def _calibrated(settings: list[Setting], workload: Workload, progress: Progress) -> Machine:
    """What the allreduces of these settings cost, alone and beside a backward."""
    first = next(setting for setting in settings if setting.plan.devices > 1)
    counts = tuple(sorted({setting.plan.devices for setting in settings} - {1}))
    with tempfile.TemporaryDirectory(prefix="dpsim-ddp-") as folder:
        task = CalibrationTask(
            network=first.network,
            runtime=first.runtime,
            algorithm=first.plan.algorithm,
            overlap=first.plan.overlap,
            devices=counts,
            max_bytes=max(workload.gradient_bytes, 1024),
            seconds=_CALIBRATION_S,
            folder=folder,
        )
        tables = on_ranks(
            "dpsim.harness.torch_ddp.calibrate_on_ranks:calibrate_on_ranks",
            dict(codec.to_builtins(task)),
            devices=max(counts),
            progress=progress,
            pin=True,
        )
    calibrated = machine(first.network, tables, max(counts), environment())
    return msgspec.structs.replace(
        calibrated, calibrated_on=f"{calibrated.calibrated_on}, {first.runtime}", source="dpsim measure"
    )
