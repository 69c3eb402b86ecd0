"""What is profiled and calibrated at each place where a script is measured: a network, and a way to communicate."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpsim.dates import stamp
from dpsim.grouping import grouped
from dpsim.model.residuals import all_widths
from dpsim.model.version import MODEL_VERSION
from dpsim.records.sweep import Environment, Experiment
from dpsim.setting import Setting
from dpsim.study.calibration import CalibrateConfig
from dpsim.study.inputs import Inputs
from dpsim.study.profile import ProfileConfig
from dpsim.units import ITEM_BYTES
from dpsim.workload import Workload

_MOST_SIZES = 6


def settings_by_place(experiment: Experiment) -> Mapping[str, list[Setting]]:
    """Return the settings of each place of an experiment, in the order of its rows."""
    return grouped(experiment.settings, lambda setting: setting.where)


def inputs_for(
    experiment: Experiment, workload: Workload, environment: Environment, *, times_given: bool = False
) -> Inputs:
    """Return the inputs of a study of a script before anything was visited: a profile and a calibration a place.

    The profile is that of the script in one process at each local batch, and in several at once at the smallest and the
    largest; where numbers of micro-batches are compared, also with the middle one of them at the largest. With
    ``times_given`` the workload's times stand, as the user gave them.
    """
    places = settings_by_place(experiment).values()
    return Inputs(
        model_version=MODEL_VERSION,
        profiles=tuple(_profile(experiment, settings, times_given=times_given) for settings in places),
        bare=tuple(workload for _ in places),
        calibrations=tuple(_calibration(settings, workload) for settings in places),
        selections=tuple(() for _ in places),
        rows=(),
        widths=all_widths(()),
        environment=environment,
        measured_until=stamp(),
    )


def _counts(settings: list[Setting]) -> tuple[int, ...]:
    return tuple(sorted({setting.plan.devices for setting in settings} - {1}))


def _profile(experiment: Experiment, settings: list[Setting], *, times_given: bool) -> ProfileConfig:
    batches = sorted({int(setting.plan.local_batch) for setting in settings})
    ends = sorted({batches[0], batches[-1]})
    numbers = sorted({setting.plan.accumulate for setting in settings})
    several = [number for number in numbers if number > 1] if len(numbers) > 1 else []
    return ProfileConfig(
        model=settings[0].model,
        dataset=experiment.dataset,
        local_batches=tuple(batches),
        concurrent=tuple((devices, batch) for batch in ends for devices in _counts(settings)),
        accumulated=tuple((number, batches[-1]) for number in several[len(several) // 2 :][:1]),
        seed=experiment.seed,
        times_given=times_given,
    )


def _calibration(settings: list[Setting], workload: Workload) -> CalibrateConfig:
    first = next(setting for setting in settings if setting.plan.devices > 1)
    return CalibrateConfig(
        network=first.network,
        devices=_counts(settings),
        algorithms=(first.plan.algorithm,),
        overlaps=("thread",) if first.plan.overlap == "thread" else (),
        max_bytes=max(workload.gradient_bytes, 1024),
        slowdown=False,
        runtime=first.runtime,
        strategy=first.plan.strategy,
        sizes_bytes=_unit_sizes(workload, settings),
        gather_dtype=workload.most_common_dtype("gathered"),
        reduce_dtype=workload.most_common_dtype("reduced"),
    )


def _unit_sizes(workload: Workload, settings: list[Setting]) -> tuple[int, ...]:
    """The different sizes of FSDP's units in float32, padded, or some with the least and the largest; none with DDP."""
    assert workload.ddp is not None
    layers = workload.layers if workload.ddp.units else ()
    counts = {setting.plan.shard_devices for setting in settings if setting.plan.devices > 1}
    padded = {sum(each.padded(count) for each in layer.tensors) for layer in layers for count in counts}
    sizes = sorted(ITEM_BYTES["float32"] * size for size in padded)
    places = np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST_SIZES))
    return tuple(sizes[int(place)] for place in places)
