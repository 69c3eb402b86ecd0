"""What the reports of all questions say: the scores of the model, what overlap does, and dpsim's own runtime.

The table of the settings is that of ``cells.py``; its columns are those that each question names.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dpsim.constraints import FSDP
from dpsim.ddp_settings import FSDP_ON_GPUS
from dpsim.grouping import grouped
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import HALVES, Comparison, Group, Overall, OverlapEffect, Score
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.verdict import MOST_NOISE
from dpsim.report.table import Column, Table, table
from dpsim.report.words import (
    BASELINES,
    PROFILED_BASELINES,
    OnNetwork,
    devices_name,
    enumerated,
    interval_name,
    network_name,
    percent,
    skill_text,
)
from dpsim.units import format_size

LEGEND = "★ fastest, or as fast as any   ◆ predicted to be fastest"
HOOK_LINE = "model.register_comm_hook(None, dpsim.torch.allreduce_hook())"
ALONE = "One device is scored apart, because without communication the prediction only repeats the profiled times"
Item = TypeVar("Item", bound=OnNetwork)


def by_network(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Return the items grouped by the name of their network, in the order in which the networks appear."""
    return grouped(items, network_name)


def band_name(comparison: Comparison) -> str:
    """Return what the predicted intervals are called: of 90 %, or assumed."""
    return interval_name(comparison.interval_level)


def group_title(group: Group) -> str:
    """Return ``paced:50us,1gbit (emulated), 2 devices``: the network and the values that set the group apart."""
    return ", ".join([network_name(group), *group.apart])


def own_runtime_note(comparison: Comparison) -> str:
    """Return what that column is, and what FSDP's times say of GPUs; nothing where neither is shown."""
    if any(point.runtime == FSDP for point in comparison.points):
        return f" {FSDP_ON_GPUS}"
    if all(point.dpsim_step_s is None for point in comparison.scored):
        return ""
    return (
        " dpsim's runtime sends the same buckets over the same link, beside ranks that wait for the profiled times "
        "instead of computing; it was measured in turns with DDP."
    )


def own_runtime_sentence(points: Sequence[ComparedPoint]) -> str:
    """Return how long dpsim's own runtime took for the steps of DDP; nothing where it was not measured."""
    ratios = [point.dpsim_step_s / point.measured_step_s for point in points if point.dpsim_step_s is not None]
    if not ratios:
        return ""
    span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return (
        f" dpsim's own runtime (emulated computation) took {statistics.median(ratios):.2f} times as long as DDP for "
        f"the same buckets{span}."
    )


def same_buckets_sentences(comparison: Comparison) -> tuple[str, ...]:
    """Return which rules and thresholds of the grid were one setting."""
    same = (point.predicted.names for point in comparison.points)
    names = dict.fromkeys(each for each in same if len(each) > 1)
    return tuple(
        f"{enumerated(each)} make the same buckets: they are one setting, which was measured once." for each in names
    )


def ddp_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield for each number of devices how fast FSDP is beside DDP, which trained the same script in turns with it."""
    measured = [point for point in comparison.scored if point.ddp_step_s is not None]
    for devices, points in grouped(measured, lambda point: point.devices).items():
        best = min(points, key=lambda point: point.measured_s_per_sample)
        times = (best.ddp_step_s or math.inf) / best.measured_step_s
        noise = max(best.measured_noise, best.other_half_width or 0.0)
        decided = "no difference beyond the noise" if 1 / (1 + noise) <= times <= 1 + noise else "measured in turns"
        yield (
            f"FSDP on {devices_name(devices)} trains {times:.2f} times as many samples per second as DDP (noise"
            f" {percent(noise)}): {decided}."
        )


def hook_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield for each number of devices what dpsim's hook gains over gloo, at the setting that is fastest by gloo."""
    measured = [point for point in comparison.scored if point.hook_step_s is not None]
    for devices, points in grouped(measured, lambda point: point.devices).items():
        best = min(points, key=lambda point: point.measured_s_per_sample)
        gain, noise = best.measured_step_s / (best.hook_step_s or math.inf), best.hook_noise or 0.0
        if noise > MOST_NOISE:
            yield f"What dpsim's hook gains on {devices_name(devices)} cannot be said: the noise is {percent(noise)}."
            continue
        times = f"{gain:.2f} times as many samples per second as by gloo (noise {percent(noise)})"
        if gain > 1 + noise:
            yield (
                f"With dpsim's hook {devices_name(devices)} train {times}, measured in turns and not predicted: add the"
                f" line {HOOK_LINE} behind DistributedDataParallel."
            )
        else:
            yield (
                f"With dpsim's hook {devices_name(devices)} train {times}, measured in turns and not predicted: no gain"
                f" beyond the noise, so that the line {HOOK_LINE} is not worth adding."
            )


def errors_sentence(group: Group) -> str:
    """Return how well a group's step times were predicted, and the shape of their curve where there is an effect."""
    step, shape = group.step, group.shape
    text = (
        f"The median error of predicted step times was {percent(step.median_abs_error)}, the best baseline's "
        f"{percent(step.null_median_abs_error)} (skill {skill_text(step.skill)})"
    )
    if group.shape_counts and shape is not None:
        text += (
            f"; of the shape of the curve, {percent(shape.median_abs_error)} against "
            f"{percent(shape.null_median_abs_error)} (skill {skill_text(shape.skill)})"
        )
    return f"{text}."


def score_tables(comparison: Comparison, report: Question) -> tuple[Table, ...]:
    """Return the table of scores, and that of overlap where points were run with and without it."""
    tables = []
    if comparison.groups:
        tables.append(scores_table(comparison, report))
    if comparison.overlap:
        tables.append(overlap_table(comparison))
    return tuple(tables)


@dataclass(frozen=True, kw_only=True)
class _ScoreRow:
    """A row of scores: of the step time, or of exposed communication; ``group`` is only given for the first."""

    devices: str
    of: str
    score: Score
    group: Group | Overall | None = None


def _score_rows(devices: str, group: Group | Overall) -> Iterator[_ScoreRow]:
    yield _ScoreRow(devices=devices, of="step time", score=group.step, group=group)
    if group.shape is not None:
        yield _ScoreRow(devices="", of="shape", score=group.shape)
    yield _ScoreRow(devices="", of="exposed", score=group.exposed_communication)


def scores_table(comparison: Comparison, report: Question) -> Table:
    """Return the model's median absolute errors and those of the baselines, for each group and over all of them."""
    baselines = {name for group in comparison.groups for name in (group.shape or group.step).null_errors}
    sections = {}
    for network, groups in by_network(comparison.groups).items():
        rows = [row for group in groups for row in _score_rows(_group_cell(group), group)]
        if len(groups) > 1:
            of_network = [each for each in comparison.networks if network_name(each) == network]
            rows += [row for overall in of_network for row in _score_rows("all", overall)]
        sections[network] = rows

    def baseline(name: str) -> Column[_ScoreRow]:
        return Column(head=BASELINES[name], cell=lambda row: _null_error(row.score, name))

    return table(
        title="The model against simple baselines",
        columns=(
            Column(head="devices" if _by_devices(comparison.groups) else "settings", cell=lambda row: row.devices),
            Column(head="of", cell=lambda row: row.of, left=True),
            Column(head="model", cell=lambda row: percent(row.score.median_abs_error)),
            Column(head="p90", cell=lambda row: percent(row.score.p90_abs_error), dispensable=2),
            *(baseline(name) for name in BASELINES if name in baselines),
            Column(head="skill", cell=lambda row: skill_text(row.score.skill)),
            Column(head="regret", cell=_regret),
            Column(head="A/A noise", cell=_noise, dispensable=3),
            Column(head="effect", cell=lambda row: percent(row.group.effect) if row.group else "", dispensable=4),
        ),
        sections=sections,
        strong=lambda row: row.group is not None,
        note="Median absolute errors. Skill = 1 - model / best baseline: above 0 the model knows more than every "
        "baseline, at 0 or below a simple guess was as good. "
        f"Constant: the median of the measured steps of {report.constant}, which is only known with "
        "hindsight, so that it counts for the shape and not for the step time. Shape: step times over their mean in "
        "the group, or times of a sample where batches differ; what is common to all of them does not count. "
        "Errors of exposed communication are percentages of the step time. Regret: the cost of following the "
        "prediction; the best setting is chosen on a random half of the rounds and timed on the other, so that chance "
        f"can make it negative: the mean over {HALVES} halves ± their standard deviation. "
        + "Free communication: computation of as many devices as profiled, and nothing else; nothing hidden: the same "
        "and all communication. "
        * (not baselines.isdisjoint(PROFILED_BASELINES))
        + f"Effect = worst / best measured {report.effect} - 1."
        + _alone(comparison),
    )


def _regret(row: _ScoreRow) -> str:
    if row.group is None:
        return ""
    mean, spread = percent(row.group.regret, sign=True), percent(row.group.regret_spread)
    return f"{mean} ± {spread}" if row.group.regret_spread else mean


def _null_error(score: Score, name: str) -> str:
    return percent(score.null_errors[name]) if name in score.null_errors else ""


def _group_cell(group: Group) -> str:
    """The number of devices, ``above 1``, or the values that set the group apart."""
    return str(group.devices or "above 1") if _by_devices([group]) else ", ".join(group.apart)


def _by_devices(groups: Sequence[Group]) -> bool:
    """Return whether nothing but the number of devices sets groups on one network apart."""
    return all("device" in value for group in groups for value in group.apart)


def _noise(row: _ScoreRow) -> str:
    if row.group is None:
        return ""
    return "unknown" if row.group.noise is None else percent(row.group.noise)


def _alone(comparison: Comparison) -> str:
    median = comparison.single_device_median_abs_error
    return "" if median is None else f" {ALONE}: median error {percent(median)}."


def overlap_table(comparison: Comparison) -> Table:
    """Return what overlap does to the step, measured and predicted."""
    verdicts = {True: "right", False: "wrong", None: "within noise"}
    columns: tuple[Column[OverlapEffect], ...] = (
        Column(head="devices", cell=lambda effect: str(effect.devices)),
        Column(head="fusion threshold", cell=lambda effect: format_size(effect.fusion_threshold_bytes), left=True),
        Column(head="overlap", cell=lambda effect: effect.overlap, left=True),
        Column(head="measured", cell=lambda effect: percent(effect.measured_effect, sign=True)),
        Column(head="predicted", cell=lambda effect: percent(effect.predicted_effect, sign=True)),
        Column(head="noise", cell=lambda effect: percent(effect.noise)),
        Column(
            head="predicted sign",
            cell=lambda effect: "too noisy to say" if effect.noise > MOST_NOISE else verdicts[effect.sign_right],
            left=True,
        ),
    )
    return table(
        title="What overlap does",
        columns=columns,
        sections=by_network(comparison.overlap),
        strong=lambda effect: effect.sign_right is False and effect.noise <= MOST_NOISE,
        note="Step with overlap / step without - 1: negative is faster. Noise: the largest of the A/A difference and "
        "the half widths of both intervals.",
    )
