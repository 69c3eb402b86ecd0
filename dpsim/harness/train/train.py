"""``train``: one training run on some devices, from the data set to a test accuracy."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.harness.train.resume import TrainTask, survivors
from dpsim.launch.jobs import JobFailed, on_ranks
from dpsim.launch.rank_info import job
from dpsim.model import choose_overlap
from dpsim.model.cost import nearest_line
from dpsim.progress import Progress
from dpsim.records.train import TrainConfig, TrainResult
from dpsim.runtime.checkpoint import check_unused, wait_until_free
from dpsim.setting import Setting
from dpsim.study.calibration import MECHANISMS
from dpsim.study.environment import environment
from dpsim.study.inputs import Needed, prepare, seconds_of_kind

_TEARDOWN_S = 60.0
"""How long a killed run may hold the lock of its checkpoint folder."""


def train(config: TrainConfig, progress: Progress) -> TrainResult:
    """Train on ``config.devices`` ranks.

    When ranks of an elastic run are killed, it continues on the others to the same result; a run on one device ends. An
    asynchronous run goes on with the ranks that are left, to another result. If
    a checkpoint cannot be written, training continues; see the result's ``checkpoint_failure``.

    Raises ``NotFiniteError``, ``ConfigError``, ``CommunicationError``; ``FileFormatError`` for a bad checkpoint.
    """
    if config.elastic and job() is not None:
        raise ConfigError(
            "elastic training on the ranks of a job: a killed rank ends the job, and dpsim cannot start another",
            allowed="elastic where dpsim starts the ranks itself",
            remedy="start it without mpiexec or srun, or leave --elastic out",
        )
    if config.checkpoint is not None and not config.resumes_in_place:
        check_unused(Path(config.checkpoint))
    task = _measured(config, progress)
    while True:
        try:
            result = on_ranks(
                "dpsim.harness.train.on_ranks:train_on_ranks",
                codec.to_builtins(task),
                devices=task.config.plan.devices,
                progress=progress,
                pin=True,
                watch=config.elastic,
                outlives=task.config.plan.parallelism.asynchronous and config.replay is None,
                networks=[task.config.network],
            )
        except JobFailed as failed:
            if not (config.elastic and failed.lost) or task.config.plan.devices == 1:
                raise
            wait_until_free(Path(str(config.checkpoint)), _TEARDOWN_S)
            smaller, step = survivors(task.config, failed.lost)
            start = f"from step {step}" if step else "from the beginning"
            devices = smaller.plan.devices
            progress(f"warning: {failed.given}; going on {start} on {devices} device{'s' * (devices != 1)}")
            task = msgspec.structs.replace(task, config=smaller)
        else:
            return codec.decode(result, TrainResult, "training result")


def _measured(config: TrainConfig, progress: Progress) -> TrainTask:
    """Return the training with overlap ``auto`` decided, and the costs, if either needs a measurement."""
    plan = config.plan
    if not config.chooses_overlap and not FUSION_RULES.find(plan.fusion_rule).needs_costs:
        return TrainTask(config=config)
    if plan.devices == 1:
        return TrainTask(config=msgspec.structs.replace(config, chooses_overlap=False))
    plain = ALGORITHMS.find(plan.algorithm).sixteen_bits  # others send 16 bits only in leaves: measure them without
    profiled = plan if plain else msgspec.structs.replace(plan, wire_dtype=None)
    needed = Needed(
        settings=(Setting(plan=profiled, model=config.model, network=config.network),),
        environment=environment(),
        dataset=config.dataset,
        seed=config.seed,
        overlaps=MECHANISMS,
        seconds=seconds_of_kind(math.inf),
    )
    prepared = prepare(needed, progress)
    workload, machine, overlap = prepared.workloads[0], prepared.machines[0], str(plan.overlap)
    if config.chooses_overlap:
        overlap, steps = choose_overlap(workload, machine, [plan])
        predicted = ", ".join(f"{name} {step_s * 1e3:.2f} ms" for name, step_s in steps.items())
        progress(f"overlap {overlap}, from the predicted steps: {predicted}")
    alpha_s, beta = nearest_line(machine, plan.collective)
    config = config.changed(overlap=overlap, selection=machine.selected(plan.devices))
    return TrainTask(config=config, workload=workload, alpha_s=alpha_s, beta_s_per_byte=beta)
