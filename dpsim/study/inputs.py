"""``Inputs``: what predictions of a study are made from, and nothing else: rows of its profiles and calibrations.

Each training has a profile, and each network a calibration of its own. Whatever was decided before the first measured
sample, and what the ranks that wait take for their times, stands in the same record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.data import load_dataset
from dpsim.data.sharding import largest_share
from dpsim.fields import Decides, deciding
from dpsim.grouping import grouped
from dpsim.lowering.computation import block_sums, output_bytes
from dpsim.machine import NODE, ComputeSlowdown, Machine, Network, Selection
from dpsim.model.conditions import on_network
from dpsim.model.prices import local_share
from dpsim.model.residuals import Widths, all_widths
from dpsim.model.slowest import median_slowest, median_slowest_error
from dpsim.model.uncertainty import NORMAL_95
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.sweep import Environment
from dpsim.runtime.describe import describe
from dpsim.setting import Setting
from dpsim.study import models
from dpsim.study.calibration import CalibrateConfig, calibrated_machine
from dpsim.study.cases import run
from dpsim.study.profile import (
    PARTS,
    ProfileConfig,
    profiled_slowdowns,
    profiled_uncertainty,
    profiled_workload,
    sampling_uncertainty,
    script_workload,
)
from dpsim.study.rows import Rows, Series, with_medians
from dpsim.workload import Workload

SCHEMA = "dpsim.inputs/2"
_MOST_S, _LEAST_S = 12.0, 2.0
_MEASURED_STEPS = 24
"""About as many steps are measured of a setting with emulated computation."""
Kind = tuple[Any, ...]
Kinds = tuple[Kind, Kind]
"""The kind of a setting's profile, and the kind of its network."""
Indices = tuple[int, int]
"""The index of a setting's workload among the workloads, and of its machine among the machines."""


def profile_kind(setting: Setting) -> Kind:
    """Return what tells two profiles apart: the computation. Leaves are slices of a global batch, so it has that.

    A script is profiled in turns with what is measured of it, so it also has a profile for each place.
    """
    plan, place = setting.plan, "" if setting.runtime == "dpsim" else setting.where
    return *setting.identity(Decides.COMPUTE_TIME), plan.global_batch if plan.leaves else 0, place


def calibration_kind(setting: Setting) -> Kind:
    """Return what tells two calibrations apart: the network, what is sent, the computation beside it.

    Conditions of a shaped network are not calibrated.
    """
    return _network_kind(setting.calibrated)


def _network_kind(setting: Setting) -> Kind:
    return setting.where, *setting.identity(Decides.NETWORK_TIME)


def kinds_of(setting: Setting) -> Kinds:
    """Return both kinds: settings of equal kinds are predicted from one workload and one machine."""
    return profile_kind(setting), _network_kind(setting)


class Inputs(Noun, frozen=True):
    """What was profiled and calibrated by an instant (``measured_until``), and how.

    ``bare`` are the workloads of ``profiles`` without their times, and ``selections`` what ``auto`` stands for in each
    of ``calibrations``. A calibration with a ``workload`` is that of ranks which wait for its times. ``rows`` are those
    of profiles and calibrations alone; the first sample was taken after ``beforehand_until``. ``widths`` are
    those of intervals, by the residuals of the machine's past studies when this one began. ``model_version`` is that
    of the model for which they were measured (0: from before versions were recorded). ``unshaped_bytes_per_s`` is what
    the links of shaped hosts carried before they were shaped. Those of a sweep that several jobs measured are ``parts``
    alone, one for each job.
    """

    profiles: tuple[ProfileConfig, ...]
    bare: tuple[Workload, ...]
    calibrations: tuple[CalibrateConfig, ...]
    selections: tuple[tuple[Selection, ...], ...]
    rows: tuple[Series, ...]
    environment: Environment
    measured_until: str
    widths: Widths
    beforehand_until: str = ""
    schema: str = SCHEMA
    model_version: int = 0
    unshaped_bytes_per_s: float = 0.0
    parts: tuple[Inputs, ...] = ()

    def with_medians(self) -> Inputs:
        """Return what the predictions of a finished study are made from: of the parts of steps only the medians."""
        parts = tuple(part.with_medians() for part in self.parts)
        return msgspec.structs.replace(self, rows=with_medians(self.rows, PARTS), parts=parts)

    def early(self) -> Inputs:
        """Return what was measured before the first measured sample."""
        rows = tuple(series.early() for series in self.rows if series.beforehand)
        return msgspec.structs.replace(self, rows=rows, measured_until=self.beforehand_until)

    def late(self) -> Inputs:
        """Return what was measured in turns with the samples."""
        return msgspec.structs.replace(self, rows=tuple(series.late() for series in self.rows))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Workloads and machines, and which of them each kind of setting is predicted from.

    A machine's compute slowdown is that of the workload with which it is used.
    """

    workloads: tuple[Workload, ...]
    machines: tuple[Machine, ...]
    indices: dict[Kinds, Indices]

    @classmethod
    def for_all(cls, settings: Sequence[Setting], workload: Workload, machine: Machine) -> Prepared:
        """Return one workload and one machine for all settings."""
        return cls(workloads=(workload,), machines=(machine,), indices={kinds_of(each): (0, 0) for each in settings})

    def indices_of(self, setting: Setting) -> Indices:
        """Return the indices of a setting's workload and machine."""
        return self.indices[kinds_of(setting)]

    def of(self, setting: Setting) -> tuple[Workload, Machine]:
        """Return the workload and the machine that a setting is predicted from."""
        workload, machine = self.indices_of(setting)
        return self.workloads[workload], self.machines[machine]

    def name(self, setting: Setting) -> str:
        """Return what the settings with one workload and machine are called: where they run, numbered if need be.

        ``node``, or ``node (2)`` for the second kind of computation on it.
        """
        of_network = [kinds for kinds in self.indices if kinds[1][0] == setting.where]
        number = of_network.index(kinds_of(setting))
        return f"{setting.where} ({number + 1})" if number else setting.where


class Needed(Noun, frozen=True):
    """Settings that predictions are wanted of, and on what data they are profiled.

    ``overlaps`` are the mechanisms to calibrate. With ``interpolates`` only every other local batch is profiled.
    Measuring takes ``seconds`` for each kind of computation, and up to twice as long. ``widths`` are those of
    intervals, by the residuals of the machine's past studies (default: none is known). Collectives are calibrated on
    ``calibrated_devices``, or where it is empty on as many devices as any setting has.
    """

    settings: tuple[Setting, ...]
    environment: Environment
    dataset: str
    seed: int
    overlaps: tuple[str, ...]
    seconds: float
    interpolates: bool = False
    widths: Widths = msgspec.field(default_factory=lambda: all_widths(()))
    calibrated_devices: tuple[int, ...] = ()


def networks_of(settings: Sequence[Setting]) -> list[str]:
    """Return the networks that several devices need of one job."""
    return [*dict.fromkeys(setting.network for setting in settings if setting.plan.devices > 1)]


@dataclass(frozen=True)
class Declared:
    """The profiles and calibrations that settings need, by kind; ``emulated`` ones follow the profiles."""

    profiles: dict[Kind, ProfileConfig]
    calibrations: dict[Kind, CalibrateConfig]
    emulated: dict[Kind, CalibrateConfig]
    profile_of: dict[Kind, Kind]
    """The kind of profile that the ranks of an emulated calibration wait for."""
    computed: frozenset[Kind]
    """The kinds of profile of settings that really compute."""

    @property
    def devices(self) -> int:
        """The most devices that any of them needs."""
        counts = [devices for config in self.profiles.values() for devices, _ in config.cases]
        calibrations = [*self.calibrations.values(), *self.emulated.values()]
        return max(counts + [config.ranks for config in calibrations])


def declared(needed: Needed) -> Declared:
    """Return what to profile and calibrate.

    A machine's compute slowdown is that of the model itself, measured at the local batches that will be run; where
    computation is emulated it is the waiting for the slowest device.
    """
    settings = needed.settings
    real = grouped([each for each in settings if not each.emulated_compute], calibration_kind)
    emulated = grouped([each for each in settings if each.emulated_compute], calibration_kind)
    return Declared(
        profiles={kind: _profile(needed, members) for kind, members in grouped(settings, profile_kind).items()},
        calibrations={kind: _calibration(needed, members) for kind, members in real.items()},
        emulated={kind: _calibration(needed, members) for kind, members in emulated.items()},
        profile_of={kind: profile_kind(members[0]) for kind, members in emulated.items()},
        computed=frozenset(profile_kind(setting) for setting in settings if not setting.emulated_compute),
    )


def preparation_s(settings: Sequence[Setting], seconds: float) -> float:
    """Return the least seconds to profile and calibrate before the first measured sample; it may take twice as long.

    Each kind of computation takes ``seconds``.
    """
    profiles = len({profile_kind(setting) for setting in settings})
    emulated = len({calibration_kind(setting) for setting in settings if setting.emulated_compute})
    return seconds * (profiles + emulated)


def seconds_of_kind(budget_s: float) -> float:
    """Return the seconds for each kind of computation: ``budget_s``, but no more than 12 and no less than 2."""
    return min(max(budget_s, _LEAST_S), _MOST_S)


def prepared(settings: Sequence[Setting], inputs: Inputs, *, same_minutes: bool = False) -> Prepared:
    """Return the workloads and machines that the rows describe, for each kind of the settings. A pure function.

    They are to predict a later run, or with ``same_minutes`` what was measured in turns with them.
    """
    scatter = sampling_uncertainty if same_minutes else profiled_uncertainty
    rows, profiles = Rows(inputs.rows), [*dict.fromkeys(map(profile_kind, settings))]
    real_first = sorted(settings, key=lambda setting: setting.emulated_compute)
    calibrations = [*dict.fromkeys(map(calibration_kind, real_first))]
    profiled = [
        (profiled_workload if bare.ddp is None else script_workload)(config, bare, rows, number)
        for number, (config, bare) in enumerate(zip(inputs.profiles, inputs.bare, strict=True))
    ]
    known = inputs.widths["blind" if same_minutes else "beforehand"]
    links = [
        msgspec.structs.replace(_machine(inputs, rows, number), interval_widths=known)
        for number in range(len(calibrations))
    ]
    workloads: list[Workload] = []
    machines: list[Machine] = []
    indices: dict[Kinds, Indices] = {}
    for setting in settings:
        kinds = kinds_of(setting)
        if kinds in indices:
            continue
        of_network = calibration_kind(setting)
        number, calibration = profiles.index(kinds[0]), calibrations.index(of_network)
        link = on_network(links[calibration], Network.parse(setting.network))
        if setting.emulated_compute:
            replayed = inputs.calibrations[calibration].workload
            assert replayed is not None
            workload = msgspec.structs.replace(replayed, emulated_compute=True)
            of_kind = [each for each in settings if calibration_kind(each) == of_network]
            machines.append(_without_cores(link, workload, of_kind))
        else:
            workload = profiled[number]
            network = setting.calibrated.network if setting.runtime == "dpsim" else NODE
            changes = {
                "compute_slowdown": profiled_slowdowns(inputs.profiles[number], rows, number, network),
                "relative_uncertainty": scatter(inputs.profiles[number], rows, number),
            }
            machines.append(msgspec.structs.replace(link, **changes))
        if workload not in workloads:
            workloads.append(workload)
        indices[kinds] = workloads.index(workload), len(machines) - 1
    return Prepared(workloads=tuple(workloads), machines=tuple(machines), indices=indices)


_OF_A_SCRIPT = "dpsim measure"
"""The source of a machine that a script was measured on: hashes of records are of it, so that it never changes."""


def prepare(needed: Needed, progress: Progress) -> Prepared:
    """Profile and calibrate for settings that are not measured afterwards. Raises ``CommunicationError``."""
    devices, networks = declared(needed).devices, networks_of(needed.settings)
    inputs = run("dpsim.study.on_ranks:prepare_on_ranks", needed, devices, progress, networks)
    return prepared(needed.settings, codec.decode(inputs, Inputs, "inputs"))


def _machine(inputs: Inputs, rows: Rows, number: int) -> Machine:
    config = inputs.calibrations[number]
    machine = calibrated_machine(
        config.network,
        config.collectives(number),
        rows,
        inputs.selections[number],
        inputs.environment,
        inputs.measured_until,
        unshaped_bytes_per_s=inputs.unshaped_bytes_per_s,
    )
    if config.runtime == "dpsim":
        return machine
    calibrated_on = f"{machine.calibrated_on}, {config.runtime}"
    if {config.gather_dtype, config.reduce_dtype} != {"float32"}:
        calibrated_on += f", sums of {config.reduce_dtype}, gathers of {config.gather_dtype}"
    of_a_rank = inputs.environment.memory_bytes / config.ranks
    return msgspec.structs.replace(machine, calibrated_on=calibrated_on, source=_OF_A_SCRIPT, memory_bytes=of_a_rank)


def _without_cores(link: Machine, workload: Workload, settings: Sequence[Setting]) -> Machine:
    """Return the machine of devices that wait: they share no cores, and each waits for the slowest."""
    counts = sorted({setting.plan.devices for setting in settings} - {1})
    slowest = tuple(
        ComputeSlowdown(
            devices=count,
            factor=median_slowest(workload, count),
            half_width=NORMAL_95 * median_slowest_error(workload, count, _MEASURED_STEPS),
        )
        for count in counts
    )
    return msgspec.structs.replace(link, compute_slowdown=slowest, relative_uncertainty=None, cores=0)


def _profile(needed: Needed, settings: Sequence[Setting]) -> ProfileConfig:
    """Return the profile of settings with one computation, at the local batches that they compute.

    Several devices compute at once only where computation is real: at their smallest and largest local batch.
    """
    first, plans = settings[0], [setting.plan for setting in settings]
    shares: dict[int, set[int]] = {}
    for plan in (setting.plan for setting in settings if not setting.emulated_compute):
        shares.setdefault(plan.devices, set()).add(math.ceil(local_share(plan)))
    several = {
        (setting.plan.accumulate, math.ceil(local_share(setting.plan)))
        for setting in settings
        if setting.plan.accumulate > 1 and not setting.emulated_compute and setting.runtime == "dpsim"
    }
    together = [(devices, batch) for devices, each in shares.items() for batch in sorted({min(each), max(each)})]
    batches = {math.ceil(local_share(plan)) for plan in plans}
    if needed.interpolates:
        ascending = sorted(batches)
        batches = {*ascending[::2], ascending[-1], *(batch for _, batch in (*together, *several))}
    whole = largest_share(first.plan.global_batch, 1, first.plan.leaves) / first.plan.accumulate
    computation = {name: getattr(first.plan, name) for name in deciding(Decides.COMPUTE_TIME, Plan)}
    computation["leaves"] = math.ceil(first.plan.leaves * max(batches) / whole)
    return ProfileConfig(
        model=first.model,
        dataset=needed.dataset,
        local_batches=tuple(sorted(batches)),
        concurrent=tuple(together),
        accumulated=tuple(sorted(several)),
        networks=tuple(dict.fromkeys(each.calibrated.network for each in settings if not each.emulated_compute))
        or (NODE,),
        seed=needed.seed,
        plan=Plan(devices=1, global_batch=max(batches), fusion_rule="one", **computation),
    )


def _joined_bytes(workload: Workload, plan: Plan) -> int:
    """The most that the parts of a stage add up at once, in bytes."""
    joins, splits = block_sums(workload) if plan.parallelism.parts > 1 else (frozenset[int](), frozenset[int]())
    return max((output_bytes(workload, plan, layer) for layer in joins | splits), default=0)


def _calibration(needed: Needed, settings: Sequence[Setting]) -> CalibrateConfig:
    """Return the calibration of settings with one network, beside the model at the batch of the most devices."""
    first, dataset = settings[0], load_dataset(needed.dataset, needed.seed)
    most = max(settings, key=lambda setting: setting.plan.devices)
    model = models.load(first.model, dataset.input_shape, dataset.classes).replica()
    workload = describe(model, first.model)
    plans = [setting.plan for setting in settings]
    collectives = [plan.collective for plan in plans] + [plan.joining for plan in plans if plan.parallelism.parts > 1]
    for plan in plans:
        collectives += [plan.between_replicas, plan.of_all_data] if plan.replicas > 1 else []
    sending = [plan for plan in plans if plan.parallelism.stages > 1]
    strategies = (plan.parallelism for plan in plans)
    return CalibrateConfig(
        network=first.calibrated.network,
        devices=needed.calibrated_devices or tuple(dict.fromkeys(each.layout or each.devices for each in collectives)),
        algorithms=tuple(dict.fromkeys(each.algorithm for each in collectives)),
        overlaps=needed.overlaps,
        model=first.model,
        dataset=needed.dataset,
        local_batch=math.ceil(local_share(most.plan)),
        max_bytes=max(workload.gradient_bytes, 1024, *(_joined_bytes(workload, plan) for plan in plans)),
        wire_dtype=first.plan.wire_dtype,
        compute_dtype=first.plan.compute_dtype,
        sums=any(plan.batch_norm != "local" for plan in plans),
        sends=tuple(dict.fromkeys(plan.layout or plan.devices for plan in sending)),
        strategy=max(strategies, key=lambda each: (len(each.collectives), each.gathers)).text,
        slowdown=False,
    )
