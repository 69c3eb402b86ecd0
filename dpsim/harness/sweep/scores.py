"""Scores of a model against nulls, the regret of following it, and the noise. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.errors import FileFormatError
from dpsim.model.rows import PredictedRow
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import HALVES, HALVES_SEED, Comparison, Group, Overall, OverlapEffect, Score
from dpsim.records.sweep import clean_values, enough_clean
from dpsim.report.tuning import measured_point
from dpsim.study.statistics import Interval

MEASURED = 4
"""How many settings ``tune`` measures beside the default."""
PERFECT_SCALING = "perfect_scaling"
PREDICTED_NULLS = (PERFECT_SCALING, "alpha_beta_no_overlap", "largest_bucket")
PROFILED_NULLS = ("free_communication", "nothing_hidden")
"""The computation of several devices as it was profiled, without any communication and with all of it: for every
question, wherever the prediction has them."""
PROPORTIONAL = "proportional_to_batch"
"""The predicted step at the largest batch, scaled to the batch: a device is equally busy at any of them."""
HINDSIGHT = "constant"
"""The null that knows what was measured: it counts for the shape of a curve, not for absolute times."""
DEVICES_NULLS = (PERFECT_SCALING, "alpha_beta_no_overlap")
"""Over the number of devices, where the largest bucket would only be the model itself at another threshold."""


def score(errors: Sequence[float], null_errors: Mapping[str, Sequence[float]]) -> Score:
    """Score the model: median and 90th percentile of its absolute errors, and skill = 1 - median / best null's median.

    ``skill`` is ``None`` when the best null makes no error at all.
    """
    model = float(np.median(np.abs(errors)))
    nulls = {name: float(np.median(np.abs(values))) for name, values in null_errors.items()}
    best = min(nulls, key=lambda name: nulls[name])
    return Score(
        median_abs_error=model,
        p90_abs_error=float(np.percentile(np.abs(errors), 90)),
        null_median_abs_error=nulls[best],
        null=best,
        skill=1 - model / nulls[best] if nulls[best] > 0 else None,
        null_errors=nulls,
    )


def step_score(points: Sequence[ComparedPoint]) -> Score:
    """Score the errors of step time, predicted / measured - 1, against the nulls that know no measurement.

    Nulls count that all points have: those of different questions differ.
    """
    names = [name for name in _common_nulls(points) if name != HINDSIGHT]
    nulls = {name: [p.null_step_s[name] / p.measured_step_s - 1 for p in points] for name in names}
    return score([p.error for p in points], nulls)


def shape_score(panels: Sequence[Sequence[ComparedPoint]]) -> Score | None:
    """Score the shape of curves: the errors of times over the mean of their panel, for the model and all nulls.

    A time is that of a step, or of a sample where the local batches of a panel differ. What is common to a whole
    panel, such as a machine that became slower after its calibration, does not count. The constant of a panel, only
    known with hindsight, is the null that no effect at all would make perfect. ``None`` without a panel of two points
    or more.
    """
    panels = [panel for panel in panels if len(panel) > 1]
    if not panels:
        return None
    names = _common_nulls([point for panel in panels for point in panel])
    model: list[float] = []
    nulls: dict[str, list[float]] = {name: [] for name in names}
    for points in panels:
        units = _units(points)
        measured = _shape([p.measured_step_s for p in points], units)
        model += (_shape([p.predicted_step_s for p in points], units) / measured - 1).tolist()
        for name in names:
            nulls[name] += (_shape([p.null_step_s[name] for p in points], units) / measured - 1).tolist()
    return score(model, nulls)


def _common_nulls(points: Sequence[ComparedPoint]) -> list[str]:
    return [name for name in points[0].null_step_s if all(name in point.null_step_s for point in points)]


def _units(points: Sequence[ComparedPoint]) -> list[float]:
    """What to divide the steps of a panel by, so that they can be compared: nothing, or their samples."""
    of_a_device = {p.local_batch * p.setting.plan.accumulate for p in points}
    steps = len(of_a_device) == 1 or len({p.global_batch for p in points}) == 1
    return [1.0] * len(points) if steps else [float(p.global_batch) for p in points]


def _shape(steps_s: Sequence[float], units: Sequence[float]) -> NDArray[np.float64]:
    times = np.array(steps_s) / np.array(units)
    shape: NDArray[np.float64] = times / times.mean()
    return shape


def exposed_score(points: Sequence[ComparedPoint]) -> Score:
    """Score the errors of exposed communication: (predicted - measured) / measured step time, for model and nulls."""
    nulls = {
        name: [(p.null_exposed_s[name] - p.exposed_communication_s) / p.measured_step_s for p in points]
        for name in _common_nulls(points)
    }
    model = [(p.predicted_exposed_communication_s - p.exposed_communication_s) / p.measured_step_s for p in points]
    return score(model, nulls)


def nulls_of(
    members: Sequence[ComparedPoint], member: ComparedPoint, predicted_nulls: Sequence[str] = PREDICTED_NULLS
) -> tuple[dict[str, float], dict[str, float]]:
    """Return step time and exposed communication of a point of a group, as the nulls have it.

    ``constant`` is the strongest fair constant: the median over the group of what was measured, only known with
    hindsight; where both the samples of a device and of all differ, it is the median time of a sample, times the batch.
    The others are in the prediction; raises ``FileFormatError`` where one is missing.
    """
    plans = [m.setting.plan for m in members]
    of_a_device = {plan.local_batch * plan.accumulate for plan in plans}
    fixed = len(of_a_device) == 1 or len({plan.global_batch for plan in plans}) == 1
    batches = [1 if fixed else plan.global_batch for plan in plans]
    batch = 1 if fixed else member.setting.plan.global_batch
    step = {HINDSIGHT: batch * _median_over(members, batches, "step_s")}
    exposed = {HINDSIGHT: batch * _median_over(members, batches, "exposed_communication_s")}
    profiled = [name for name in PROFILED_NULLS if name in member.predicted.null_step_s]
    for name in (*predicted_nulls, *(profiled if member.setting.plan.devices > 1 else ())):
        for values, into in ((member.predicted.null_step_s, step), (member.predicted.null_exposed_s, exposed)):
            if name not in values:
                raise FileFormatError(
                    f"predicted point ({member.setting.describe()}) lacks the null {name!r}",
                    allowed=", ".join(predicted_nulls),
                    remedy="run the sweep again with this version of dpsim",
                )
            into[name] = values[name]
    return step, exposed


def _median_over(members: Sequence[ComparedPoint], batches: Sequence[int], times: str) -> float:
    medians = [np.median(clean_values(m.runs, times)) / batch for m, batch in zip(members, batches, strict=True)]
    return float(np.median(medians))


def aa_noise(points: Iterable[ComparedPoint]) -> float | None:
    """Return the largest relative difference of medians between the two runs of an A/A pair; ``None`` without one.

    The medians are of clean samples: a run with too few of them says nothing of the noise.
    """
    differences = []
    for point in points:
        medians = [float(np.median(clean_values([run]))) for run in point.runs if enough_clean([run])]
        if len(medians) > 1:
            differences.append(max(medians) / min(medians) - 1)
    return max(differences, default=None)


class Regret(NamedTuple):
    """The cost of following a prediction: the mean over so many random halves, and their standard deviation."""

    mean: float
    spread: float
    halves: int


def regret(members: Sequence[ComparedPoint], chosen: int) -> Regret:
    """Return time per sample of the setting with the index ``chosen`` / of the best one - 1.

    The best is chosen on a random half of the rounds, and both are timed on the other half. It may be negative, since
    the best of one half need not be the best of the other. Halves that miss a setting do not count; without any other
    all samples serve for both, and the result is 0 or more.
    """
    every = np.unique([number for member in members for number in clean_values(member.runs, "round")])
    random = np.random.default_rng(HALVES_SEED)
    first = [random.permutation(every)[: len(every) // 2] for _ in range(HALVES)]
    sides = ([_medians(member, first, inside=inside) for member in members] for inside in (True, False))
    picked_s, timed_s = map(np.array, sides)
    complete = np.isfinite(picked_s).all(axis=0) & np.isfinite(timed_s).all(axis=0)
    if not complete.any():
        all_s = [float(np.median(clean_values(member.runs))) / member.global_batch for member in members]
        cost = all_s[chosen] / min(all_s) - 1
        return Regret(cost, 0.0, 0)
    picked_s, timed_s = picked_s[:, complete], timed_s[:, complete]
    best_s = timed_s[np.argmin(picked_s, axis=0), np.arange(timed_s.shape[1])]
    costs = timed_s[chosen] / best_s - 1
    return Regret(float(costs.mean()), float(costs.std()), len(costs))


def _medians(point: ComparedPoint, halves: Sequence[NDArray[np.int64]], *, inside: bool) -> NDArray[np.float64]:
    """Return the median seconds per sample over the rounds inside or outside each half; infinity without a sample."""
    steps_s, rounds = np.array(clean_values(point.runs)), np.array(clean_values(point.runs, "round"))
    member = np.array([np.isin(rounds, half) == inside for half in halves])
    ordered = np.sort(np.where(member, steps_s, math.inf), axis=1)
    count = member.sum(axis=1)
    padded = np.pad(ordered, ((0, 0), (0, 1)), constant_values=math.inf)
    lower, upper = (padded[np.arange(len(halves)), index] for index in ((count - 1) // 2, count // 2))
    medians: NDArray[np.float64] = (lower + upper) / 2 / point.global_batch
    return medians


def drift(members: Sequence[ComparedPoint]) -> float | None:
    """Return step time in the last third of the rounds / in the first third - 1, each sample relative to its point."""
    rounds = sorted({r for m in members for r in clean_values(m.runs, "round")})
    if len(rounds) < 3:
        return None
    first, last = rounds[: len(rounds) // 3][-1], rounds[-(len(rounds) // 3)]
    early, late = [], []
    for member in members:
        samples = clean_values(member.runs)
        median = float(np.median(samples))
        for sample, number in zip(samples, clean_values(member.runs, "round"), strict=True):
            if number <= first:
                early.append(sample / median)
            elif number >= last:
                late.append(sample / median)
    return float(np.median(late)) / float(np.median(early)) - 1 if early and late else None


def half_width(point: ComparedPoint) -> float:
    """Return half the width of a point's interval, relative to its median."""
    return Interval(
        median=point.measured_step_s, low=point.measured_low_s, high=point.measured_high_s
    ).relative_half_width


def group(points: Sequence[ComparedPoint]) -> Group:
    """Score the settings of one group that have nulls: those on several devices, and one device where it is scored."""
    many = [p for p in points if p.null_step_s]
    best = min(points, key=lambda p: p.measured_s_per_sample)
    worst = max(points, key=lambda p: p.measured_s_per_sample)
    chosen = next(i for i, p in enumerate(points) if p.is_best_predicted)
    cost = regret(points, chosen)
    floor = max(best.noise or 0.0, half_width(best), half_width(worst))
    effect = worst.measured_s_per_sample / best.measured_s_per_sample - 1
    return Group(
        name=best.group,
        network=best.network,
        emulated_network=best.emulated_network,
        emulated_compute=best.emulated_compute,
        runtime=best.runtime,
        devices=best.devices if len({p.layout for p in points}) == 1 else 0,
        points=len(many),
        step=step_score(many),
        shape=shape_score([many]),
        exposed_communication=exposed_score(many),
        regret=cost.mean,
        regret_spread=cost.spread,
        regret_halves=cost.halves,
        effect=effect,
        noise=best.noise,
        noise_floor=floor,
        below_noise=effect < floor,
        drift=drift(points),
        best_measured_threshold_bytes=best.fusion_threshold_bytes,
        best_predicted_threshold_bytes=points[chosen].fusion_threshold_bytes,
        best_measured_devices=best.devices,
        best_predicted_devices=points[chosen].devices,
        median_error=float(np.median([p.error for p in many])),
    )


def overall(network: str, points: Sequence[ComparedPoint], groups: Sequence[Group]) -> Overall:
    """Score the points of a network; regret, effect and noise are the largest of its groups."""
    panels = [[p for p in points if p.group == group.name] for group in groups]
    worst = max(groups, key=lambda group: group.regret)
    return Overall(
        network=network,
        emulated_network=any(g.emulated_network for g in groups),
        emulated_compute=any(g.emulated_compute for g in groups),
        runtime=" and ".join(dict.fromkeys(g.runtime for g in groups)),
        points=len(points),
        step=step_score(points),
        shape=shape_score(panels),
        exposed_communication=exposed_score(points),
        regret=worst.regret,
        regret_spread=worst.regret_spread,
        effect=max(g.effect for g in groups),
        noise=max((g.noise for g in groups if g.noise is not None), default=None),
    )


def overlap_effects(points: Sequence[ComparedPoint]) -> tuple[OverlapEffect, ...]:
    """Return step with overlap / step without - 1, wherever both were run on more than one device.

    PyTorch's DDP always communicates during backward.
    """
    without = {point.setting: point for point in points if point.overlap == "off" and point.devices > 1}
    effects = []
    for on in (point for point in points if point.runtime == "dpsim"):
        plan = msgspec.structs.replace(on.setting.plan, overlap="off")
        off = without.get(msgspec.structs.replace(on.setting, plan=plan))
        if off is None or on.overlap == "off":
            continue
        measured = on.measured_step_s / off.measured_step_s - 1
        predicted = on.predicted_step_s / off.predicted_step_s - 1
        noise = max(on.noise or 0.0, half_width(on), half_width(off))
        right = None if abs(measured) <= noise else bool(np.sign(measured) == np.sign(predicted))
        effects.append(
            OverlapEffect(
                network=on.network,
                emulated_network=on.emulated_network,
                emulated_compute=on.emulated_compute,
                devices=on.devices,
                fusion_threshold_bytes=on.fusion_threshold_bytes,
                algorithm=on.algorithm,
                overlap=on.overlap,
                measured_effect=measured,
                predicted_effect=predicted,
                noise=noise,
                sign_right=right,
            )
        )
    return tuple(effects)


def measured_regret(comparison: Comparison, options: Sequence[PredictedRow], advised: PredictedRow) -> float:
    """Return time per sample of the advised option over that of the best of those measured - 1 (``regret``).

    The best is chosen on other rounds than it is timed on, where there are enough, so that it may be negative.
    """
    measured = {option: measured_point(comparison, option.plan) for option in options}
    points = {option: point for option, point in measured.items() if point is not None}
    return regret([*points.values()], [*points].index(advised)).mean
