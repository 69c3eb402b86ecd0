"""Completes a declared experiment: its defaults, its points, and the prediction of every point."""

from __future__ import annotations

import itertools
import math
from typing import cast

import msgspec
import numpy as np

from dpsim.data import load_dataset
from dpsim.errors import ConfigError, unknown
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.harness import models
from dpsim.harness.measurement.environment import stamp
from dpsim.layout import parse_devices
from dpsim.lowering.fusion import fuse
from dpsim.machine import Machine, Network, check_algorithm
from dpsim.plan import OVERLAPS, Overlap, Plan, overlap_of
from dpsim.predict import choose_overlap, interval, nulls, predict, price, recommended, scheduled
from dpsim.records.checks import check_distinct
from dpsim.records.sweep import Environment, Experiment, PointKey, PredictedPoint, Predictions, Scaling
from dpsim.runtime.describe import describe
from dpsim.workload import Workload

_THRESHOLDS = 9
_TWINS = 2


def completed(experiment: Experiment) -> Experiment:
    """Return the experiment with all defaults filled in, so that two can be compared. Raises ``ConfigError``."""
    if FUSION_RULES.find(experiment.fusion_rule).default_threshold_bytes is None:
        raise ConfigError(
            f"fusion rule {experiment.fusion_rule!r} has no threshold to sweep",
            allowed=", ".join(threshold_rules()),
            remedy="choose one of these; threshold 0 is one bucket per tensor, inf one per step",
        )
    networks = [Network.parse(token) for token in experiment.networks]
    thresholds = experiment.fusion_thresholds_bytes or _default_thresholds(experiment)
    algorithms = experiment.algorithms or tuple(
        network.default_algorithm(experiment.wire_dtype) for network in networks
    )
    if len(algorithms) == 1:
        algorithms *= len(networks)
    if len(algorithms) != len(networks):
        raise ConfigError(
            f"{len(algorithms)} algorithms for {len(networks)} networks",
            allowed="one for all networks, or one for each in the same order",
        )
    layouts = dict(map(parse_devices, experiment.devices))
    check_distinct("devices", experiment.devices, key=lambda token: parse_devices(token)[0])
    check_distinct("networks", experiment.networks)
    if max(layouts) < 2:
        raise ConfigError(
            f"a sweep on devices {list(experiment.devices)}",
            allowed="at least one count above 1: a single device communicates nothing",
        )
    if experiment.overlap not in ("auto", "all", *OVERLAPS):
        raise unknown("overlap", experiment.overlap, ("auto", "all", *OVERLAPS))
    samples = len(load_dataset(experiment.dataset, experiment.seed).train_y)
    if (largest := experiment.batch(max(layouts))) > samples:
        raise ConfigError(
            f"a global batch of {largest} samples, where {experiment.dataset} has {samples}",
            allowed=f"at most {samples}",
            remedy="lower --global-batch",
        )
    layouts.setdefault(1, "")
    devices = tuple(layouts[count] or count for count in sorted(layouts))
    return msgspec.structs.replace(
        experiment,
        algorithms=algorithms,
        fusion_thresholds_bytes=tuple(sorted(set(thresholds))),
        devices=devices,
        scaling=_completed_scaling(experiment, len(set(thresholds))),
    )


def _default_thresholds(experiment: Experiment) -> tuple[float, ...]:
    if experiment.scaling is None:
        return telling_thresholds(experiment)
    return (FUSION_RULES.find(experiment.fusion_rule).default_threshold_bytes or 0.0,)


def _completed_scaling(experiment: Experiment, thresholds: int) -> Scaling | None:
    scaling = experiment.scaling
    if scaling is None:
        return None
    if thresholds > 1:
        raise ConfigError(
            f"a sweep over the number of devices at {thresholds} fusion thresholds",
            allowed="one threshold",
            remedy="give one threshold, or compare thresholds with dpsim sweep fusion-threshold --devices",
        )
    return msgspec.structs.replace(scaling, batch_norm=scaling.mode)


def telling_thresholds(experiment: Experiment, count: int = _THRESHOLDS) -> tuple[float, ...]:
    """Return at most ``count`` thresholds from 0 to infinity, all of which give different buckets.

    They are powers of two at which the number of buckets changes. Of those, they are the ones with numbers of buckets
    nearest to a geometric series from one per tensor to one per step. Other thresholds would only repeat a measurement.
    """
    dataset = load_dataset(experiment.dataset, experiment.seed)
    sizes = describe(models.load(experiment.model, dataset.input_shape, dataset.classes).replica(), "model").ready_order
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


def networks_of(experiment: Experiment) -> list[tuple[str, str]]:
    """Return (network, algorithm) of each network. Raises ``ConfigError`` unless there is one algorithm for each."""
    networks, algorithms = experiment.networks, experiment.algorithms
    if len(networks) != len(algorithms):
        raise ConfigError(
            f"{len(algorithms)} algorithms for {len(networks)} networks",
            allowed="one for each network",
            remedy="if this is a record, it is damaged: run the sweep again",
        )
    return list(zip(networks, algorithms, strict=True))


def make_plan(
    experiment: Experiment, devices: int | str, algorithm: str, overlap: str, threshold: float | None, network: str
) -> Plan:
    """Return the plan of a configuration of the experiment. Raises ``ConfigError``."""
    count, layout = parse_devices(devices)
    scaling = experiment.scaling or Scaling()
    plan = Plan(
        devices=count,
        layout=layout,
        global_batch=experiment.batch(count),
        fusion_rule=experiment.fusion_rule,
        fusion_threshold_bytes=threshold,
        algorithm=algorithm,
        overlap=overlap_of(overlap),
        optimizer=experiment.optimizer,
        wire_dtype=experiment.wire_dtype,
        leaves=scaling.leaves,
        batch_norm=scaling.mode,
    )
    check_algorithm(algorithm, Network.parse(network))
    return plan


def plan_of(experiment: Experiment, key: PointKey) -> Plan:
    """Return the plan of a point."""
    threshold = key.fusion_threshold_bytes
    return make_plan(experiment, key.layout or key.devices, key.algorithm, key.overlap, threshold, key.network)


def predict_experiment(
    experiment: Experiment, workload: Workload, machines: dict[str, Machine], environment: Environment
) -> Predictions:
    """Predict every point of the experiment, with the overlap that the calibration recommends and others."""
    points: list[PredictedPoint] = []
    mechanisms: dict[str, dict[str, float]] = {}
    for network, algorithm in networks_of(experiment):
        machine = machines[network]
        plans = [
            make_plan(experiment, devices, algorithm, "off", threshold, network)
            for threshold, devices in itertools.product(experiment.fusion_thresholds_bytes, experiment.devices)
        ]
        overlaps = None if experiment.overlap in ("auto", "all") else [experiment.overlap]
        steps = choose_overlap(workload, machine, plans, overlaps)[1]
        mechanisms[network] = steps
        for key in _keys(experiment, network, algorithm, steps):
            points.append(_predicted_point(experiment, workload, machine, key))
    return Predictions(
        experiment=experiment,
        environment=environment,
        predicted_at=stamp(),
        workload=workload,
        machines=tuple(machines.values()),
        points=tuple(points),
        mechanisms=mechanisms,
    )


def chosen_overlap(steps: dict[str, float]) -> Overlap:
    """Return the overlap that a sweep is about, from the predicted step of every mechanism."""
    return cast("Overlap", recommended(steps)) if steps else "off"


def _keys(experiment: Experiment, network: str, algorithm: str, steps: dict[str, float]) -> list[PointKey]:
    """Return all configurations of a network.

    One device comes once. Then every threshold comes with the chosen overlap. With overlap ``auto`` it also comes with
    one alternative (off, or the best other mechanism), but not in a sweep over devices; with ``all`` it comes with
    every other overlap. Some configurations with the chosen overlap come twice, as A/A pairs.
    """
    thresholds = experiment.fusion_thresholds_bytes

    def key(devices: int | str, threshold: float, overlap: str, repeat: int = 0) -> PointKey:
        count, layout = parse_devices(devices)
        return PointKey(
            network=network,
            devices=count,
            fusion_rule=experiment.fusion_rule,
            fusion_threshold_bytes=threshold,
            algorithm=algorithm,
            overlap=overlap,
            global_batch=experiment.batch(count),
            repeat=repeat,
            layout=layout,
        )

    keys = [key(1, thresholds[-1], "off")]
    others = {name: s for name, s in steps.items() if name not in ("off", "inline")}
    chosen = chosen_overlap(steps)
    alternatives = {"auto": ["off"] if chosen != "off" else sorted(others, key=lambda name: others[name])[:1]}
    if experiment.scaling is not None:
        alternatives["auto"] = []
    alternatives["all"] = [name for name in steps if name != chosen]
    for devices in experiment.devices:
        if devices == 1:
            continue
        keys += [key(devices, threshold, chosen) for threshold in thresholds]
        keys += [key(devices, t, chosen, 1) for t in dict.fromkeys((thresholds[0], thresholds[-1]))][:_TWINS]
        for overlap in alternatives.get(experiment.overlap, []):
            keys += [key(devices, threshold, overlap) for threshold in thresholds]
    return keys


def _predicted_point(experiment: Experiment, workload: Workload, machine: Machine, key: PointKey) -> PredictedPoint:
    plan = plan_of(experiment, key)
    priced = price(scheduled(workload, machine, plan), machine)
    prediction, (full_s, slow_s) = priced.prediction, priced.speed_steps_s
    low_s, high_s = interval(prediction)
    of_nulls = nulls(workload, machine, plan)
    if experiment.weak and key.devices > 1:  # perfect weak scaling: the step of one device
        alone = make_plan(experiment, 1, key.algorithm, "off", key.fusion_threshold_bytes, key.network)
        of_nulls["perfect_scaling"] = (predict(workload, machine, alone).step_s, 0.0)
    return PredictedPoint(
        key=key,
        buckets=prediction.buckets if key.devices > 1 else 0,
        step_s=prediction.step_s,
        low_s=low_s,
        high_s=high_s,
        exposed_communication_s=prediction.exposed_communication_s,
        extrapolated=prediction.extrapolated,
        null_step_s={name: value[0] for name, value in of_nulls.items()},
        null_exposed_s={name: value[1] for name, value in of_nulls.items()},
        timeline=priced.timeline().to_record(),
        full_speed_step_s=full_s if machine.speed else None,
        slow_speed_step_s=slow_s if machine.speed else None,
    )
