"""The predictions of a measurement of DDP: from a one-process profile and a calibration of its allreduces alone."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import msgspec

from dpsim import codec
from dpsim.harness.calibrate.calibrate import machine
from dpsim.harness.measurement.environment import environment
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.harness.sweep.prepare import Kind, Prepared, calibration_kind, profile_kind
from dpsim.harness.torch_ddp.contention import compute_slowdown, computed_s, longer, median_profile, profiled_on_cores
from dpsim.harness.torch_ddp.experiment import DdpConfig, experiment_of
from dpsim.harness.torch_ddp.task import CalibrationTask
from dpsim.launch.jobs import on_ranks
from dpsim.machine import Machine
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, Predictions
from dpsim.setting import Setting, setting_of
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.workload import Workload

_CALIBRATION_S = 10.0
_REPEATS = 3


def predicted(config: DdpConfig, workload: Workload | None, progress: Progress) -> Predictions:
    """Profile (unless there is a ``workload``), calibrate, and predict every setting. Raises ``ConfigError``."""
    request = ScriptRequest(script=config.script, arguments=config.arguments, devices=config.most_devices)
    progress(f"profiling {config.script} as rank 0 of {config.most_devices} in one process")
    first = profiled_on_cores(request, 1)[0]
    experiment = experiment_of(config, workload or first)
    machines, places = _machines(experiment, workload or first, progress)
    alone, machines = _with_slowdowns(request, computed_s(first), machines, progress)
    prepared = Prepared(workloads=(workload or alone,), machines=tuple(machines), places=places)
    return predict_experiment(experiment, prepared, environment())


def _with_slowdowns(
    request: ScriptRequest, step_s: float, machines: Sequence[Machine], progress: Progress
) -> tuple[Workload, list[Machine]]:
    """The median profile of one process, and the machines with how much longer several at once compute.

    Those pause in each step for as long as an allreduce of all gradients takes on the machine. The profiles alternate,
    for the machine's speed changes by itself.
    """
    alone: list[Workload] = []
    together: dict[tuple[int, int], list[list[Workload]]] = {}
    for repeat in range(_REPEATS):
        progress(f"profiling one process and several at once, {repeat + 1} of {_REPEATS}")
        alone += profiled_on_cores(longer(request, step_s), 1)
        for number, calibrated in enumerate(machines):
            for table in calibrated.allreduce:
                paused = longer(request, step_s, table.time_s[-1])
                together.setdefault((number, table.devices), []).append(profiled_on_cores(paused, table.devices))
    reference = median_profile(alone)
    slowdowns = {key: compute_slowdown(reference, profiles) for key, profiles in together.items()}
    return reference, [
        msgspec.structs.replace(
            calibrated, compute_slowdown=tuple(each for (of, _), each in slowdowns.items() if of == number)
        )
        for number, calibrated in enumerate(machines)
    ]


def _machines(
    experiment: Experiment, workload: Workload, progress: Progress
) -> tuple[list[Machine], dict[Kind, tuple[int, int]]]:
    """A machine for each network and way to communicate, and which of them each kind of setting has."""
    settings = [setting_of(row) for row in experiment.rows]
    machines: list[Machine] = []
    places: dict[Kind, tuple[int, int]] = {}
    for setting in settings:
        kinds = profile_kind(setting), calibration_kind(setting)
        if kinds not in places:
            of_place = [each for each in settings if each.where == setting.where]
            machines.append(_calibrated(of_place, workload, progress))
            places[kinds] = 0, len(machines) - 1
    return machines, places


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
