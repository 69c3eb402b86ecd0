"""The questions that a sweep may answer: what each fills in, how it groups settings, what it scores the model against.

What the report says to each stands in ``dpsim.report.sweep.questions``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.harness import models
from dpsim.harness.sweep.scores import DEVICES_NULLS, PREDICTED_NULLS
from dpsim.layout import parse_devices
from dpsim.lowering.fusion import fuse
from dpsim.machine import Network
from dpsim.records.checks import check_distinct
from dpsim.records.sweep import Experiment
from dpsim.registry import Registry
from dpsim.runtime.describe import describe
from dpsim.setting import Setting, setting_of, settings_of, threshold_bytes

_THRESHOLDS = 9
_PROBLEM = ("network", "compute", "model", "devices", "global_batch", "local_batch")
"""Fields that set the problem rather than solve it: their values are not compared where anything else varies."""


class Question(Protocol):
    """What a sweep asks. ``nulls`` are the predicted ones that the model is scored against.

    ``alternatives``: under overlap ``auto`` a second mechanism is measured too, to show what overlap does.
    ``alternatives_apart``: only settings with the recommended overlap are compared with each other.
    """

    @property
    def name(self) -> str: ...
    @property
    def nulls(self) -> tuple[str, ...]: ...
    @property
    def alternatives(self) -> bool: ...
    @property
    def alternatives_apart(self) -> bool: ...

    def completed(self, experiment: Experiment) -> Experiment:
        """The experiment with what the question fills in. Raises ``ConfigError`` where it cannot be asked."""

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        """The fields that divide the settings into groups: only settings of one group are compared with each other."""


QUESTIONS: Registry[Question] = Registry("question")


@dataclass(frozen=True, kw_only=True)
class FusionThreshold:
    """Which fusion threshold makes a step fastest, on each network and number of devices?"""

    name: str = "fusion-threshold"
    nulls: tuple[str, ...] = PREDICTED_NULLS
    alternatives: bool = True
    alternatives_apart: bool = True

    def completed(self, experiment: Experiment) -> Experiment:
        given = [threshold_bytes(value) for value in experiment.values("fusion_threshold_bytes")]
        return _of_devices(experiment, sorted(set(given or telling_thresholds(experiment))))

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        return ("network", "devices")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """How fast is training on more devices? Compares samples/s on all of them, on each network."""

    name: str = "devices"
    nulls: tuple[str, ...] = DEVICES_NULLS
    alternatives: bool = False
    alternatives_apart: bool = True

    def completed(self, experiment: Experiment) -> Experiment:
        thresholds = [threshold_bytes(value) for value in experiment.values("fusion_threshold_bytes")]
        if len(thresholds) > 1:
            raise ConfigError(
                f"a sweep over the number of devices at {len(thresholds)} fusion thresholds",
                allowed="one threshold",
                remedy="give one threshold, or compare thresholds with dpsim sweep fusion-threshold --devices",
            )
        if experiment.weak and experiment.value("leaves"):
            raise ConfigError(
                f"weak scaling with {experiment.value('leaves')} leaves: each device count trains another global batch",
                allowed="leaves with strong scaling, where every device count trains the same batch",
                remedy="leave out --reproducible and --leaves, or use --scaling strong",
            )
        default = FUSION_RULES.find(_rule(experiment)).default_threshold_bytes or 0.0
        return _of_devices(experiment, [*thresholds] or [default])

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        return ("network",)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which of these settings trains fastest? For any grid; compares samples/s."""

    name: str = "settings"
    nulls: tuple[str, ...] = PREDICTED_NULLS
    alternatives: bool = False
    alternatives_apart: bool = False

    def completed(self, experiment: Experiment) -> Experiment:
        if "all" in experiment.values("overlap"):
            raise ConfigError(
                "overlap all in a grid of settings",
                allowed="auto, or mechanisms: an axis overlap = ['off', 'poll', 'thread']",
            )
        if not experiment.varied:
            raise ConfigError(
                f"the experiment {experiment.name} has a single setting, with which nothing can be compared",
                allowed="[axes] with several values of a field, or several [[cases]]",
                remedy="give an axis several values, such as algorithm = ['ring', 'halving-doubling']",
            )
        if max(setting.plan.devices for setting in _fitting(experiment)) < 2:
            raise ConfigError(
                "a sweep on one device", allowed="two devices or more in some setting: one communicates nothing"
            )
        return experiment

    def apart(self, experiment: Experiment) -> tuple[str, ...]:
        varied = experiment.varied
        compared = experiment.compared or tuple(name for name in varied if name not in _PROBLEM)
        batch = tuple(name for name in ("global_batch", "local_batch", "devices") if name in varied)[:1]
        return ("network", *(name for name in varied if name != "network" and name not in (compared or batch)))


for _question in (FusionThreshold(), Devices(), Settings()):
    QUESTIONS.register(_question)


def group_name(experiment: Experiment, setting: Setting) -> str:
    """The group of a setting: ``node; 2 devices``."""
    return "; ".join(_named(setting, name) for name in QUESTIONS.find(experiment.question).apart(experiment))


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
    return QUESTIONS.find(experiment.question).completed(experiment)


def check_question(experiment: Experiment, name: str) -> None:
    """Refuse an experiment that asks another question than the command."""
    if experiment.question != name:
        about = {"devices": "the number of devices", "fusion-threshold": "the fusion threshold"}
        command = experiment.question if experiment.question in about else "FILE"
        raise ConfigError(
            f"the experiment {experiment.name} asks another question: it is a sweep over "
            f"{about.get(experiment.question, 'settings')}",
            allowed=f'question = "{name}"',
            remedy=f"run it with dpsim sweep {command}",
        )


def _rule(experiment: Experiment) -> str:
    return str(experiment.value("fusion_rule") or "tarantella")


def _of_devices(experiment: Experiment, thresholds: list[float]) -> Experiment:
    """The experiment with one device among its devices, these thresholds, and an algorithm for each network."""
    for name in experiment.varied:
        if name not in ("devices", "fusion_threshold_bytes", "network", "algorithm"):
            raise ConfigError(
                f"{name} has several values in a sweep that asks about {experiment.question}",
                allowed="several values of devices, fusion_threshold_bytes, network and algorithm",
                remedy="leave `question` out of the file: then any grid of settings is compared",
            )
    if FUSION_RULES.find(_rule(experiment)).default_threshold_bytes is None:
        raise ConfigError(
            f"fusion rule {_rule(experiment)!r} has no threshold to sweep",
            allowed=", ".join(threshold_rules()),
            remedy="choose one of these; threshold 0 is one bucket per tensor, inf one per step",
        )
    tokens = experiment.values("devices") or (1, 2)
    check_distinct("devices", tokens, key=lambda token: parse_devices(token)[0])
    layouts = dict(map(parse_devices, tokens))
    if max(layouts) < 2:
        raise ConfigError(
            f"a sweep on devices {list(tokens)}",
            allowed="at least one count above 1: a single device communicates nothing",
        )
    layouts.setdefault(1, "")
    cases = _networks(experiment)
    changed = experiment.changed(
        devices=tuple(layouts[count] or count for count in sorted(layouts)),
        fusion_threshold_bytes=tuple(thresholds),
        network=None,
        algorithm=None,
    )
    whole = msgspec.structs.replace(experiment, **(changed | {"cases": cases}))
    _fitting(whole)
    return whole


def _networks(experiment: Experiment) -> tuple[dict[str, Any], ...]:
    """A case for each network, with its algorithm."""
    tokens = [str(case["network"]) for case in experiment.cases if "network" in case]
    networks = tokens or [str(token) for token in experiment.values("network")] or ["node"]
    check_distinct("networks", networks)
    algorithms: list[str | None] = list(experiment.values("algorithm"))
    if any("algorithm" in case for case in experiment.cases):
        algorithms = [case.get("algorithm") for case in experiment.cases if "network" in case]
    if len(algorithms) <= 1:
        algorithms = [algorithms[0] if algorithms else None] * len(networks)
    if len(algorithms) != len(networks):
        raise ConfigError(
            f"{len(algorithms)} algorithms for {len(networks)} networks",
            allowed="one for all networks, or one for each in the same order",
        )
    wire = experiment.value("wire_dtype")
    return tuple(
        {"network": network, "algorithm": algorithm or Network.parse(network).default_algorithm(wire)}
        for network, algorithm in zip(networks, algorithms, strict=True)
    )


def _fitting(experiment: Experiment) -> tuple[Setting, ...]:
    """The settings. Raises ``ConfigError`` for impossible ones, and for a global batch above the data set.

    No step would ever have the whole of such a batch, so nothing would count.
    """
    if any("global_batch" not in row and "local_batch" not in row for row in experiment.rows):
        raise ConfigError(
            "a setting without a batch", allowed="global_batch, or local_batch for weak scaling", remedy="add one"
        )
    settings = settings_of(experiment.rows)
    samples = len(load_dataset(experiment.dataset, experiment.seed).train_y)
    if (largest := max(setting.plan.global_batch for setting in settings)) > samples:
        raise ConfigError(
            f"a global batch of {largest} samples, where {experiment.dataset} has {samples}",
            allowed=f"at most {samples}",
            remedy="lower --global-batch",
        )
    return settings


def telling_thresholds(experiment: Experiment, count: int = _THRESHOLDS) -> tuple[float, ...]:
    """Return at most ``count`` thresholds from 0 to infinity, all of which give different buckets.

    They are powers of two at which the number of buckets changes. Of those, they are the ones with numbers of buckets
    nearest to a geometric series from one per tensor to one per step. Other thresholds would only repeat a measurement.
    """
    dataset = load_dataset(experiment.dataset, experiment.seed)
    model = setting_of(experiment.rows[0]).model
    sizes = describe(models.load(model, dataset.input_shape, dataset.classes).replica(), "model").ready_order
    buckets: dict[int, float] = {}
    candidates = [0.0, *(2.0**power for power in range(4, 64) if 2.0**power < sizes.size_bytes.sum()), math.inf]
    for threshold in candidates:
        starts = fuse(sizes.size_bytes, "tarantella", threshold, dtype_code=sizes.dtype_code)
        buckets.setdefault(len(starts) - 1, threshold)
    buckets[1] = math.inf
    numbers = sorted(buckets)
    targets = np.geomspace(numbers[0], numbers[-1], count)
    chosen = {min(numbers, key=lambda number: abs(math.log(number / target))) for target in targets}
    for number in numbers:  # fill up where two targets have the same nearest number
        if len(chosen) < count:
            chosen.add(number)
    return tuple(sorted(buckets[number] for number in chosen))
