"""The points of a declared experiment: its settings, with the overlaps that the calibration recommends, predicted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import cast

import msgspec

from dpsim.data import load_dataset
from dpsim.dates import stamp
from dpsim.fields import shared
from dpsim.grouping import grouped
from dpsim.harness.sweep.parts import joined_predictions, parts_of, split
from dpsim.harness.sweep.questions import QUESTIONS
from dpsim.harness.sweep.scores import PROPORTIONAL
from dpsim.machine import FusionCosts, Machine
from dpsim.model import choose_overlap, nulls, predict, recommended, scheduled
from dpsim.model.rows import PredictedRow
from dpsim.model.step import decides_by_costs, fusion_costs
from dpsim.model.version import MODEL_VERSION
from dpsim.plan import OVERLAPS, Overlap, Plan
from dpsim.records.sweep import Environment, Experiment, PredictedPoint, Predictions
from dpsim.setting import FIELDS, OVERLAP_CHOICES, Setting
from dpsim.study.calibration import MECHANISMS
from dpsim.study.inputs import Inputs, Needed, Prepared, prepared, seconds_of_kind
from dpsim.workload import Workload


def needed_for(experiment: Experiment, environment: Environment) -> Needed:
    """Return what must be prepared: every setting, and one device at each batch, over which speedup is taken.

    Of a script that is every setting alone: it has its own data.
    """
    samples = 0 if experiment.script else len(load_dataset(experiment.dataset, experiment.seed).train_y)
    alone = {_alone(experiment, setting): None for setting in experiment.settings}
    overlaps = {*(experiment.values("overlap") or ("auto",))}
    return Needed(
        settings=(*experiment.settings, *(setting for setting in alone if setting.plan.global_batch <= samples)),
        environment=environment,
        dataset=experiment.dataset,
        seed=experiment.seed,
        overlaps=tuple(name for name in MECHANISMS if overlaps & {*OVERLAP_CHOICES, name}),
        seconds=seconds_of_kind(experiment.budget_s),
        interpolates=QUESTIONS.find(experiment.question).interpolates,
        calibrated_devices=experiment.calibrated_devices,
    )


def _alone(experiment: Experiment, setting: Setting) -> Setting:
    """The same training on one device: of the same global batch, or under weak scaling of the same local batch."""
    plan = setting.plan
    batch = plan.global_batch // plan.data_devices if experiment.weak else plan.global_batch
    return msgspec.structs.replace(setting, plan=plan.on_one_device(global_batch=batch, overlap="off"))


def predict_experiment(experiment: Experiment, prepared: Prepared, environment: Environment) -> Predictions:
    """Predict every point of the experiment, with the overlap that the calibration recommends and others.

    What decides the buckets of rules that need costs is decided here, and kept in the machines.
    """
    prepared = _with_decided_buckets(prepared, [(each, *prepared.of(each)) for each in experiment.settings])
    points: list[PredictedPoint] = []
    mechanisms: dict[str, dict[str, float]] = {}
    declared = zip(experiment.rows, experiment.settings, strict=True)
    for name, together in grouped(declared, lambda each: prepared.name(each[1])).items():
        members, of = zip(*together, strict=True)
        named = {str(row["overlap"]) for row in members if "overlap" in row} - {*OVERLAP_CHOICES}
        chosen_from = None if len(named) < len({str(row.get("overlap", "auto")) for row in members}) else sorted(named)
        workload, machine = prepared.of(of[0])
        mechanisms[name] = choose_overlap(workload, machine, [each.plan for each in of], chosen_from)[1]

        key = functools.partial(_with_buckets, workload=workload, machine=machine)
        points += [
            _predicted_point(experiment, prepared, setting, same)
            for setting, same in _settings(experiment, members, of, mechanisms[name], key).items()
        ]
    return Predictions(
        experiment=experiment,
        environment=environment,
        predicted_at=stamp(),
        workloads=prepared.workloads,
        machines=prepared.machines,
        points=tuple(points),
        mechanisms=mechanisms,
        model_version=MODEL_VERSION,
    )


def predict_beforehand(experiment: Experiment, inputs: Inputs) -> Predictions:
    """Predict every point from what was profiled and calibrated before the first measured sample, and nothing else."""
    if inputs.parts:
        parts = zip(parts_of(experiment), inputs.parts, strict=True)
        return joined_predictions(experiment, [predict_beforehand(part, of_part) for part, of_part in parts])
    needed = needed_for(experiment, inputs.environment)
    return predict_experiment(experiment, prepared(needed.settings, inputs.early()), inputs.environment)


def predict_from(predictions: Predictions, inputs: Inputs, *, same_minutes: bool) -> Predictions:
    """Predict the settings of other predictions from what was profiled and calibrated before the first sample.

    With ``same_minutes`` from what was in turns with the samples. Nothing else is read.
    """
    if inputs.parts:
        parts = zip(split(predictions), inputs.parts, strict=True)
        again = [predict_from(part, of_part, same_minutes=same_minutes) for part, of_part in parts]
        joined = joined_predictions(predictions.experiment, again)
        return msgspec.structs.replace(joined, mechanisms=predictions.mechanisms)
    settings = needed_for(predictions.experiment, predictions.environment).settings
    taken = inputs.late() if same_minutes else inputs.early()
    return predict_again(predictions, prepared(settings, taken, same_minutes=same_minutes))


def predict_again(predictions: Predictions, prepared: Prepared) -> Predictions:
    """Predict the settings of other predictions from other profiles and calibrations of the same run.

    Buckets are those that the other predictions decided, which are those that were trained.
    """
    experiment = predictions.experiment
    prepared = _with_decided_buckets(
        prepared, [(point.setting, *predictions.made_from(point)) for point in predictions.points]
    )
    points = [_predicted_point(experiment, prepared, point.setting, point.same_buckets) for point in predictions.points]
    return msgspec.structs.replace(
        predictions,
        predicted_at=stamp(),
        workloads=prepared.workloads,
        machines=prepared.machines,
        points=tuple(points),
        model_version=MODEL_VERSION,
    )


def _with_decided_buckets(prepared: Prepared, deciding: Sequence[tuple[Setting, Workload, Machine]]) -> Prepared:
    """Return what was prepared, where each setting's buckets are those that a workload and a machine decide.

    That is so for rules that need costs; others decide by sizes alone.
    """
    costs: dict[int, dict[FusionCosts, None]] = {}
    for setting, workload, machine in deciding:
        if decides_by_costs(setting.plan):
            of_machine = costs.setdefault(prepared.indices_of(setting)[1], {})
            of_machine[fusion_costs(workload, machine, setting.plan)] = None
    machines = [
        msgspec.structs.replace(machine, fusion_costs=tuple(costs[index])) if index in costs else machine
        for index, machine in enumerate(prepared.machines)
    ]
    return replace(prepared, machines=tuple(machines))


def chosen_overlap(steps: dict[str, float]) -> Overlap:
    """Return the overlap that a sweep is about, from the predicted step of every mechanism."""
    return cast("Overlap", recommended(steps)) if steps else "off"


def _with_buckets(setting: Setting, workload: Workload, machine: Machine) -> Hashable:
    """Return what tells settings apart: all fields, but the buckets in place of the rule and the threshold.

    A rule that decides while running has no buckets before the step, so there the rule and the threshold stay.
    """
    schedule = scheduled(workload, machine, setting.plan)
    replaced = () if schedule.dynamic else ("fusion_rule", "fusion_threshold_bytes")
    fields = tuple(setting.value(name) for name in FIELDS if name not in replaced)
    return *fields, schedule.tensor_order.tobytes(), schedule.bucket_start.tobytes()


def _distinct(settings: Sequence[Setting], key: Callable[[Setting], Hashable]) -> dict[Setting, tuple[Setting, ...]]:
    """Return the first setting of each key, with the others that have it."""
    return {first: tuple(others) for first, *others in grouped(settings, key).values()}


def _settings(
    experiment: Experiment,
    rows: Sequence[dict[str, object]],
    settings: Sequence[Setting],
    steps: dict[str, float],
    key: Callable[[Setting], Hashable],
) -> dict[Setting, tuple[Setting, ...]]:
    """Return what is measured of settings that were prepared together, each with those that have the same ``key``.

    One device comes with each training, whatever its threshold. Every other setting comes with its own overlap, or with
    the recommended one for ``auto`` and ``all``. ``all`` adds every other overlap; ``auto`` adds one alternative (off,
    or the best other mechanism) where the question asks for it. The first and the last setting of each number of
    devices come twice, as A/A pairs. Settings with the same buckets come once.
    """
    question, chosen = QUESTIONS.find(experiment.question), chosen_overlap(steps)
    single = {setting.training: setting for setting in settings if setting.plan.devices == 1}
    measured = _with_twins(dict.fromkeys([_with_overlap(setting, "off") for setting in single.values()], ()))
    others = sorted((name for name in steps if name not in ("off", "inline", chosen)), key=lambda name: steps[name])
    alternatives = {
        "auto": (["off"] if chosen != "off" else others[:1]) if question.alternatives else [],
        "all": [name for name in steps if name != chosen],
    }
    by_devices: dict[str, list[tuple[Setting, str]]] = {}
    for row, setting in zip(rows, settings, strict=True):
        if setting.plan.devices > 1:
            overlap = str(row.get("overlap", "auto"))
            by_devices.setdefault(setting.devices_token, []).append((setting, overlap))
    for members in by_devices.values():
        main = [_with_overlap(each, overlap if overlap in OVERLAPS else chosen) for each, overlap in members]
        measured |= _with_twins(_distinct(main, key))
        for name in dict.fromkeys(name for _, overlap in members for name in alternatives.get(overlap, [])):
            others_of = [_with_overlap(each, name) for each, o in members if name in alternatives.get(o, [])]
            measured |= _distinct(others_of, key)
    return measured


def _with_twins(settings: dict[Setting, tuple[Setting, ...]]) -> dict[Setting, tuple[Setting, ...]]:
    in_order = [*settings]
    twins = dict.fromkeys((*in_order[:1], *in_order[-1:]))
    return settings | {msgspec.structs.replace(twin, repeat=1): settings[twin] for twin in twins}


def _with_overlap(setting: Setting, overlap: str) -> Setting:
    return msgspec.structs.replace(setting, plan=msgspec.structs.replace(setting.plan, overlap=overlap))


def _proportional(experiment: Experiment, workload: Workload, machine: Machine, plan: Plan) -> tuple[float, float]:
    """(step, exposed communication) of the largest batch on as many devices, both in proportion to the batch."""
    alike = (setting.plan for setting in experiment.settings if setting.plan.devices == plan.devices)
    largest = max([plan.global_batch, *(each.global_batch for each in alike)])
    predicted = predict(workload, machine, msgspec.structs.replace(plan, global_batch=largest))
    share = plan.global_batch / largest
    return share * predicted.step_s, share * predicted.exposed_communication_s


def _predicted_point(
    experiment: Experiment, prepared: Prepared, setting: Setting, same: tuple[Setting, ...]
) -> PredictedPoint:
    plan, (of_workload, of_machine) = setting.plan, prepared.indices_of(setting)
    workload, machine = prepared.of(setting)
    row = PredictedRow(workload=workload, machine=machine, plan=plan)
    of_nulls = nulls(workload, machine, plan)
    if experiment.weak and plan.devices > 1:  # perfect weak scaling: the step of one device
        alone = _alone(experiment, setting).plan
        of_nulls["perfect_scaling"] = (predict(workload, machine, alone).step_s, 0.0)
    if PROPORTIONAL in QUESTIONS.find(experiment.question).nulls:
        of_nulls[PROPORTIONAL] = _proportional(experiment, workload, machine, plan)
    needed = row.memory
    return PredictedPoint(
        **shared(row.prediction, PredictedPoint) | {"buckets": row.buckets * (plan.devices > 1)},
        setting=setting,
        null_step_s={name: value[0] for name, value in of_nulls.items()},
        null_exposed_s={name: value[1] for name, value in of_nulls.items()},
        timeline=row.priced.timeline().to_record(),
        memory_bytes=needed.total - needed.communication_buffers if needed.activations is not None else 0,
        workload=of_workload,
        machine=of_machine,
        same_buckets=same,
    )
