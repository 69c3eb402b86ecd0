"""``sweep``: calibrate, profile, predict every point, and only then measure; compare, and write the report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpsim import codec
from dpsim.comm.launch import on_ranks
from dpsim.data import load_dataset
from dpsim.errors import ConfigError, DpsimError, unknown
from dpsim.fusion import fuse
from dpsim.harness.calibrate import stamp
from dpsim.harness.compare import compare
from dpsim.harness.environment import environment
from dpsim.harness.prepare import Preparation, prepare
from dpsim.harness.samples import SAMPLES_SCHEMA, MeasureTask, Samples
from dpsim.machine import Machine, Network, check_algorithm
from dpsim.nn import build_model
from dpsim.plan import OVERLAPS, Plan
from dpsim.predict import choose_overlap, interval, nulls, predict, recommended, timeline
from dpsim.record import (
    Environment,
    Experiment,
    PointKey,
    PredictedPoint,
    Predictions,
    Results,
    read_experiment,
    read_predictions,
    read_results,
)
from dpsim.report.comparison import Comparison
from dpsim.report.write import write_report
from dpsim.runtime.describe import describe
from dpsim.workload import Workload

Progress = Callable[[str], None]
_THRESHOLDS = 9
_DEFAULT_ALGORITHM = {False: "mpi", True: "ring"}
_TWINS = 2


def completed(experiment: Experiment) -> Experiment:
    """The experiment with every default written out, so that two of them can be compared. Raises ``ConfigError``."""
    networks = [Network.parse(token) for token in experiment.networks]
    thresholds = experiment.fusion_thresholds_bytes or telling_thresholds(experiment)
    algorithms = experiment.algorithms or tuple(_DEFAULT_ALGORITHM[network.emulated] for network in networks)
    if len(algorithms) == 1:
        algorithms *= len(networks)
    if len(algorithms) != len(networks):
        raise ConfigError(
            f"{len(algorithms)} algorithms for {len(networks)} networks",
            allowed="one for all, or one a network in the same order",
        )
    for what, values in (("devices", experiment.devices), ("networks", experiment.networks)):
        if not values or len(set(values)) != len(values):
            raise ConfigError(f"{what} is {list(values)}", allowed="one or more different values")
    if experiment.overlap not in ("auto", *OVERLAPS):
        raise unknown("overlap", experiment.overlap, ("auto", *OVERLAPS))
    if experiment.fusion_rule not in ("tarantella", "ddp", "horovod"):
        raise ConfigError(
            f"fusion rule {experiment.fusion_rule!r} has no threshold to sweep", allowed="tarantella, ddp, horovod"
        )
    devices = tuple(sorted({1, *experiment.devices}))
    return msgspec.structs.replace(
        experiment, algorithms=algorithms, fusion_thresholds_bytes=tuple(sorted(set(thresholds))), devices=devices
    )


def telling_thresholds(experiment: Experiment, count: int = _THRESHOLDS) -> tuple[float, ...]:
    """At most ``count`` thresholds from 0 to infinity that all give different buckets.

    Of the powers of two, those at which the number of buckets changes; of these the ones whose numbers of
    buckets lie nearest to a geometric series from one a tensor to one a step. A threshold that leaves the
    buckets as they are would be measured for nothing.
    """
    dataset = load_dataset(experiment.dataset, experiment.seed)
    sizes = describe(build_model(experiment.model, dataset.input_shape, dataset.classes), "model").ready_order
    buckets: dict[int, float] = {}
    candidates = [0.0, *(2.0**power for power in range(4, 64) if 2.0**power < sizes.size_bytes.sum()), math.inf]
    for threshold in candidates:
        starts = fuse(sizes.size_bytes, "tarantella", threshold, dtype_code=sizes.dtype_code)
        buckets.setdefault(len(starts) - 1, threshold)
    buckets[1] = math.inf
    numbers = sorted(buckets)
    wanted = np.geomspace(numbers[0], numbers[-1], count)
    chosen = {min(numbers, key=lambda number: abs(math.log(number / value))) for value in wanted}
    for number in numbers:  # fill up where two wishes met
        if len(chosen) < count:
            chosen.add(number)
    return tuple(sorted(buckets[number] for number in chosen))


def sweep(experiment: Experiment, folder: Path, progress: Progress) -> Comparison:
    """Run a declared sweep into ``folder``, or continue it where it stopped; returns the comparison.

    Leaves ``predictions.json`` (written and hashed before the first measured sample), ``results.json`` and the
    report. Raises ``ConfigError`` where the folder holds another experiment, ``CommunicationError`` where ranks fail.
    """
    experiment = completed(experiment)
    for devices, (network, algorithm) in itertools.product(experiment.devices, _networks(experiment)):
        _plan(experiment, devices, algorithm, "off", None, network)  # every mistake shows before anything runs
    predictions = _existing(folder, experiment)
    if (folder / "results.json").exists() and predictions is not None:
        progress(f"{folder} holds this experiment complete; nothing is measured again")
        results = read_results(folder / "results.json")
    else:
        if predictions is None:
            codec.write(folder / "predictions.json", _predicted(experiment, progress))
            predictions = read_predictions(folder / "predictions.json")
        results = _measured(predictions, folder, progress)
        codec.write(folder / "results.json", results)
        (folder / "samples.json").unlink(missing_ok=True)
    comparison = compare(predictions, results)
    progress("writing the report")
    write_report(folder, predictions, results, comparison)
    return comparison


def declared(name: str) -> Experiment:
    """The experiment that ``dpsim.experiments`` declares under a name, such as ``fusion_threshold``."""
    source = resources.files("dpsim.experiments") / f"{name}.toml"
    with resources.as_file(source) as path:
        return read_experiment(path)


def free_folder(reports: Path, experiment: Experiment) -> Path:
    """Where a sweep goes when no folder is named: ``reports/NAME``, or ``reports/NAME-2`` and so on.

    The first that is new, empty, or holds the same experiment unfinished.
    """
    experiment = completed(experiment)
    for number in itertools.count(1):
        folder = reports / (experiment.name if number == 1 else f"{experiment.name}-{number}")
        if (folder / "results.json").exists():
            continue
        try:
            _existing(folder, experiment)
        except DpsimError:
            continue
        return folder
    raise AssertionError("unreachable: there is always a next number")


def _existing(folder: Path, experiment: Experiment) -> Predictions | None:
    """The predictions already in the folder, which must be of this experiment; None where there is nothing."""
    path = folder / "predictions.json"
    if not path.exists():
        strangers = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        if strangers:
            raise ConfigError(
                f"the folder {folder} is not empty ({', '.join(strangers[:4])}) and holds no sweep of dpsim",
                allowed="a new or empty folder, or one of this experiment",
                remedy="choose another folder with --output",
            )
        return None
    predictions = read_predictions(path)
    if predictions.experiment != experiment:
        differing = [
            f"{name} is {getattr(predictions.experiment, name)!r} there, {getattr(experiment, name)!r} here"
            for name in Experiment.__struct_fields__
            if getattr(predictions.experiment, name) != getattr(experiment, name)
        ]
        raise ConfigError(
            f"the folder {folder} holds the report of another experiment: {'; '.join(differing[:3])}",
            allowed="a new folder, or the same experiment",
            remedy="choose another folder with --output; nothing there was changed",
        )
    return predictions


def _networks(experiment: Experiment) -> list[tuple[str, str]]:
    return list(zip(experiment.networks, experiment.algorithms, strict=True))


def _plan(
    experiment: Experiment, devices: int, algorithm: str, overlap: str, threshold: float | None, network: str
) -> Plan:
    plan = Plan(
        devices=devices, global_batch=experiment.global_batch, fusion_rule=experiment.fusion_rule,  # type: ignore[arg-type]
        fusion_threshold_bytes=threshold, algorithm=algorithm, overlap=overlap, optimizer=experiment.optimizer,  # type: ignore[arg-type]
    )  # fmt: skip
    check_algorithm(algorithm, Network.parse(network))
    return plan


def _plan_of(experiment: Experiment, key: PointKey) -> Plan:
    threshold = key.fusion_threshold_bytes
    return _plan(experiment, key.devices, key.algorithm, key.overlap, threshold, key.network)


def _predicted(experiment: Experiment, progress: Progress) -> Predictions:
    """Calibrate and profile on running ranks, then predict every point from what they say alone."""
    preparation = Preparation(
        model=experiment.model, dataset=experiment.dataset, optimizer=experiment.optimizer, seed=experiment.seed,
        global_batch=experiment.global_batch, devices=experiment.devices,
        networks=tuple(_networks(experiment)), overlaps=_mechanisms(experiment),
    )  # fmt: skip
    workload, machines = prepare(preparation, progress)
    return _predict_all(experiment, workload, machines, environment())


def _mechanisms(experiment: Experiment) -> tuple[str, ...]:
    return tuple(m for m in ("poll", "thread") if experiment.overlap in ("auto", m))


def _predict_all(
    experiment: Experiment, workload: Workload, machines: dict[str, Machine], here: Environment
) -> Predictions:
    """Every point of the experiment predicted, with the overlap that the calibration recommends and one beside it."""
    points: list[PredictedPoint] = []
    mechanisms: dict[str, dict[str, float]] = {}
    for network, algorithm in _networks(experiment):
        machine = machines[network]
        steps: dict[str, float] = {}
        for threshold, devices in itertools.product(experiment.fusion_thresholds_bytes, experiment.devices):
            if devices > 1:
                plan = _plan(experiment, devices, algorithm, "off", threshold, network)
                for name, step_s in choose_overlap(workload, machine, plan)[1].items():
                    steps[name] = min(step_s, steps.get(name, step_s))
        if experiment.overlap != "auto":
            steps = {name: step_s for name, step_s in steps.items() if name == experiment.overlap}
        mechanisms[network] = steps
        for key in _keys(experiment, network, algorithm, steps):
            points.append(_predicted_point(experiment, workload, machine, key))
    return Predictions(
        experiment=experiment, environment=here, predicted_at=stamp(), workload=workload,
        machines=tuple(machines.values()), points=tuple(points), mechanisms=mechanisms,
    )  # fmt: skip


def _keys(experiment: Experiment, network: str, algorithm: str, steps: dict[str, float]) -> list[PointKey]:
    """All configurations of a network: one device once; then every threshold with the chosen overlap and with one
    beside it (off, or the best other mechanism); some of the first kind twice, as A/A pairs."""
    thresholds = experiment.fusion_thresholds_bytes

    def key(devices: int, threshold: float, overlap: str, repeat: int = 0) -> PointKey:
        return PointKey(
            network=network, devices=devices, fusion_rule=experiment.fusion_rule, fusion_threshold_bytes=threshold,
            algorithm=algorithm, overlap=overlap, global_batch=experiment.global_batch, repeat=repeat,
        )  # fmt: skip

    keys = [key(1, thresholds[-1], "off")]
    others = {name: s for name, s in steps.items() if name not in ("off", "inline")}
    chosen = recommended(steps) if steps else "off"
    beside = "off" if chosen != "off" else min(others, key=lambda name: others[name], default="")
    for devices in experiment.devices:
        if devices == 1:
            continue
        keys += [key(devices, threshold, chosen) for threshold in thresholds]
        keys += [key(devices, t, chosen, 1) for t in dict.fromkeys((thresholds[0], thresholds[-1]))][:_TWINS]
        if experiment.overlap == "auto" and beside:
            keys += [key(devices, threshold, beside) for threshold in thresholds]
    return keys


def _predicted_point(experiment: Experiment, workload: Workload, machine: Machine, key: PointKey) -> PredictedPoint:
    plan = _plan_of(experiment, key)
    prediction = predict(workload, machine, plan)
    low_s, high_s = interval(prediction, machine, workload)
    beside = nulls(workload, machine, plan)
    return PredictedPoint(
        key=key, buckets=prediction.buckets if key.devices > 1 else 0, step_s=prediction.step_s, low_s=low_s,
        high_s=high_s, exposed_communication_s=prediction.exposed_communication_s,
        extrapolated=prediction.extrapolated, null_step_s={name: value[0] for name, value in beside.items()},
        null_exposed_s={name: value[1] for name, value in beside.items()},
        timeline=timeline(workload, machine, plan).to_record(),
    )  # fmt: skip


def _measured(predictions: Predictions, folder: Path, progress: Progress) -> Results:
    """Measure every predicted point, going on from the samples of an interrupted run if there are any."""
    experiment, sha = predictions.experiment, codec.digest(predictions)
    path, here = folder / "samples.json", environment()
    before: tuple[Any, ...] = ()
    spent_s = 0.0
    if path.exists():
        samples = codec.read(path, Samples, "samples", SAMPLES_SCHEMA)
        if samples.predictions_sha256 != sha:
            raise ConfigError(
                f"{path} was measured for other predictions than those in {folder}",
                allowed="samples of the same sweep",
                remedy="choose another folder with --output; nothing there was changed",
            )
        before, spent_s = samples.points, samples.spent_s
        progress(f"continuing an interrupted sweep after {spent_s:.0f} s of measuring")
    _same_machine(predictions.environment, here, folder)
    keys = tuple(point.key for point in predictions.points)
    task = MeasureTask(
        experiment=experiment, keys=keys, plans=tuple(_plan_of(experiment, key) for key in keys),
        workload=predictions.workload, machines={machine.network: machine for machine in predictions.machines},
        already=before, spent_s=spent_s, predictions_sha256=sha, save_to=str(path.resolve()),
    )  # fmt: skip
    measured_from = stamp()
    found = on_ranks(
        "dpsim.harness.ranks.measure:measure_on_ranks", codec.to_builtins(task),
        devices=max(experiment.devices), progress=progress, pin=True,
    )  # fmt: skip
    samples = codec.decode(found, Samples, "samples")
    return Results(
        experiment=experiment, environment=here, predictions_sha256=sha, predicted_at=predictions.predicted_at,
        measured_from=measured_from, measured_until=stamp(), points=samples.points,
        recording_s_per_event=samples.recording_s_per_event,
    )  # fmt: skip


def _same_machine(then: Environment, here: Environment, folder: Path) -> None:
    if (then.processor, then.cores, then.blas) != (here.processor, here.cores, here.blas):
        raise ConfigError(
            f"the predictions in {folder} were made on {then.processor} with {then.cores} cores, this is "
            f"{here.processor} with {here.cores}",
            allowed="the machine that was calibrated",
            remedy="start a sweep of its own for this machine with --output",
        )
