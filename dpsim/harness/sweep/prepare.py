"""What predictions need, measured in one job: a profile of each training, and a calibration of each network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.data.sharding import largest_share
from dpsim.harness import models
from dpsim.harness.calibrate.calibrate import CalibrateConfig, machine
from dpsim.harness.measurement.environment import environment
from dpsim.harness.profile.profile import Profile, ProfileConfig
from dpsim.launch.jobs import on_ranks
from dpsim.machine import Machine
from dpsim.predict.prices import local_share
from dpsim.progress import Progress
from dpsim.runtime.describe import describe
from dpsim.setting import Setting
from dpsim.workload import Workload

_MOST_S, _LEAST_S = 12.0, 2.0
Kind = tuple[Any, ...]


def profile_kind(setting: Setting) -> Kind:
    """What tells two profiles apart: the computation. Leaves are slices of a global batch, so that belongs to them."""
    plan = setting.plan
    batch = plan.global_batch if plan.leaves else 0
    return setting.model, plan.optimizer, plan.leaves, plan.batch_norm, batch


def calibration_kind(setting: Setting) -> Kind:
    """What tells two calibrations apart: the network, what is sent, and the model beside which it is measured."""
    return setting.network, setting.plan.wire_dtype, setting.model


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Profiled workloads and calibrated machines, and which of them each kind of setting has.

    A machine's compute slowdown and speeds are those of the workload with which it is used.
    """

    workloads: tuple[Workload, ...]
    machines: tuple[Machine, ...]
    places: dict[Kind, tuple[int, int]]

    def place(self, setting: Setting) -> tuple[int, int]:
        """The places of a setting's workload and machine."""
        return self.places[profile_kind(setting), calibration_kind(setting)]

    def name(self, setting: Setting) -> str:
        """What the settings with one workload and machine are called: their network, with a number where it needs one.

        ``node``, or ``node (2)`` for the second kind of computation on it.
        """
        mine = (profile_kind(setting), calibration_kind(setting))
        of_network = [kinds for kinds in self.places if kinds[1][0] == setting.network]
        number = of_network.index(mine)
        return f"{setting.network} ({number + 1})" if number else setting.network


def prepare(
    settings: Sequence[Setting],
    progress: Progress,
    *,
    dataset: str,
    seed: int,
    overlaps: Sequence[str],
    budget_s: float,
) -> Prepared:
    """Profile and calibrate for every setting, in one job; ``overlaps`` are the mechanisms to calibrate.

    A machine's compute slowdown is that of the model itself, measured at the local batches that will be run. It takes
    ``budget_s``, but no more than 12 s and no less than 2 for each kind of computation.
    """
    profiles: dict[Kind, list[Setting]] = {}
    calibrations: dict[Kind, list[Setting]] = {}
    for setting in settings:
        profiles.setdefault(profile_kind(setting), []).append(setting)
        calibrations.setdefault(calibration_kind(setting), []).append(setting)
    most_devices = max(setting.plan.devices for setting in settings)
    seconds = min(max(budget_s, _LEAST_S), _MOST_S) * len(profiles)
    data = _Data(dataset, seed)
    results = on_ranks(
        "dpsim.harness.sweep.prepare_on_ranks:prepare_on_ranks",
        {
            "profiles": [codec.to_builtins(data.profile(members)) for members in profiles.values()],
            "calibrations": [
                codec.to_builtins(data.calibration(members, overlaps)) for members in calibrations.values()
            ],
            "seconds": seconds,
        },
        devices=most_devices,
        progress=progress,
        pin=True,
    )
    profiled = [codec.decode(plain, Profile, "profile") for plain in results["profiles"]]
    measured_in = environment()
    calibrated = [
        machine(members[0].network, tables, most_devices, measured_in)
        for members, tables in zip(calibrations.values(), results["machines"], strict=True)
    ]
    machines: list[Machine] = []
    places: dict[Kind, tuple[int, int]] = {}
    numbers = list(profiles), list(calibrations)
    for setting in settings:
        kinds = profile_kind(setting), calibration_kind(setting)
        if kinds not in places:
            of_workload, of_tables = (known.index(kind) for known, kind in zip(numbers, kinds, strict=True))
            places[kinds] = of_workload, len(machines)
            profile = profiled[of_workload]
            machines.append(
                msgspec.structs.replace(
                    calibrated[of_tables], compute_slowdown=profile.compute_slowdown, speed=profile.speed
                )
            )
    workloads = tuple(profile.workload for profile in profiled)
    return Prepared(workloads=workloads, machines=tuple(machines), places=places)


@dataclass(frozen=True)
class _Data:
    """The data set on which settings are profiled and calibrated."""

    name: str
    seed: int

    def profile(self, settings: Sequence[Setting]) -> ProfileConfig:
        """The profile of settings with one computation, at the local batches that they compute."""
        first, plans = settings[0], [setting.plan for setting in settings]
        shares: dict[int, int] = {}
        for plan in plans:
            shares[plan.devices] = max(shares.get(plan.devices, 0), math.ceil(local_share(plan)))
        batches = {math.ceil(local_share(plan)) for plan in plans}
        whole = largest_share(first.plan.global_batch, 1, first.plan.leaves) / first.plan.accumulate
        return ProfileConfig(
            model=first.model,
            dataset=self.name,
            local_batches=tuple(sorted(batches)),
            optimizer=first.plan.optimizer,
            concurrent=tuple(shares.items()),
            seed=self.seed,
            leaves=math.ceil(first.plan.leaves * max(batches) / whole),
            batch_norm=first.plan.batch_norm,
        )

    def calibration(self, settings: Sequence[Setting], overlaps: Sequence[str]) -> CalibrateConfig:
        """The calibration of settings with one network, beside the model at the batch of the most devices."""
        first, dataset = settings[0], load_dataset(self.name, self.seed)
        most = max(settings, key=lambda setting: setting.plan.devices)
        model = models.load(first.model, dataset.input_shape, dataset.classes).replica()
        size = describe(model, first.model).gradient_bytes
        tokens = dict.fromkeys(setting.plan.layout or setting.plan.devices for setting in settings)
        return CalibrateConfig(
            network=first.network,
            devices=tuple(tokens),
            algorithms=tuple(dict.fromkeys(setting.plan.algorithm for setting in settings)),
            overlaps=tuple(overlaps),
            model=first.model,
            dataset=self.name,
            local_batch=math.ceil(local_share(most.plan)),
            max_bytes=max(size, 1024),
            wire_dtype=first.plan.wire_dtype,
            strategy="zero1" if any(setting.plan.strategy == "zero1" for setting in settings) else "data-parallel",
        )
