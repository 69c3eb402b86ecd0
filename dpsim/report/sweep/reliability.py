"""The sentences of a verdict, the same on the terminal and on the page, and how good the predictions were."""

from __future__ import annotations

from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, Group
from dpsim.report.sweep.question import Question
from dpsim.report.sweep.verdict import Verdict, slower_by, verdict
from dpsim.report.words import enumerated, percent


def said(comparison: Comparison, group: Group, report: Question) -> str:
    """Return what is said of a group: whether devices pay, which setting is best, and whether the model knew it."""
    of = verdict(comparison, group)
    if of.said == "nothing":
        return f"Nothing can be said: {of.reason}. Stop other processes and run the sweep again."
    parts = [report.worth(comparison, group), _best(comparison, group, report, of), _model(comparison, group, report)]
    return " ".join(part[:1].upper() + part[1:] for part in parts if part)


def _best(comparison: Comparison, group: Group, report: Question, of: Verdict) -> str:
    noun = report.noun(group)
    if of.said == "one setting":
        return "only one setting was measured."
    if of.said == "no difference":
        return f"the {noun} makes no difference that can be seen: {uncertainty(group)}."
    if of.said == "unsure":
        return f"no {noun} is surely best: {uncertainty(group)}."
    usual = report.usual(comparison, group)
    other = of.slowest if usual is None or usual in of.as_fast else usual
    ratio = f"{other.measured_s_per_sample / of.fastest.measured_s_per_sample:.2g}"
    times = f"{ratio} times as fast as" if ratio != "1" else "a little faster than"
    return f"{report.choices(comparison, group)} trained fastest, {times} {report.label(comparison, other)}."


def _model(comparison: Comparison, group: Group, report: Question) -> str:
    """Return what the model had chosen, and what that costs; nothing where no setting is surely the best."""
    of = verdict(comparison, group)
    if of.best is None:
        return ""
    costs = {cost_of(group, point, of.fastest): None for point in of.chosen}
    if len(of.chosen) > 1:
        tied = enumerated(report.label(comparison, point) for point in of.chosen)
        return f"the model had predicted the same for {tied}: {' or '.join(costs)}."
    if of.chosen == (of.fastest,):
        return "the model had chosen it."
    return f"the model had chosen {report.label(comparison, of.chosen[0])}, {next(iter(costs))}."


def cost_of(group: Group, point: ComparedPoint, best: ComparedPoint) -> str:
    """Return what a setting costs against the best one, as far as can be seen: the end of a sentence."""
    slower = slower_by(group, point, best)
    return "at no cost that can be seen" if slower is None else f"{percent(slower)} slower than the best"


def uncertainty(group: Group) -> str:
    """Return by how much a group's settings differ, and how much of that is noise: the end of a sentence."""
    floor = percent(group.noise_floor)
    of_noise = (
        f"two runs of one setting by {floor}"
        if group.noise == group.noise_floor
        else f"their medians are only known to {floor}"
    )
    return f"they differ by {percent(group.effect)}, and {of_noise}"


def beforehand_sentence(comparison: Comparison) -> str:
    """Return how far the predictions made before the first sample were off; nothing where there are no others."""
    error, change = comparison.beforehand_median_abs_error, comparison.machine_change
    if error is None or change is None:
        return ""
    return (
        f"Made before the first sample they were {percent(error)} off: profiles and calibrations of the same minutes "
        f"changed the predicted step by {percent(change, sign=True)}."
    )
