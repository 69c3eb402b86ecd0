"""The questions that a sweep may ask, each in a file of its own, and what is done alike for all of them."""

from __future__ import annotations

from dpsim.errors import ConfigError
from dpsim.fields import Decides, deciding
from dpsim.harness.sweep.grids import fitting
from dpsim.harness.sweep.questions import batch_norm, devices, local_batch, settings, threshold
from dpsim.plan import Plan
from dpsim.records.reproduce import Reproduction
from dpsim.records.sweep import Experiment
from dpsim.report.sweep.question import QUESTIONS
from dpsim.setting import FIELDS, Setting

__all__ = ["QUESTIONS", "compared", "completed", "group_name"]

for _module in (threshold, devices, local_batch, batch_norm, settings):
    QUESTIONS.register(_module.QUESTION)


def group_name(experiment: Experiment, setting: Setting) -> str:
    """The group of a setting: ``node; 2 devices``."""
    apart = QUESTIONS.find(experiment.question).apart(experiment)
    return "; ".join(_named(setting, name) for name in apart if name != "runtime")


def compared(experiment: Experiment) -> tuple[str, ...]:
    """The fields whose values are compared with each other: those that vary within a group."""
    apart = QUESTIONS.find(experiment.question).apart(experiment)
    values: dict[str, dict[tuple[str, ...], set[str]]] = {}
    for row in experiment.rows:
        group = tuple(str(row.get(name)) for name in apart)
        for name in experiment.varied:
            values.setdefault(name, {}).setdefault(group, set()).add(str(row.get(name)))
    return tuple(name for name in experiment.varied if any(len(each) > 1 for each in values[name].values()))


def _named(setting: Setting, name: str) -> str:
    if name == "network" and setting.runtime != "dpsim":
        return setting.where
    if name in ("network", "model"):
        return setting.text(name)
    if name == "compute":
        return f"{setting.text(name)} compute"
    if name == "devices":
        return f"{setting.text(name)} device{'s' if setting.plan.devices > 1 else ''}"
    if name == "local_batch":
        return f"local batch {setting.plan.local_batch:g}"
    return f"{name.replace('_', ' ')} {setting.text(name)}"


def completed(experiment: Experiment) -> Experiment:
    """Return the experiment with all defaults filled in, so that two can be compared. Raises ``ConfigError``."""
    others = {*map(str, experiment.values("runtime"))} - {"dpsim"}
    if others or experiment.script:
        raise ConfigError(
            f"a sweep with the runtime {', '.join(sorted(others)) or 'of ' + experiment.script}",
            allowed="dpsim",
            remedy="measure a PyTorch script under DDP with dpsim sweep --torch-script",
        )
    completed = QUESTIONS.find(experiment.question).completed(experiment)
    if completed.measures_drift:
        _check_one_training(completed)
    return completed


def _check_one_training(experiment: Experiment) -> None:
    """Refuse to measure the divergence of several trainings, since a sweep trains one of them for it."""
    settings = fitting(experiment)
    of_all = (FIELDS.keys() & Reproduction.__struct_fields__) - {"devices"}  # of these a reproduction has one value
    names = [name for name in FIELDS if name in of_all or name in deciding(Decides.BITS, Plan)]
    varied = [name for name in names if len({setting.value(name) for setting in settings}) > 1]
    if varied:
        raise ConfigError(
            f"steps = {experiment.steps} in a sweep over {', '.join(varied)}: these are several trainings, and the"
            " divergence of one is measured",
            allowed="steps where devices, thresholds, algorithms, networks, strategies or micro-batches vary",
            remedy="leave steps out, or compare one training at a time with dpsim reproduce",
        )
