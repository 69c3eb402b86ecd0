"""The predictions of a measurement of DDP: from a one-process profile and a calibration of its allreduces alone."""

from __future__ import annotations

import msgspec

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.harness.measurement.loop import LEAST_ROUNDS
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.harness.torch_ddp.contention import Effort, computed_s, profiled, profiled_on_cores
from dpsim.harness.torch_ddp.experiment import MOST_CAPS, DdpConfig, experiment_of
from dpsim.harness.torch_ddp.task import CalibrationTask
from dpsim.launch.jobs import on_ranks
from dpsim.launch.scratch import scratch
from dpsim.machine import Machine
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, Predictions
from dpsim.setting import Setting, setting_of
from dpsim.study.calibration import calibrated_machine
from dpsim.study.inputs import Indices, Kinds, Prepared, kinds_of
from dpsim.study.rows import Rows, Series
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.torch_ddp.tables import joined
from dpsim.units import format_duration
from dpsim.workload import Workload

_LONG_BUDGET_S = 40.0
_CALIBRATION_S, _PROFILE_S = 10.0, 3.0
"""What preparing takes where the budget of the measuring is at least the long one."""
_CALIBRATION_STRETCH = 1.5
"""How much longer a calibration takes than its seconds: between its least and twice that."""
_REPEAT_S, _MOST_REPEATS = 15.0, 5
"""For so much of the budget every profile is repeated once, so that they see the speeds of a machine that changes."""


def predicted(config: DdpConfig, workload: Workload | None, progress: Progress) -> Predictions:
    """Profile (unless there is a ``workload``), calibrate, and predict every setting. Raises ``ConfigError``.

    With a short budget these are short, too.
    """
    own = ScriptRequest(
        script=config.script,
        arguments=config.arguments,
        devices=config.most_devices,
        must_end=True,
        script_may_write=config.script_may_write,
    )
    batches = sorted(config.local_batches)
    if workload is not None:
        batches = sorted({*batches[:1], *batches[-1:]})  # the profiles in between are there already
    requests = [msgspec.structs.replace(own, local_batch=batch) for batch in batches] or [own]
    share = min(config.budget_s / _LONG_BUDGET_S, 1.0)
    repeats = min(max(round(config.budget_s / _REPEAT_S), 1), _MOST_REPEATS)
    effort = Effort(seconds=share * _PROFILE_S, repeats=repeats)
    progress(_at_most(config, len(requests), effort, share * _CALIBRATION_S))
    progress(f"profiling {config.script} as rank 0 of {config.most_devices} in one process")
    began_s = now()
    firsts = [profiled_on_cores(request, 1)[0] for request in requests]
    start_s = (now() - began_s) / len(requests)
    first = joined(firsts)
    _check_same_batch(workload, first)
    experiment = experiment_of(config, workload or first)
    progress(_how_long(experiment, len(requests), start_s, effort, share * _CALIBRATION_S))
    machines, indices = _machines(experiment, workload or first, share * _CALIBRATION_S, progress)
    alone, machines = profiled(requests, [*map(computed_s, firsts)], machines, effort, progress)
    prepared = Prepared(workloads=(workload or alone,), machines=tuple(machines), indices=indices)
    return predict_experiment(experiment, prepared, environment())


def _at_most(config: DdpConfig, batches: int, effort: Effort, calibration_s: float) -> str:
    """Say what is done at most, before the script has run once."""
    several, cases = len({*config.devices} - {1}), len(config.cases())
    caps = len(config.caps_bytes) or (1 if config.local_batches else MOST_CAPS)
    settings = cases * max(len(config.local_batches), 1) * (several * caps + (1 in config.devices))
    profiles = _profiles(effort, batches, cases, several)
    return (
        f"at most {settings} settings: {batches + profiles} profiles of about {effort.seconds:.2g} s and the script's"
        f" start, and {cases} calibrations of up to {2 * calibration_s:.2g} s; then DDP trains for the budget of"
        f" {format_duration(config.budget_s)}, or longer if {LEAST_ROUNDS} rounds of all settings need it"
    )


def _profiles(effort: Effort, batches: int, kinds: int, counts: int) -> int:
    """Return how many profiles follow the first of each batch: alone, and of several processes at once."""
    return effort.repeats * (batches + min(batches, 2) * kinds * counts)


def _how_long(experiment: Experiment, batches: int, start_s: float, effort: Effort, calibration_s: float) -> str:
    """Say how long the rest will take, where a process is started in ``start_s``."""
    settings = [setting_of(row) for row in experiment.rows]
    kinds = len({kinds_of(setting) for setting in settings})
    counts = len({setting.plan.devices for setting in settings} - {1})
    profiles = _profiles(effort, batches, kinds, counts)
    calibrations_s = kinds * (start_s + _CALIBRATION_STRETCH * calibration_s)
    preparation_s = profiles * (start_s + effort.seconds) + calibrations_s
    return (
        f"calibration and {profiles} more profiles will take about {format_duration(round(preparation_s))}; DDP then"
        f" trains for the budget of {format_duration(experiment.budget_s)}, or longer if {LEAST_ROUNDS} rounds need it"
    )


def _check_same_batch(workload: Workload | None, now: Workload) -> None:
    """Raises ``ConfigError`` unless the script trains now on a batch that the workload was profiled at."""
    if workload is not None and not {*now.local_batches} <= {*workload.local_batches}:
        raise ConfigError(
            f"the script trains on {now.local_batches[0]} samples at once, and the workload was profiled at "
            f"{', '.join(map(str, workload.local_batches))}",
            allowed="a profile of the same training",
            remedy="give the script the arguments that it was profiled with, or leave --workload out",
        )


def _machines(
    experiment: Experiment, workload: Workload, seconds: float, progress: Progress
) -> tuple[list[Machine], dict[Kinds, Indices]]:
    """A machine for each network and way to communicate, and which of them each kind of setting has."""
    settings = [setting_of(row) for row in experiment.rows]
    machines: list[Machine] = []
    indices: dict[Kinds, Indices] = {}
    for setting in settings:
        kinds = kinds_of(setting)
        if kinds not in indices:
            of_place = [each for each in settings if each.where == setting.where]
            machines.append(_calibrated(of_place, workload, seconds, progress))
            indices[kinds] = 0, len(machines) - 1
    return machines, indices


def _calibrated(settings: list[Setting], workload: Workload, seconds: float, progress: Progress) -> Machine:
    """What the allreduces of these settings cost, alone and beside a backward."""
    first = next(setting for setting in settings if setting.plan.devices > 1)
    counts = tuple(sorted({setting.plan.devices for setting in settings} - {1}))
    with scratch("ddp") as folder:
        task = CalibrationTask(
            network=first.network,
            runtime=first.runtime,
            algorithm=first.plan.algorithm,
            overlap=first.plan.overlap,
            devices=counts,
            max_bytes=max(workload.gradient_bytes, 1024),
            seconds=seconds,
            folder=str(folder),
        )
        measured = on_ranks(
            "dpsim.harness.torch_ddp.calibrate_on_ranks:calibrate_on_ranks",
            dict(codec.to_builtins(task)),
            devices=max(counts),
            progress=progress,
            pin=True,
        )
    rows = Rows(codec.decode(plain, Series, "calibration") for plain in measured["rows"])
    calibrated = calibrated_machine(first.network, task.collectives(), rows, (), environment(), stamp())
    return msgspec.structs.replace(
        calibrated, calibrated_on=f"{calibrated.calibrated_on}, {first.runtime}", source="dpsim measure"
    )
