"""What predictions need: a profile of each training, and a calibration of each network.

Both are measured in one job. Where computation is emulated a second job calibrates, which needs the profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.data.sharding import largest_share
from dpsim.fields import Decides, deciding
from dpsim.harness import models
from dpsim.harness.calibrate.calibrate import CalibrateConfig, machine
from dpsim.harness.measurement.environment import environment
from dpsim.harness.profile.profile import Profile, ProfileConfig
from dpsim.launch.jobs import on_ranks
from dpsim.machine import ComputeSlowdown, Machine
from dpsim.plan import Plan
from dpsim.predict.prices import local_share
from dpsim.predict.waiting import median_slowest
from dpsim.progress import Progress
from dpsim.runtime.describe import describe
from dpsim.setting import Setting
from dpsim.workload import Workload

_MOST_S, _LEAST_S = 12.0, 2.0
Kind = tuple[Any, ...]
Kinds = tuple[Kind, Kind]
"""The kind of a setting's profile, and the kind of its calibration."""
Place = tuple[int, int]
"""The place of a setting's workload among the workloads, and of its machine among the machines."""


def profile_kind(setting: Setting) -> Kind:
    """What tells two profiles apart: the computation. Leaves are slices of a global batch, so that belongs to them."""
    plan = setting.plan
    return *setting.identity(Decides.COMPUTE_TIME), plan.global_batch if plan.leaves else 0


def calibration_kind(setting: Setting) -> Kind:
    """What tells two calibrations apart: the network, what is sent, and the computation beside which it is measured."""
    return setting.where, *setting.identity(Decides.NETWORK_TIME)


def kinds_of(setting: Setting) -> Kinds:
    """Settings of equal kinds are predicted from one workload and one machine."""
    return profile_kind(setting), calibration_kind(setting)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Profiled workloads and calibrated machines, and which of them each kind of setting has.

    A machine's compute slowdown and uncertainty are those of the workload with which it is used.
    """

    workloads: tuple[Workload, ...]
    machines: tuple[Machine, ...]
    places: dict[Kinds, Place]

    @classmethod
    def for_all(cls, settings: Iterable[Setting], workload: Workload, machine: Machine) -> Prepared:
        """One workload and one machine for all settings."""
        places = {kinds_of(setting): (0, 0) for setting in settings}
        return cls(workloads=(workload,), machines=(machine,), places=places)

    def place(self, setting: Setting) -> Place:
        """The places of a setting's workload and machine."""
        return self.places[kinds_of(setting)]

    def name(self, setting: Setting) -> str:
        """What the settings with one workload and machine are called: where they run, with a number where it needs one.

        ``node``, or ``node (2)`` for the second kind of computation on it.
        """
        of_network = [kinds for kinds in self.places if kinds[1][0] == setting.where]
        number = of_network.index(kinds_of(setting))
        return f"{setting.where} ({number + 1})" if number else setting.where


def prepare(
    settings: Sequence[Setting],
    progress: Progress,
    *,
    dataset: str,
    seed: int,
    overlaps: Sequence[str],
    budget_s: float,
    interpolates: bool = False,
) -> Prepared:
    """Profile and calibrate for every setting; ``overlaps`` are the mechanisms to calibrate.

    A machine's compute slowdown is that of the model itself, measured at the local batches that will be run; where
    computation is emulated it is the waiting for the slowest device. It takes ``budget_s``, but no more than 12 s and
    no less than 2 for each kind of computation, and as much for the calibrations where computation is emulated. With
    ``interpolates`` only every other local batch is profiled.
    """
    profiles = _by_kind(settings, profile_kind)
    calibrations = _by_kind([each for each in settings if not each.emulated_compute], calibration_kind)
    emulated = _by_kind([each for each in settings if each.emulated_compute], calibration_kind)
    seconds = _seconds_of_kind(budget_s)
    data = _Data(dataset, seed, interpolates)
    job = _Job(progress, profiles=[data.profile(members) for members in profiles.values()])
    configs = [data.calibration(members, overlaps) for members in calibrations.values()]
    results = job.run(configs, seconds * len(profiles), _most_devices(calibrations))
    profiled = {
        kind: codec.decode(plain, Profile, "profile") for kind, plain in zip(profiles, results["profiles"], strict=True)
    }
    links = _machines(calibrations, results)
    if emulated:
        configs = [
            msgspec.structs.replace(
                data.calibration(members, overlaps), workload=profiled[profile_kind(members[0])].workload
            )
            for members in emulated.values()
        ]
        results = _Job(progress).run(configs, seconds * len(emulated), _most_devices(emulated))
        links |= _machines(emulated, results)
    return _prepared(settings, profiled, links, emulated)


def preparation_s(settings: Sequence[Setting], budget_s: float) -> float:
    """Return the least seconds that ``prepare`` measures for; it goes on for up to twice as long."""
    profiles = len(_by_kind(settings, profile_kind))
    emulated = len(_by_kind([each for each in settings if each.emulated_compute], calibration_kind))
    return _seconds_of_kind(budget_s) * (profiles + emulated)


def _seconds_of_kind(budget_s: float) -> float:
    return min(max(budget_s, _LEAST_S), _MOST_S)


def _prepared(
    settings: Sequence[Setting],
    profiled: Mapping[Kind, Profile],
    links: Mapping[Kind, Machine],
    emulated: Mapping[Kind, Sequence[Setting]],
) -> Prepared:
    """Join each profile with the calibrations of the settings that it is used for.

    ``links`` are calibrated machines without the slowdown of computation, and ``emulated`` the settings whose
    computation is emulated; both by kind of calibration.
    """
    workloads = [profile.workload for profile in profiled.values()]
    machines: list[Machine] = []
    places: dict[Kinds, Place] = {}
    for setting in settings:
        kinds = kinds_of(setting)
        if kinds in places:
            continue
        profile, link = profiled[kinds[0]], links[kinds[1]]
        workload = profile.workload
        if setting.emulated_compute:
            workload = msgspec.structs.replace(workload, emulated_compute=True)
            machines.append(_without_cores(link, workload, emulated[kinds[1]]))
        else:
            machines.append(
                msgspec.structs.replace(
                    link,
                    compute_slowdown=profile.compute_slowdown,
                    relative_uncertainty=profile.relative_uncertainty,
                )
            )
        if workload not in workloads:
            workloads.append(workload)
        places[kinds] = workloads.index(workload), len(machines) - 1
    return Prepared(workloads=tuple(workloads), machines=tuple(machines), places=places)


def _by_kind(settings: Sequence[Setting], kind: Callable[[Setting], Kind]) -> dict[Kind, list[Setting]]:
    kinds: dict[Kind, list[Setting]] = {}
    for setting in settings:
        kinds.setdefault(kind(setting), []).append(setting)
    return kinds


def _most_devices(kinds: Mapping[Kind, Sequence[Setting]]) -> int:
    return max((setting.plan.devices for members in kinds.values() for setting in members), default=1)


@dataclass(frozen=True)
class _Job:
    """A job of ranks that profiles and calibrates."""

    progress: Progress
    profiles: Sequence[ProfileConfig] = ()

    def run(self, calibrations: Sequence[CalibrateConfig], seconds: float, devices: int) -> dict[str, Any]:
        """The results of ``prepare_on_ranks``."""
        results: dict[str, Any] = on_ranks(
            "dpsim.harness.sweep.prepare_on_ranks:prepare_on_ranks",
            {
                "profiles": [codec.to_builtins(profile) for profile in self.profiles],
                "calibrations": [codec.to_builtins(calibration) for calibration in calibrations],
                "seconds": seconds,
            },
            devices=devices,
            progress=self.progress,
            pin=True,
        )
        return results


def _machines(calibrations: Mapping[Kind, Sequence[Setting]], results: dict[str, Any]) -> dict[Kind, Machine]:
    """The machines that a job's tables describe, by kind of calibration."""
    measured_in, ranks = environment(), _most_devices(calibrations)
    return {
        kind: machine(members[0].network, tables, ranks, measured_in)
        for (kind, members), tables in zip(calibrations.items(), results["machines"], strict=True)
    }


def _without_cores(link: Machine, workload: Workload, settings: Sequence[Setting]) -> Machine:
    """The machine of devices that wait: they share no cores, and each waits for the slowest."""
    counts = sorted({setting.plan.devices for setting in settings} - {1})
    slowest = tuple(ComputeSlowdown(devices=count, factor=median_slowest(workload, count)) for count in counts)
    return msgspec.structs.replace(link, compute_slowdown=slowest, relative_uncertainty=None, cores=0)


def _ends(batches: set[int]) -> tuple[int, ...]:
    """The smallest and the largest of some local batches; the one if they are the same."""
    return tuple(sorted({min(batches), max(batches)}))


@dataclass(frozen=True)
class _Data:
    """The data set on which settings are profiled and calibrated."""

    name: str
    seed: int
    interpolates: bool

    def profile(self, settings: Sequence[Setting]) -> ProfileConfig:
        """The profile of settings with one computation, at the local batches that they compute.

        Several devices compute at once only where computation is real: at their smallest and largest local batch.
        """
        first, plans = settings[0], [setting.plan for setting in settings]
        shares: dict[int, set[int]] = {}
        for plan in (setting.plan for setting in settings if not setting.emulated_compute):
            shares.setdefault(plan.devices, set()).add(math.ceil(local_share(plan)))
        together = [(devices, batch) for devices, of_devices in shares.items() for batch in _ends(of_devices)]
        batches = {math.ceil(local_share(plan)) for plan in plans}
        if self.interpolates:
            ascending = sorted(batches)
            batches = {*ascending[::2], ascending[-1], *(batch for _, batch in together)}
        whole = largest_share(first.plan.global_batch, 1, first.plan.leaves) / first.plan.accumulate
        computation = {name: getattr(first.plan, name) for name in deciding(Decides.COMPUTE_TIME, Plan)}
        computation["leaves"] = math.ceil(first.plan.leaves * max(batches) / whole)
        return ProfileConfig(
            model=first.model,
            dataset=self.name,
            local_batches=tuple(sorted(batches)),
            concurrent=tuple(together),
            seed=self.seed,
            plan=Plan(devices=1, global_batch=max(batches), fusion_rule="one", **computation),
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
            compute_dtype=first.plan.compute_dtype,
            sums=any(setting.plan.batch_norm != "local" for setting in settings),
            strategy="zero1" if any(setting.plan.strategy == "zero1" for setting in settings) else "data-parallel",
        )
