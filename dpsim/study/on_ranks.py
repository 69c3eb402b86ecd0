"""A sweep on running ranks: profiles, calibrations and samples take turns in the same rounds.

The first rounds profile and calibrate alone: from them the prediction beforehand is made, written and hashed. In every
later round each setting is measured and each profile and calibration is visited, in random order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mpi4py import MPI
from msgspec.structs import replace

from dpsim import codec
from dpsim.comm.group import quiet_barrier
from dpsim.comm.shaped import ceiling_bytes_per_s
from dpsim.dates import stamp
from dpsim.machine import Selection
from dpsim.model.version import MODEL_VERSION
from dpsim.progress import Progress
from dpsim.study.calibration import CalibrateConfig
from dpsim.study.disturbance import Watcher
from dpsim.study.inputs import Inputs, Needed, declared
from dpsim.study.loop import rounds, until_known
from dpsim.study.profile import bare_workload, narrow, profiled_slowdowns, profiled_workload
from dpsim.study.rows import Rows
from dpsim.study.runners.calibration import Visited, calibrators
from dpsim.study.runners.profile import profilers
from dpsim.workload import Workload

_FIRST_VISITS, _PROFILE_VISITS, _TOGETHER_VISITS = 3, 2, 4
"""Visits a round to each case of a profile, for one to each table: every prediction rests on these layer times.

The last is for several devices at once, beside the samples: other programs of a shared machine slow these down most,
for about as long as a visit.
"""
_PARTS = 2
"""Rounds in which a calibration comes through all sizes, while samples are taken."""
T = TypeVar("T")


class Preparation:
    """The profiles and calibrations of settings on running ranks; rank 0 keeps their rows. Collective."""

    def __init__(self, comm: MPI.Intracomm, needed: Needed, report: Progress, saved: Inputs | None = None) -> None:
        self._comm, self._needed, self._report = comm, needed, report
        self._declared = declared(needed)
        self._profiles = list(self._declared.profiles.values())
        self.rows = Rows(() if saved is None else saved.rows)
        self.watcher = Watcher.on(comm)
        self._bare = [bare_workload(config) for config in self._profiles]
        self._profilers = {
            kind: profilers(comm, config, self.rows, self.watcher, number)
            for number, (kind, config) in enumerate(self._declared.profiles.items())
        }
        self._calibrators: list[Visited] = []
        self._configs: list[CalibrateConfig] = []
        self._selections: list[tuple[Selection, ...]] = []
        configs = tuple(self._declared.calibrations.values())
        if saved is None:
            self._open(configs, [()] * len(configs))
        else:
            self._open(saved.calibrations, saved.selections)
        self._beforehand_until = "" if saved is None else saved.beforehand_until
        self._widths = needed.widths if saved is None else saved.widths

    def _open(self, configs: Sequence[CalibrateConfig], selections: Sequence[Sequence[Selection]]) -> None:
        for config, of_config in zip(configs, selections, strict=True):
            number = len(self._configs)
            visited, selected = calibrators(
                self._comm, config, self.rows, self.watcher, number, _PARTS, selections=of_config
            )
            self._calibrators += visited
            self._configs.append(config)
            self._selections.append(tuple(selected))

    @property
    def turns(self) -> list[Visited]:
        """What to visit in each round of samples: a profile whose times ranks wait for stays as it is."""
        computed = [of_kind for kind, of_kind in self._profilers.items() if kind in self._declared.computed]
        visits = [
            [each] * (_PROFILE_VISITS if each.subject.devices == 1 else _TOGETHER_VISITS)
            for each in itertools.chain(*computed)
        ]
        return [*itertools.chain(*visits), *self._calibrators]

    def first_rounds(self) -> None:
        """Profile and calibrate before anything is measured; where ranks wait, calibrate once more beside that."""
        seconds, declared = self._needed.seconds, self._declared
        models = dict.fromkeys(config.model for config in self._profiles)
        links = dict.fromkeys(config.network for config in self._configs)
        what = {"profiling": models, "calibrating": links}
        self._report(" and ".join(f"{verb} {' and '.join(names)}" for verb, names in what.items() if names))
        profiled = [*itertools.chain(*self._profilers.values())]
        self._rounds(seconds * len(self._profiles), [*profiled * _FIRST_VISITS, *self._calibrators])
        if declared.emulated:
            workloads = dict(zip(declared.profiles, from_first(self._comm, self._workloads), strict=True))
            configs = [
                replace(config, workload=workloads[declared.profile_of[kind]])
                for kind, config in declared.emulated.items()
            ]
            self._report(f"calibrating {' and '.join(dict.fromkeys(config.network for config in configs))}")
            first = len(self._calibrators)
            self._open(configs, [()] * len(configs))
            self._rounds(seconds * len(configs), self._calibrators[first:])
        self._beforehand_until = stamp()
        self.rows.measuring_begins()

    def _rounds(self, seconds: float, visited: Sequence[Visited]) -> None:
        measuring = rounds(
            until_known(seconds, least_rounds=3),
            suffice=self._known,
            comm=self._comm,
            seed=self._needed.seed,
            report=self._report,
        )
        for current in measuring:
            for each in current.order(visited):
                each.visit(current.number, counted=True)

    def _known(self) -> bool:
        return all(
            narrow(profiled_slowdowns(config, self.rows, number, network))
            for number, config in enumerate(self._profiles)
            for network in config.networks
        )

    def _workloads(self) -> list[Workload]:
        return [
            profiled_workload(config, bare, self.rows, number)
            for number, (config, bare) in enumerate(zip(self._profiles, self._bare, strict=True))
        ]

    def inputs(self) -> Inputs:
        """Return what was profiled and calibrated so far; on rank 0."""
        return Inputs(
            model_version=MODEL_VERSION,
            profiles=tuple(self._profiles),
            bare=tuple(self._bare),
            calibrations=tuple(self._configs),
            selections=tuple(self._selections),
            rows=self.rows.series(),
            environment=self._needed.environment,
            measured_until=stamp(),
            beforehand_until=self._beforehand_until,
            widths=self._widths,
            unshaped_bytes_per_s=ceiling_bytes_per_s(),
        )

    def close(self) -> None:
        """End what was started. Collective."""
        for each in (*itertools.chain(*self._profilers.values()), *self._calibrators):
            each.close()


def from_first(comm: MPI.Intracomm, compute: Callable[[], T]) -> T:
    """Return what rank 0 computes on every rank; the others wait asleep."""
    value = compute() if comm.rank == 0 else None
    quiet_barrier(comm)
    received: T = comm.bcast(value)
    return received


def prepare_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Profile and calibrate for settings that are not measured; rank 0 returns ``Inputs`` (plain values)."""
    preparation = Preparation(comm, codec.decode(argument, Needed, "task"), report)
    preparation.first_rounds()
    preparation.close()
    return dict(codec.to_builtins(preparation.inputs())) if comm.rank == 0 else None
