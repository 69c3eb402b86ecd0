"""Fills in the grids of the questions about devices: networks with their algorithms, thresholds, one device beside."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dpsim.collective import FLAT, parse_devices
from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES, OTHER_BY_DEFAULT, threshold_rules
from dpsim.lowering.fusion import fuse
from dpsim.machine import Network
from dpsim.model.thresholds import caps_up_to_all, distinguishing
from dpsim.records.checks import check_distinct
from dpsim.records.sweep import Experiment
from dpsim.report.sweep.question import QUESTIONS
from dpsim.runtime.describe import describe
from dpsim.setting import Setting, setting_of, threshold_bytes
from dpsim.study import models
from dpsim.workload import Workload

_THRESHOLDS, _LEAST_BYTES = 9, 2.0**4
_MAY_VARY = ("devices", "fusion_threshold_bytes", "network", "algorithm", "compute")


def _rule(experiment: Experiment) -> str:
    return str(experiment.value("fusion_rule") or "tarantella")


def one_threshold(experiment: Experiment) -> list[float]:
    """The experiment's only fusion threshold, or the rule's default. Raises ``ConfigError`` for several.

    There is none for a rule that makes other buckets where no threshold is set.
    """
    thresholds = [threshold_bytes(value) for value in experiment.values("fusion_threshold_bytes")]
    if len(thresholds) > 1:
        raise ConfigError(
            f"a sweep over {QUESTIONS.find(experiment.question).about} at {len(thresholds)} fusion thresholds",
            allowed="one threshold",
            remedy="give one threshold, or compare thresholds with dpsim sweep fusion-threshold --devices",
        )
    rule = FUSION_RULES.find(_rule(experiment))
    default = [] if rule.name in OTHER_BY_DEFAULT else [rule.default_threshold_bytes or 0.0]
    return thresholds or default


def of_devices(
    experiment: Experiment,
    thresholds: Sequence[float],
    varied: Sequence[str] = (),
    cases: Sequence[dict[str, Any]] = ({},),
) -> Experiment:
    """The experiment with one device among its devices, these thresholds, and an algorithm for each network.

    ``varied`` are more fields that may have several values, and ``cases`` are crossed with the networks.
    """
    allowed = (*_MAY_VARY, *varied)
    for name in experiment.varied:
        if name not in allowed:
            raise ConfigError(
                f"{name} has several values in a sweep that asks about {experiment.question}",
                allowed="several values of " + ", ".join(allowed),
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
    layouts.setdefault(1, FLAT)
    crossed = tuple(network | case for network, case in itertools.product(_networks(experiment), cases))
    changed = experiment.changed(
        devices=tuple(layouts[count] or count for count in sorted(layouts)),
        fusion_threshold_bytes=tuple(thresholds) or None,
        network=None,
        algorithm=None,
    )
    completed = msgspec.structs.replace(changed, cases=crossed)
    fitting(completed)
    return completed


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


def fitting(experiment: Experiment) -> tuple[Setting, ...]:
    """The settings. Raises ``ConfigError`` for impossible ones, and for a global batch above the data set.

    No step would ever have the whole of such a batch, so nothing would count.
    """
    if any("global_batch" not in row and "local_batch" not in row for row in experiment.rows):
        raise ConfigError(
            "a setting without a batch", allowed="global_batch, or local_batch for weak scaling", remedy="add one"
        )
    settings = experiment.settings
    samples = len(load_dataset(experiment.dataset, experiment.seed).train_y)
    if (largest := max(setting.plan.global_batch for setting in settings)) > samples:
        raise ConfigError(
            f"a global batch of {largest} samples, where {experiment.dataset} has {samples}",
            allowed=f"at most {samples}",
            remedy="lower --global-batch",
        )
    return settings


def places(experiment: Experiment) -> tuple[str, ...]:
    """Return the fields that say where a setting runs: times of different places are never compared."""
    return ("network", *(name for name in ("runtime", "compute") if name in experiment.varied))


def refuse_all_overlaps(experiment: Experiment) -> None:
    """Refuse overlap ``all`` where several models are calibrated apart, each with its own recommended overlap."""
    if "all" in experiment.values("overlap"):
        raise ConfigError(
            f"overlap all in a sweep over {QUESTIONS.find(experiment.question).about}",
            allowed="auto, or a mechanism; in a grid of settings an axis overlap = ['off', 'poll', 'thread']",
        )


def telling_thresholds(experiment: Experiment) -> tuple[float, ...]:
    """Return at most 9 thresholds from 0 to infinity, all of which give different buckets.

    Other thresholds would only repeat a measurement (``telling``).
    """
    dataset = load_dataset(experiment.dataset, experiment.seed)
    model = setting_of(experiment.rows[0]).model
    workload = describe(models.load(model, dataset.input_shape, dataset.classes).replica(), "model")
    return telling(workload, "tarantella", _LEAST_BYTES, _THRESHOLDS)


def telling(workload: Workload, rule: str, least_bytes: float, count: int) -> tuple[float, ...]:
    """Return at most ``count`` thresholds in bytes, all of which give different buckets under a rule.

    They are 0, infinity, and powers of two from ``least_bytes`` on at which the number of buckets changes: those with
    numbers of buckets nearest to a geometric series from one per tensor to one per step.
    """
    order = workload.ready_order

    def buckets_of(threshold: float) -> int:
        return len(fuse(order.size_bytes, rule, threshold, dtype_code=order.dtype_code)) - 1

    compared = distinguishing(caps_up_to_all(workload, least_bytes), buckets_of)
    buckets = {buckets_of(threshold): threshold for threshold in (*compared, math.inf)}
    numbers = sorted(buckets)
    targets = np.geomspace(numbers[0], numbers[-1], count)
    chosen = {min(numbers, key=lambda number: abs(math.log(number / target))) for target in targets}
    for number in numbers:  # fill up where two targets have the same nearest number
        if len(chosen) < count:
            chosen.add(number)
    return tuple(sorted(buckets[number] for number in chosen))
