"""How wide intervals must be, by what past studies missed: split conformal prediction, a study being the unit.

The model states for each step how uncertain it is (``dpsim.model.interval``). Each finished study tells how many
times that its errors were, and the next one's intervals are as many times as wide as the studies before it call for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Literal, get_args

from dpsim import codec
from dpsim.codec import Noun
from dpsim.machine import Machine, Network
from dpsim.model.cells import cell_of
from dpsim.schedule import Schedule
from dpsim.uncertainty import IntervalWidth

LEVEL = 0.9
MODEL = 1
"""The version of the model: it grows when predictions or their uncertainties change, for residuals are of one model."""
SCHEMA = "dpsim.residuals/1"
Kind = Literal["blind", "beforehand"]
"""Whether the layer times and allreduces of a prediction are of the same minutes as what it predicts."""
_EMULATED, _SCRIPT = ", emulated computation", ", script"
_PRIOR_STUDIES = 4
ANY_GROUP = "any"
"""Stands for all groups without studies, but those of emulated computation."""


class Residual(Noun, frozen=True):
    """How far off the predictions of one study were in one group of its settings.

    ``ratios`` has the ``ratio`` of each setting with the model's own interval. ``study`` is the digest of the
    predictions, ``measured_until`` when the study ended.
    """

    study: str
    kind: Kind
    group: str
    ratios: tuple[float, ...]
    measured_until: str = ""


class Residuals(Noun, frozen=True):
    """The residuals of all studies on one type of machine, with one version of the model."""

    measured_on: str
    residuals: tuple[Residual, ...]
    model: int = MODEL
    schema: str = SCHEMA


def group_name(devices: int, machine: Machine, *, emulated_compute: bool, script: bool) -> str:
    """Return what a study's settings are grouped by: ``emulated link, several devices, emulated computation``."""
    network = "node"
    if machine.emulated_network:
        network = "shaped hosts" if Network.parse(machine.network).shaped else "emulated link"
    count = "several devices" if devices > 1 else "1 device"
    return f"{network}, {count}{_EMULATED * emulated_compute}{_SCRIPT * script}"


def ratio(measured_s: float, predicted_s: float, low_s: float, high_s: float) -> float:
    """Return |log(measured / predicted)| over the logarithm of the interval's end on that side."""
    error = math.log(measured_s / predicted_s)
    end_s = high_s if error > 0 else low_s
    return abs(error) / max(abs(math.log(end_s / predicted_s)), 1e-9)


def conformal_factor(ratios_by_study: Iterable[Sequence[float]], level: float = LEVEL) -> float:
    """Return how many times as wide the next study's intervals must be to hold with a probability of ``level``.

    The settings of a study share its error, so each of n studies weighs as much as the one to come: 1 / (n + 1),
    divided among its settings (hierarchical conformal prediction: Lee, Barber and Willett 2023). Infinite for fewer
    than level / (1 - level) studies, which is 9.
    """
    studies = [ratios for ratios in ratios_by_study if ratios]
    return covering_factor(studies, level * (len(studies) + 1) / len(studies)) if studies else math.inf


def covering_factor(ratios_by_study: Sequence[Sequence[float]], share: float) -> float:
    """Return how many times as wide intervals must be to hold a share of the settings, every study weighing the same.

    Infinite for a share above 1.
    """
    reached = 0.0
    for factor, weight in sorted((each, 1 / len(ratios)) for ratios in ratios_by_study for each in ratios):
        reached += weight / len(ratios_by_study)
        if reached >= share * (1 - 1e-12):
            return factor
    return math.inf


Widths = dict[Kind, tuple[IntervalWidth, ...]]
"""How wide intervals must be, for predictions of each kind."""


def all_widths(past: Collection[Residual]) -> Widths:
    """Return how wide intervals of each kind must be, as ``widths`` does."""
    return {kind: widths(past, kind) for kind in get_args(Kind)}


def widths(past: Iterable[Residual], kind: Kind) -> tuple[IntervalWidth, ...]:
    """Return how wide intervals of this kind must be, for each group of which there are enough past studies.

    Those without studies are assumed: what the studies that come with dpsim say of the same group, which fewer past
    studies of one's own make narrower or wider.
    """
    assumed = {width.group: width for width in _assumed(kind)}
    known = {}
    for group, of_group in _by_group(past, kind).items():
        factor, studies = conformal_factor(of_group), len(of_group)
        if not math.isfinite(factor):
            factor, studies = learnt_factor(_found(assumed, group).factor, of_group), 0
        known[group] = IntervalWidth(group=group, factor=factor, studies=studies)
    return tuple((assumed | known).values())


def learnt_factor(assumed: float, ratios_by_study: Sequence[Sequence[float]]) -> float:
    """Return how many times as wide intervals are, where an assumption meets fewer studies than tell it alone.

    Errors are taken as normal, with a variance that the assumption knows as well as ``_PRIOR_STUDIES`` studies do (a
    scaled inverse chi-squared distribution). The factor is the end of the next error's interval, which is that of
    Student's t. Over the studies that come with dpsim, each left out, it holds 89 to 95 %, whatever number of others
    it learns from.
    """
    from scipy.special import stdtrit  # slow to load, and needed only where there are studies

    upper = (1 + LEVEL) / 2
    squares = [math.fsum(each**2 for each in ratios) / len(ratios) for ratios in ratios_by_study]
    degrees = _PRIOR_STUDIES + len(squares)
    of_prior = _PRIOR_STUDIES * (assumed / stdtrit(_PRIOR_STUDIES, upper)) ** 2
    return float(stdtrit(degrees, upper) * math.sqrt((of_prior + math.fsum(squares)) / degrees))


def width_of(machine: Machine, schedule: Schedule) -> IntervalWidth:
    """Return how wide the interval of a schedule's step must be, by what the machine says of past studies.

    Where it says nothing of the schedule's group, the width of its cell counts (``dpsim.model.cells``), then of a
    script that of the same group of dpsim's own trainings, then that of all groups. A machine that says nothing of them
    is taken at the model's word: once as wide, by no study.
    """
    workload = schedule.workload
    group = group_name(
        schedule.plan.devices,
        machine,
        emulated_compute=workload.emulated_compute,
        script=workload.ddp is not None,
    )
    widths_by_group = {width.group: width for width in machine.interval_widths}
    if group not in widths_by_group and any(width.clusters for width in machine.interval_widths):
        group = cell_of(machine, schedule)
    return _found(widths_by_group, group)


def _found(widths_by_group: Mapping[str, IntervalWidth], group: str) -> IntervalWidth:
    """Return the width of a group, or of what stands for it."""
    for name in (group, group.removesuffix(_SCRIPT), _any(group)):
        if name in widths_by_group:
            return widths_by_group[name]
    return IntervalWidth(group=group, factor=1.0)


def _any(group: str) -> str:
    """Return the name of what stands for all groups without studies that have the same kind of computation."""
    return f"{ANY_GROUP}{_EMULATED * (_EMULATED in group)}"


def _by_group(past: Iterable[Residual], kind: Kind) -> Mapping[str, list[tuple[float, ...]]]:
    groups: dict[str, list[tuple[float, ...]]] = {}
    for residual in past:
        if residual.kind == kind:
            groups.setdefault(residual.group, []).append(residual.ratios)
    return groups


@functools.cache
def _assumed(kind: Kind) -> tuple[IntervalWidth, ...]:
    """What the studies that come with dpsim say of each group, and the widest of all others.

    No interval is assumed to be narrower than the model's own. The widest are one for real and one for emulated
    computation.
    """
    factors = {_any(computation): 1.0 for computation in ("", _EMULATED)}
    for group, of_group in _by_group(shipped().residuals, kind).items():
        factors[group] = max(1.0, conformal_factor(of_group))
        factors[_any(group)] = max(factors[_any(group)], factors[group])
    return tuple(IntervalWidth(group=group, factor=factor) for group, factor in factors.items())


@functools.cache
def shipped() -> Residuals:
    """The residuals that come with dpsim; ``make accuracy`` measures them and writes ``residuals.json``."""
    path = resources.files("dpsim.model") / "residuals.json"
    return codec.decode(codec.parse_json(path.read_text(encoding="utf-8")), Residuals, "residuals")
