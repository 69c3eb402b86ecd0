"""The questions that a sweep may answer: what each fills in, how it groups settings, what it scores the model against.

What reports say to each stands in ``dpsim/report/sweep``, in a file of its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from dpsim.errors import ConfigError
from dpsim.fields import Decides, deciding
from dpsim.harness.sweep.grids import fitting, of_devices, one_threshold, telling_thresholds
from dpsim.harness.sweep.norms import NORM_FIELDS, NORMS_COMPARED, norm_cases
from dpsim.harness.sweep.scores import DEVICES_NULLS, PERFECT_SCALING, PREDICTED_NULLS, PROPORTIONAL
from dpsim.plan import Plan
from dpsim.records.sweep import Experiment
from dpsim.registry import Registry
from dpsim.report.sweep.content import REPORTS
from dpsim.setting import Setting, threshold_bytes

LEAST_BATCHES = 3
_PROBLEM = ("network", "compute", "model", "devices", "global_batch", "local_batch")
"""Fields that set the problem rather than solve it: their values are not compared where anything else varies."""


@dataclass(frozen=True, kw_only=True)
class Question(ABC):
    """What a sweep asks. ``nulls`` are the predicted ones that the model is scored against on several devices.

    ``single_nulls``: those on one device; without them it is not scored, for its prediction repeats the profile.
    ``interpolates``: only every other local batch is profiled, so that predictions go beyond what was profiled.
    ``alternatives``: under overlap ``auto`` a second mechanism is measured too, to show what overlap does.
    ``alternatives_apart``: only settings with the recommended overlap are compared with each other.
    """

    name: str
    nulls: tuple[str, ...]
    single_nulls: tuple[str, ...] = ()
    interpolates: bool = False
    alternatives: bool = False
    alternatives_apart: bool = True

    @abstractmethod
    def completed(self, experiment: Experiment) -> Experiment:
        """The experiment with what the question fills in. Raises ``ConfigError`` where it cannot be asked."""

    @abstractmethod
    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        """The fields that divide the settings into groups: only settings of one group are compared with each other."""


QUESTIONS: Registry[Question] = Registry("question", Question, group="dpsim.questions")


@dataclass(frozen=True, kw_only=True)
class FusionThreshold(Question):
    """Which fusion threshold makes a step fastest, on each network and number of devices?"""

    name: str = "fusion-threshold"
    nulls: tuple[str, ...] = PREDICTED_NULLS
    alternatives: bool = True

    def completed(self, experiment: Experiment) -> Experiment:
        given = [threshold_bytes(value) for value in experiment.values("fusion_threshold_bytes")]
        return of_devices(experiment, sorted(set(given or telling_thresholds(experiment))))

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        return (*_places(experiment), "devices")


@dataclass(frozen=True, kw_only=True)
class Devices(Question):
    """How fast is training on more devices? Compares samples/s on all of them, on each network."""

    name: str = "devices"
    nulls: tuple[str, ...] = DEVICES_NULLS

    def completed(self, experiment: Experiment) -> Experiment:
        thresholds = one_threshold(experiment)
        if experiment.weak and experiment.value("leaves"):
            raise ConfigError(
                f"weak scaling with {experiment.value('leaves')} leaves: each device count trains another global batch",
                allowed="leaves with strong scaling, where every device count trains the same batch",
                remedy="leave out --reproducible and --leaves, or use --scaling strong",
            )
        return of_devices(experiment, thresholds)

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        return _places(experiment)


@dataclass(frozen=True, kw_only=True)
class LocalBatch(Question):
    """How fast is training at each local batch, and when is a device busy? Compares samples/s.

    No null knows how time depends on the batch: a sum of computation and allreduces would be the model itself.

    Under weak scaling each local batch is a curve's point, and under strong scaling each global batch. Only every other
    batch is profiled; the rest is predicted between them.
    """

    name: str = "local-batch"
    nulls: tuple[str, ...] = (PERFECT_SCALING, PROPORTIONAL)
    single_nulls: tuple[str, ...] = (PROPORTIONAL,)
    interpolates: bool = True

    def completed(self, experiment: Experiment) -> Experiment:
        if experiment.value("leaves"):
            raise ConfigError(
                f"a sweep over the local batch with {experiment.value('leaves')} leaves",
                allowed="training without leaves",
                remedy="leave out --reproducible and --leaves",
            )
        varied = "local_batch" if experiment.weak else "global_batch"
        batches = experiment.values(varied)
        if len(batches) < LEAST_BATCHES:
            raise ConfigError(
                f"a sweep over the local batch with {len(batches)} values of {varied}: {', '.join(map(str, batches))}",
                allowed=f"{LEAST_BATCHES} or more: the curve is predicted between those that are profiled",
                remedy="give more, such as --local-batch 8,16,32,64,128",
            )
        return of_devices(experiment, one_threshold(experiment), varied=(varied,))

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        return (*_places(experiment), "devices")


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Question):
    """What does batch norm cost, by whose statistics it takes and what stands in its place? Compares samples/s."""

    name: str = "batch-norm"
    nulls: tuple[str, ...] = (PERFECT_SCALING,)
    alternatives_apart: bool = False

    def completed(self, experiment: Experiment) -> Experiment:
        _refuse_all_overlaps(experiment)
        cases = tuple({name: row[name] for name in NORM_FIELDS if name in row} for row in experiment.rows)
        distinct = tuple(case for place, case in enumerate(cases) if case not in cases[:place])
        if len(distinct) == 1:
            emulated = experiment.value("compute") == "emulated"  # which cannot have leaves
            distinct = norm_cases(experiment, [n for n in NORMS_COMPARED if n != "leaf" or not emulated])
        batch = "local_batch" if experiment.weak else "global_batch"
        rest = msgspec.structs.replace(experiment, **experiment.changed(**dict.fromkeys(NORM_FIELDS)))
        return of_devices(rest, one_threshold(rest), (batch,), distinct)

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        return (*_places(experiment), "devices", "local_batch" if experiment.weak else "global_batch")


@dataclass(frozen=True, kw_only=True)
class Settings(Question):
    """Which of these settings trains fastest? For any grid; compares samples/s."""

    name: str = "settings"
    nulls: tuple[str, ...] = PREDICTED_NULLS
    alternatives_apart: bool = False

    def completed(self, experiment: Experiment) -> Experiment:
        _refuse_all_overlaps(experiment)
        if not experiment.varied:
            raise ConfigError(
                f"the experiment {experiment.name} has a single setting, with which nothing can be compared",
                allowed="[axes] with several values of a field, or several [[cases]]",
                remedy="give an axis several values, such as algorithm = ['ring', 'halving-doubling']",
            )
        if max(setting.plan.devices for setting in fitting(experiment)) < 2:
            raise ConfigError(
                "a sweep on one device", allowed="two devices or more in some setting: one communicates nothing"
            )
        return experiment

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        varied = experiment.varied
        compared = experiment.compared or tuple(name for name in varied if name not in _PROBLEM)
        batch = tuple(name for name in ("global_batch", "local_batch", "devices") if name in varied)[:1]
        places = _places(experiment) if experiment.script else ("network",)
        known = (*places, *(compared or batch), *(("algorithm", "overlap") if experiment.script else ()))
        return (*places, *(name for name in varied if name not in known))  # DDP's algorithm and overlap are its place's


for _question in (FusionThreshold(), Devices(), LocalBatch(), BatchNorm(), Settings()):
    QUESTIONS.register(_question)


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


def _places(experiment: Experiment) -> tuple[str, ...]:
    """The fields that say where a setting runs: times of different places are never compared."""
    return ("network", *(name for name in ("runtime", "compute") if name in experiment.varied))


def _refuse_all_overlaps(experiment: Experiment) -> None:
    """Refuse overlap ``all`` where several models are calibrated apart, each with its own recommended overlap."""
    if "all" in experiment.values("overlap"):
        raise ConfigError(
            f"overlap all in a sweep over {REPORTS.find(experiment.question).about}",
            allowed="auto, or a mechanism; in a grid of settings an axis overlap = ['off', 'poll', 'thread']",
        )


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
            remedy="measure a PyTorch script under DDP with dpsim measure --torch-script",
        )
    completed = QUESTIONS.find(experiment.question).completed(experiment)
    if completed.measures_drift:
        _check_one_training(completed)
    return completed


def _check_one_training(experiment: Experiment) -> None:
    """Refuse to measure the divergence of several trainings, since a sweep trains one of them for it."""
    settings = fitting(experiment)
    names = [*deciding(Decides.BITS, Plan), "fusion_rule", "cycle_s", "model"]
    several = [name for name in names if len({setting.value(name) for setting in settings}) > 1]
    if several:
        raise ConfigError(
            f"steps = {experiment.steps} in a sweep over {', '.join(several)}: these are several trainings, and the"
            " divergence of one is measured",
            allowed="steps where devices, thresholds, algorithms, networks, strategies or micro-batches vary",
            remedy="leave steps out, or compare one training at a time with dpsim reproduce",
        )


def check_question(experiment: Experiment, name: str) -> None:
    """Refuse an experiment that asks another question than the command."""
    if experiment.question != name:
        command = experiment.question if experiment.question != "settings" else "FILE"
        about = REPORTS.find(experiment.question).about
        raise ConfigError(
            f"the experiment {experiment.name} asks another question: it is a sweep over {about}",
            allowed=f'question = "{name}"',
            remedy=f"run it with dpsim sweep {command}",
        )
