"""How far the measurements of a sweep can be trusted, and what following the prediction cost as far as can be seen."""

from __future__ import annotations

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.words import percent

MOST_NOISE = 0.3
"""Above this noise, or this drift, a sweep says nothing about its settings."""
_SURE = 1.5
"""The best setting is named where the effect exceeds the noise so many times."""


def disturbance(comparison: Comparison, group: Group) -> str:
    """Return why nothing can be said about a group of settings; nothing where something can."""
    if few := next((point for point in comparison.members(group) if point.too_few_clean), None):
        return f"only {few.too_few_clean} of other processes at one setting"
    if group.noise is not None and group.noise > MOST_NOISE:
        return f"two runs of one setting differ by {percent(group.noise)}"
    if group.drift is not None and abs(group.drift) > MOST_NOISE:
        return f"steps changed by {percent(group.drift, sign=True)} from the first third of the run to the last"
    if group.noise_floor > MOST_NOISE:
        return f"the medians are only known to {percent(group.noise_floor)}"
    return ""


def nothing_said(comparison: Comparison, group: Group) -> str:
    """Return the sentence that stands in the place of a verdict on a disturbed group; nothing for any other."""
    reason = disturbance(comparison, group)
    return f"nothing can be said: {reason}. Stop other processes and run the sweep again." if reason else ""


def unsure(group: Group) -> bool:
    """Return whether no setting of a group is surely the best."""
    return group.below_noise or group.effect <= _SURE * group.noise_floor


def uncertainty(group: Group) -> str:
    """Return by how much a group's settings differ, and how much of that is noise: the end of a sentence."""
    floor = percent(group.noise_floor)
    of_noise = (
        f"two runs of one setting by {floor}"
        if group.noise == group.noise_floor
        else f"their medians are only known to {floor}"
    )
    return f"they differ by {percent(group.effect)}, and {of_noise}"


def as_fast(comparison: Comparison, group: Group) -> tuple[ComparedPoint, ...]:
    """Return the settings of a group that cannot be told apart from the best, with the best among them."""
    limit = comparison.best_measured(group).measured_s_per_sample * (1 + group.noise_floor)
    return tuple(point for point in comparison.members(group) if point.measured_s_per_sample <= limit)


def beforehand_sentence(comparison: Comparison) -> str:
    """Return how far the predictions made before the first sample were off; nothing where there are no others."""
    error, change = comparison.beforehand_median_abs_error, comparison.machine_change
    if error is None or change is None:
        return ""
    return (
        f"Made before the first sample they were {percent(error)} off: profiles and calibrations of the same minutes "
        f"changed the predicted step by {percent(change, sign=True)}."
    )


def cost_of_choice(comparison: Comparison, group: Group) -> str:
    """Return what choosing the predicted best costs against the measured best, as far as can be seen."""
    best, predicted = comparison.best_measured(group), comparison.best_predicted(group)
    if predicted in as_fast(comparison, group):
        return "at no cost that can be seen"
    return f"{percent(predicted.measured_s_per_sample / best.measured_s_per_sample - 1)} slower than the best"
