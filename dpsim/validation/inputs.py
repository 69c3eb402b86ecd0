"""What a part of a case gives to the model: machine, workload and plan of a row, and its free numbers, fitted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from dpsim import codec
from dpsim import machine as machines
from dpsim import workload as workloads
from dpsim.collective import Layout
from dpsim.errors import ConfigError, unknown
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import AllreduceCost, Machine
from dpsim.model.link_fit import fitted_links
from dpsim.model.message import message
from dpsim.model.prices import Factors
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.schedule import Schedule
from dpsim.validation.case import COMPUTE, Case, MachineInputs, ModelInputs, Part
from dpsim.validation.published import FOLDER, PublishedRow, PublishedSet
from dpsim.workload import Layer, Tensor, Workload

MACHINES = FOLDER.parent / "experiments" / "machines"
_STEP, _TOLERANCE, _EXACT = 1e-3, 1e-3, 1e-6
"""The step of derivatives and when the search ends, both relative; a misfit below which nothing is searched."""
_ROUNDS = 6
"""Rounds in which computing times are multiplied by what they miss, before a search."""
_WRONG = 0.05
"""The misfit from which on a known row is rather wrong than noisy, and counts by its misfit and not by its square."""
_read = functools.cache(workloads.read)
Stated = TypeVar("Stated", Machine, Workload)
Inputs = TypeVar("Inputs", MachineInputs, ModelInputs)


@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """What the model predicts a row from."""

    workload: Workload
    machine: Machine
    plan: Plan

    def step_s(self) -> float:
        """Return the predicted step."""
        return price(scheduled(self.workload, self.machine, self.plan), self.machine).step_s


def outcome_s(row: PublishedRow, published: PublishedSet, plan: Plan) -> float:
    """Return the seconds of a row's outcome: of samples a second those of a step."""
    rate = published.provenance.columns[published.provenance.outcome].unit == "1/s"
    return plan.global_batch / row.outcome if rate else row.outcome


def row_plan(case: Case, row: PublishedRow) -> Plan:
    """Return a row's plan: the fields that all rows share, and its columns with the names of fields.

    A ``local_batch`` is that of each device. A collective is one bucket of one sample a device. Raises
    ``FileFormatError`` with the line for what is no plan.
    """
    own = {name: value for name, value in row.values.items() if name in Plan.__struct_fields__}
    fields: dict[str, Any] = {"fusion_rule": "one"} if case.quantity == "collective" else {}
    fields |= case.plan | own
    if own.get("layout") == "1x1":
        fields["layout"] = ""
    samples = row.values.get("local_batch", 1) * fields.get("accumulate", 1)
    fields.setdefault("global_batch", samples * fields["devices"])
    return codec.decode(fields, Plan, f"plan of case {case.name}, line {row.line} of {case.dataset}.csv")


def collective_inputs(part: Part) -> dict[int, RowInputs]:
    """Return the inputs of each judged row, by its line: an allreduce alone, priced by the tables of the known rows."""
    case = part.case
    machine = _machine_of_tables(case, part.known, case.dataset)
    if stated := case.machines.get(""):
        machine = _with_fields(machine, stated.fields, f"machine of case {case.name}")
    return {
        row.line: RowInputs(workload=message(int(row.values["size_bytes"])), machine=machine, plan=row_plan(case, row))
        for row in part.judged
    }


def _machine_of_tables(case: Case, rows: Sequence[PublishedRow], name: str) -> Machine:
    """Return a machine with a table for each layout among the rows, and the links that dpsim fits to such tables."""
    by_layout: dict[tuple[int, Layout], dict[int, float]] = {}
    for row in rows:
        key = int(row.values["devices"]), Layout(str(row.values.get("layout", "")))
        by_layout.setdefault(key, {})[int(row.values["size_bytes"])] = row.outcome
    tables = tuple(
        AllreduceCost(
            algorithm=case.plan.get("algorithm", "auto"),
            devices=devices,
            layout=layout,
            sizes_bytes=tuple(sorted(times)),
            time_s=tuple(times[size] for size in sorted(times)),
        )
        for (devices, layout), times in by_layout.items()
    )
    link, in_node = fitted_links(tables)
    return Machine(name=name, allreduce=tables, link=link, link_in_node=in_node)


def _with_fields(base: Stated, fields: Mapping[str, Any], what: str) -> Stated:
    """Return a machine or workload with other fields. Raises ``FileFormatError`` for what they cannot be."""
    return codec.decode(codec.to_builtins(base) | fields, type(base), what) if fields else base


Fill = Callable[[RowInputs], RowInputs]
"""Puts what is assumed of inputs that a case leaves open into those of a row."""


def as_stated(inputs: RowInputs) -> RowInputs:
    """Return the inputs as the case states them."""
    return inputs


def stated_inputs(part: Part, sets: Mapping[str, PublishedSet]) -> dict[int, RowInputs]:
    """Return the inputs of each known and judged row of steps, by its line, as the case states them."""
    case, rows = part.case, (*part.known, *part.judged)
    folder = sets[part.dataset].path.parents[1]
    systems, models = (dict.fromkeys(str(row.values.get(name, "")) for row in rows) for name in ("system", "model"))
    machine = {name: _machine(case, _entry(case.machines, name, "machine"), sets, folder) for name in systems}
    workload = {
        name: _workload(_entry(case.models, name, "model"), folder, _known_batch(part, name)) for name in models
    }
    return {
        row.line: RowInputs(
            workload=workload[str(row.values.get("model", ""))],
            machine=machine[str(row.values.get("system", ""))],
            plan=row_plan(case, row),
        )
        for row in rows
    }


def _entry(entries: Mapping[str, Inputs], name: str, what: str) -> Inputs:
    if name not in entries and "" not in entries:
        raise unknown(what, name, entries)
    return entries[name if name in entries else ""]


def _machine(case: Case, inputs: MachineInputs, sets: Mapping[str, PublishedSet], folder: Path) -> Machine:
    what = f"machine of case {case.name}"
    if inputs.tables_of:
        if inputs.tables_of not in sets:
            raise unknown("dataset", inputs.tables_of, sets)
        machine = _machine_of_tables(case, sets[inputs.tables_of].rows, inputs.tables_of)
        return _with_fields(machine, inputs.fields, what)
    if inputs.file:
        path = _first_there(inputs.file, folder / "machines", MACHINES)
        return _with_fields(machines.read(path), inputs.fields, what)
    return codec.decode({"name": case.name, "source": inputs.source} | inputs.fields, Machine, what)


def _first_there(name: str, *folders: Path) -> Path:
    """Return the TOML file of a name in the first of the folders that has it; in the first one where none has."""
    paths = [folder / f"{name}.toml" for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])


def _known_batch(part: Part, model: str) -> int | None:
    """Return the largest local batch of a model's known rows where these tell computing times; ``None`` elsewhere."""
    batches = [row.values.get("local_batch", 1) for row in part.known if str(row.values.get("model", "")) == model]
    return max(batches) if COMPUTE in part.case.free and batches else None


def _workload(inputs: ModelInputs, folder: Path, known_batch: int | None) -> Workload:
    """Return the workload of a model: its profile, with the published sizes, times and other fields.

    Times that are free stand at the local batch that they will be fitted at (``known_batch``).
    """
    profile = _read(_first_there(inputs.profile, folder / "workloads", FOLDER / "workloads", MACHINES))
    published = {"forward_s": inputs.forward_s, "backward_s": inputs.backward_s}
    factors = {
        name: seconds / sum(getattr(layer, name)[0] for layer in profile.layers)
        for name, seconds in published.items()
        if seconds is not None
    }

    def fitted(layer: Layer) -> Layer:
        fields: dict[str, Any] = {
            name: tuple(factor * each for each in getattr(layer, name)) for name, factor in factors.items()
        }
        if inputs.tensors != 1:
            fields["tensors"] = tuple(
                Tensor(name=each.name, shape=(round(inputs.tensors * each.elements),), dtype=each.dtype)
                for each in layer.tensors
            )
        return msgspec.structs.replace(layer, **fields)

    workload = msgspec.structs.replace(profile, layers=tuple(map(fitted, profile.layers)))
    if known_batch is not None and inputs.forward_s is None and len(profile.local_batches) == 1:
        workload = msgspec.structs.replace(workload, local_batches=(known_batch,))
    return _with_fields(workload, inputs.fields, f"workload {inputs.profile}")


def _with_free(inputs: Mapping[int, RowInputs], free: Mapping[str, float], fill: Fill) -> dict[int, RowInputs]:
    """Return the inputs with these values of the free numbers, and then what is assumed; one object for equal ones."""
    of_workload, of_link = (
        {name.removeprefix(prefix): value for name, value in free.items() if name.startswith(prefix)}
        for prefix in ("workload.", "link.")
    )

    def workload(base: Workload) -> Workload:
        return msgspec.structs.replace(base.slowed(free.get(COMPUTE, 1.0)), **of_workload)

    def machine(base: Machine) -> Machine:
        if not of_link or base.link is None:
            return base
        return msgspec.structs.replace(base, link=msgspec.structs.replace(base.link, **of_link))

    changed = _changed(_changed(inputs, "workload", workload), "machine", machine)
    return {line: fill(each) for line, each in changed.items()}


def _changed(inputs: Mapping[int, RowInputs], name: str, change: Callable[[Any], Any]) -> dict[int, RowInputs]:
    """Return the inputs with their workloads or machines changed; one object for equal ones."""
    before = {id(value): value for value in (getattr(each, name) for each in inputs.values())}
    after = {key: change(value) for key, value in before.items()}
    return {line: replace(each, **{name: after[id(getattr(each, name))]}) for line, each in inputs.items()}


def fitted_step_inputs(part: Part, sets: Mapping[str, PublishedSet], fill: Fill = as_stated) -> dict[int, RowInputs]:
    """Return the inputs of each row of a part, by its line, with the free numbers that fit the known rows best.

    Least squares of the logarithm of predicted over published steps, over the logarithms of the free numbers (they are
    above 0); rows far off count by their misfit alone (``_WRONG``). What free computing times still miss is their
    uncertainty. Raises ``ConfigError`` for fewer known rows than free numbers.
    """
    from scipy.optimize import least_squares

    case, published = part.case, sets[part.dataset]
    names, by_line = tuple(case.free), stated_inputs(part, sets)
    if len(part.known) < len(names):
        raise ConfigError(
            f"case {part.name}: {len(names)} free numbers ({', '.join(names)}) and {len(part.known)} known rows",
            allowed="at least as many known rows as free numbers",
            remedy="state one of them in the case, or hold out less",
        )
    known_devices = tuple(sorted({by_line[row.line].plan.devices for row in part.known}))
    by_line = _changed(by_line, "machine", functools.partial(msgspec.structs.replace, known_devices=known_devices))
    known_inputs = {row.line: by_line[row.line] for row in part.known}
    outcomes = [outcome_s(row, published, known_inputs[row.line].plan) for row in part.known]
    scaled = COMPUTE if all(map(_scales, known_inputs.values())) else ""

    def free(logarithms: Sequence[float]) -> dict[str, float]:
        return dict(zip(names, map(math.exp, logarithms), strict=True))

    @functools.lru_cache(maxsize=2)
    def lowered(values: frozenset[tuple[str, float]]) -> list[tuple[Schedule, Machine]]:
        """Return schedule and machine of each known row with these free numbers."""
        inputs = _with_free(known_inputs, dict(values), fill)
        if scaled and not any(name.startswith("workload.") for name, _ in values):
            return [(schedule(line), each.machine) for line, each in inputs.items()]
        return [(scheduled(each.workload, each.machine, each.plan), each.machine) for each in inputs.values()]

    @functools.cache
    def schedule(line: int) -> Schedule:
        """Return the schedule of a known row, which free numbers of a link do not change."""
        own = _with_free(known_inputs, dict(case.free) | {COMPUTE: 1.0}, fill)[line]
        return scheduled(own.workload, own.machine, own.plan)

    def misfits(logarithms: Sequence[float]) -> list[float]:
        values = free(logarithms)
        factors = Factors(compute=values.get(scaled, 1.0))
        rows = lowered(frozenset((name, value) for name, value in values.items() if name != scaled))
        return [
            math.log(price(schedule, machine, factors).step_s / seconds)
            for (schedule, machine), seconds in zip(rows, outcomes, strict=True)
        ]

    start = [math.log(value) for value in case.free.values()]
    missed = misfits(start) if names else [0.0]
    for _ in range(_ROUNDS if COMPUTE in names else 0):  # most steps are computation, which so fits one known row
        if max(map(abs, missed)) > _EXACT:
            start[names.index(COMPUTE)] -= float(np.median(missed))
            missed = misfits(start)
    if max(map(abs, missed)) > _EXACT:
        ends = {"diff_step": _STEP, "ftol": _TOLERANCE, "xtol": _TOLERANCE}
        start = least_squares(misfits, start, loss="soft_l1", f_scale=_WRONG, **ends).x.tolist()
    degrees_of_freedom = len(part.known) - len(names)
    if COMPUTE in names and degrees_of_freedom > 0:
        doubt = _scatter(misfits(start), degrees_of_freedom)
        by_line = _changed(by_line, "workload", functools.partial(msgspec.structs.replace, relative_uncertainty=doubt))
    return _with_free(by_line, free(start), fill)


def _scales(inputs: RowInputs) -> bool:
    """Return whether a factor on the prices of computation (``Factors``) is one on the workload's computing times.

    It is not where these decide buckets, and where the prices contain launches or seconds that the machine adds.
    """
    launches = any(layer.launch_s or layer.launched_backward_s for layer in inputs.workload.layers)
    adds = any(slowdown.added_s for slowdown in inputs.machine.compute_slowdown)
    return not launches and not adds and not FUSION_RULES.find(inputs.plan.fusion_rule).needs_costs


def _scatter(misfits: Sequence[float], degrees_of_freedom: int) -> float:
    """Return one standard error, in logarithms, of a row that was not fitted, from the misfits of those that were.

    It follows from the median |misfit|, which a few wrong rows do not change, as that of a normal error. It is wider by
    the ratio of the 95 % quantiles of Student's and the normal distribution.
    """
    from scipy.stats import norm, t

    of_normal = float(np.median(np.abs(misfits))) / norm.ppf(0.75) * math.sqrt(len(misfits) / degrees_of_freedom)
    return float(of_normal * t.ppf(0.95, degrees_of_freedom) / norm.ppf(0.95))
