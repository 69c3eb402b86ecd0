"""``ScriptStudy``: predicts what PyTorch's DDP will do with a user's script, then lets it train, and compares."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from dpsim import codec
from dpsim.constraints import HOOK
from dpsim.dates import stamp
from dpsim.errors import ConfigError
from dpsim.folder_lock import locked
from dpsim.harness.script.experiment import (
    MOST_CAPS,
    check_python,
    completed,
    most_devices,
    on_gpus,
    replicas_of,
    shards,
)
from dpsim.harness.script.gpus import check_gpus, predicted_by_nccl
from dpsim.harness.script.own_runtime import BESIDE_FSDP, other_settings
from dpsim.harness.script.places import inputs_for, settings_by_place
from dpsim.harness.sweep.experiment import predict_beforehand
from dpsim.harness.sweep.sweep import Study, check_same_machine, existing_predictions
from dpsim.launch.job_python import OWN, JobPython
from dpsim.launch.jobs import check_launcher
from dpsim.launch.protection import script_protection
from dpsim.launch.scratch import scratch
from dpsim.launch.script_output import on_ranks_shown_once
from dpsim.launch.user_program import is_module
from dpsim.machine import Machine
from dpsim.model import past
from dpsim.model.residuals import all_widths
from dpsim.model.step import price, scheduled
from dpsim.progress import Progress
from dpsim.records.comparison import SweepData
from dpsim.records.sweep import Environment, Experiment, Predictions, read_predictions
from dpsim.study.environment import environment
from dpsim.study.inputs import SCHEMA, Inputs
from dpsim.study.loop import LEAST_ROUNDS
from dpsim.study.runners.job_ranks import JobRanks
from dpsim.study.runners.script import take_turns
from dpsim.study.task import Samples, ScriptTask, samples_before
from dpsim.study.time_limit import FEWEST_ROUNDS, first_rounds_text, limit_s
from dpsim.torch.script.profile_script import check_own_torch, profile_script
from dpsim.torch.script.request import ScriptRequest
from dpsim.units import format_duration, format_size
from dpsim.workload import Workload

_SAVED = "measure.samples.partial"
"""The folder of the samples so far, below that of the report: the ranks and the script may write into it alone."""
_PROCESS_BYTES = 2**28
"""What a process takes that has loaded PyTorch, without its model."""
_FIRST_S, _LONG_BUDGET_S = 10.0, 40.0
"""What the first rounds of a place take, or up to twice that, where the budget is at least the long one."""


@dataclass(frozen=True, kw_only=True)
class ScriptStudy(Study):
    """The study of a script under DDP, whose profile decides what of the declared experiment there is to compare.

    ``workload`` is a profile and ``machine`` has the times of NCCL's allreduces, if the user gave them. ``seen`` is a
    profile from which nothing is taken but what there is to compare, so that no other one is made. Unless
    ``script_may_write`` the script changes no file of the user's (``dpsim.launch.protection``). The script runs with
    the Python ``by``; ranks that need dpsim's own transports, hook or runtime run with dpsim's alone.
    """

    workload: Workload | None = None
    seen: Workload | None = None
    machine: Machine | None = None
    script_may_write: bool = False
    by: JobPython = OWN

    @property
    def request(self) -> ScriptRequest:
        """How the script is profiled before there is anything to compare."""
        return ScriptRequest(
            script=self.experiment.script,
            arguments=self.experiment.arguments,
            devices=most_devices(self.experiment),
            must_end=True,
            script_may_write=self.script_may_write,
            fully_shard=shards(self.experiment),
            replicas=replicas_of(self.experiment),
            accumulates=bool(self.experiment.values("accumulate")),
        )

    def predict(self, folder: Path, progress: Progress) -> Predictions:
        """Return the predictions made beforehand, written into ``folder``, or those there. Raises ``ConfigError``."""
        self._check_start()
        with locked(folder):
            return self.existing(folder) or self._predictions(folder, progress)

    def run(self, folder: Path, progress: Progress, *, times_alone: bool = False) -> SweepData:
        """Predict, measure and compare, as any study.

        Profile and calibration take turns with the samples, and at the end ``blind.json`` is made from their rows alone
        (``inputs.json``), unless a machine was given. Raises ``ConfigError``.
        """
        self._check_start()
        if on_gpus(self.experiment):
            check_gpus(most_devices(self.experiment), self.by)
        return super().run(folder, progress, times_alone=times_alone)

    def existing(self, folder: Path) -> Predictions | None:
        """Return the predictions that the folder holds, if any. Raises ``ConfigError`` for another experiment."""
        path, workload = folder / "predictions.json", self.workload
        if workload is None and path.exists():
            workload = read_predictions(path).workloads[0]
        return None if workload is None else existing_predictions(folder, completed(self.experiment, workload))

    def samples(
        self, predictions: Predictions | None, current: Environment, folder: Path, progress: Progress
    ) -> list[Samples]:
        """Let DDP train every predicted setting: those of each network and way to communicate take turns.

        Goes on where an earlier measurement into this folder was interrupted.
        """
        predictions = predictions or self._predictions(folder, progress)
        path = folder / "inputs.json"
        check_same_machine(predictions, current, folder)
        inputs = codec.read(path, Inputs, "inputs", SCHEMA) if path.exists() else None
        places = settings_by_place(predictions.experiment)
        measured: list[Samples] = []
        budget = predictions.experiment.budget_s
        (folder / _SAVED).mkdir(exist_ok=True)
        for place, where in enumerate(places):
            save_to = folder / _SAVED / f"{place + 1}.json"
            samples = samples_before(save_to, predictions, progress)
            if not samples.complete:
                budget_s, most_s = (each / len(places) for each in (budget, limit_s(budget)))
                progress(f"measuring on {where}: a budget of {budget_s:.3g} s, {most_s:.3g} s at most")
                points = [point for point in predictions.points if point.setting.where == where]
                settings = tuple(point.setting for point in points)
                workload, machine = predictions.made_from(points[0])
                task = ScriptTask(
                    experiment=msgspec.structs.replace(predictions.experiment, budget_s=budget_s),
                    inputs=samples.inputs or inputs,
                    place=place,
                    meeting="",
                    settings=settings + other_settings(settings, predictions.experiment.other_runtimes),
                    before=samples,
                    save_to=str(save_to.resolve()),
                    limit_s=most_s,
                    workload=workload,
                    machine=machine,
                )
                samples = self._on_ranks(task, progress)
                samples = msgspec.structs.replace(samples, complete=True)
                codec.write(save_to, samples)
            inputs = samples.inputs
            measured.append(samples)
        return measured

    def forget_samples(self, folder: Path) -> None:
        """Remove what was kept for a run that goes on, and nothing that a script may have put beside it."""
        with contextlib.suppress(OSError):
            for place, _ in enumerate(settings_by_place(read_predictions(folder / "predictions.json").experiment), 1):
                (folder / _SAVED / f"{place}.json").unlink(missing_ok=True)
            (folder / _SAVED).rmdir()

    def _check_start(self) -> None:
        """Raise ``ConfigError`` without PyTorch or MPI, and for a machine where the allreduces are calibrated here."""
        if self.by is OWN:
            check_own_torch()
        check_python(self.experiment, self.by)
        if "torch-ddp-mpi" in self.experiment.values("runtime"):
            check_launcher()
        if self.machine is not None and not on_gpus(self.experiment):
            ways = dict.fromkeys(name.removeprefix("torch-ddp-") for name in self.experiment.values("runtime"))
            raise ConfigError(
                f"--machine with --algorithm {','.join(ways)}, whose allreduces are calibrated here",
                allowed="--machine with --algorithm nccl",
                remedy="leave --machine out",
            )

    def _predictions(self, folder: Path, progress: Progress) -> Predictions:
        path = folder / "predictions.json"
        if on_gpus(self.experiment):
            codec.write_record(path, predicted_by_nccl(self.experiment, self.workload, self.machine, self.by, progress))
        else:
            inputs, experiment = self._first_rounds(progress)
            codec.write_record(folder / "inputs.json", inputs)
            codec.write_record(path, predict_beforehand(experiment, inputs))
        return read_predictions(path)

    def _first_rounds(self, progress: Progress) -> tuple[Inputs, Experiment]:
        """Profile the script once, to see what to compare, then profile and calibrate in turns at each place."""
        declared, given = self.experiment, self.workload
        _check_memory(most_devices(declared))
        first_s = min(declared.budget_s / _LONG_BUDGET_S, 1.0) * _FIRST_S
        progress(_at_most(declared, first_s))
        batches = declared.values("local_batch")
        if given is not None:
            batches = tuple(sorted({*batches[:1], *batches[-1:]}))  # the profiles in between are there already
        seen = self.seen
        if seen is None:
            progress(f"profiling {declared.script} as rank 0 of {most_devices(declared)} in one process")
            seen = profile_script(self.request, batches, by=self.by)
        _check_same_batch(given, seen)
        workload = given or seen
        experiment = completed(declared, workload)
        for sentence in () if workload.ddp is None else workload.ddp.unpriced():
            progress(f"Note: {sentence}")
        current = environment()
        inputs = msgspec.structs.replace(
            inputs_for(experiment, workload, current, times_given=given is not None),
            widths=all_widths(past.load(current.processor, current.cores)),
        )
        for place, where in enumerate(settings_by_place(experiment)):
            progress(f"profiling and calibrating on {where}: {first_rounds_text(first_s)}, after the start")
            task = ScriptTask(experiment=experiment, inputs=inputs, place=place, meeting="", first_s=first_s)
            inputs = self._on_ranks(task, progress)
        return msgspec.structs.replace(inputs, beforehand_until=stamp()), experiment

    def _on_ranks(self, task: ScriptTask, progress: Progress) -> Any:
        """Return what the ranks of a task return, which meet in a folder of their own."""
        experiment = task.experiment
        _check_memory(task.ranks)
        with scratch("ddp") as meeting:
            protection = None
            if not self.script_may_write:
                saved = (str(Path(task.save_to).parent),) if task.save_to else ()
                protection = script_protection(experiment.script, experiment.arguments, str(meeting), *saved)
            script = experiment.script if is_module(experiment.script) else str(Path(experiment.script).absolute())
            experiment = msgspec.structs.replace(experiment, script=script)
            task = msgspec.structs.replace(task, experiment=experiment, meeting=str(meeting))
            if not task.by_mpi:
                with JobRanks.started(task.parts, meeting, self.by, protection, task.network) as job:
                    return take_turns(task, job, progress)
            task_name = "dpsim.study.runners.mpi_ranks:script_on_ranks"
            where = {"devices": task.ranks, "networks": [task.network], "on_hosts": task.on_hosts}
            done = on_ranks_shown_once(task_name, task, progress=progress, protection=protection, **where)
            return codec.decode(done, Inputs if task.before is None else Samples, "samples")


def ready_errors(swept: SweepData) -> list[float]:
    """Return predicted / measured - 1 of the moment when each bucket was complete, from the start of backward.

    For every bucket of every setting of which it was measured; none without a hook.
    """
    predictions, results = swept.scored, swept.results
    predicted = {point.setting: point for point in predictions.points}
    errors: list[float] = []
    for run in results.points:
        point, plan = predicted[run.setting], run.setting.plan
        workload, machine = predictions.made_from(point)
        expected_s = price(scheduled(workload, machine, plan), machine).buckets_ready_s()
        if len(expected_s) == len(run.bucket_ready_s):
            errors += (expected_s / np.array(run.bucket_ready_s) - 1).tolist()
    return errors


def _check_memory(processes: int) -> None:
    """Raises ``ConfigError`` where so many processes with PyTorch do not fit into memory."""
    needed, free = processes * _PROCESS_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"a measurement in {processes} processes on this machine, each with PyTorch: {format_size(needed)} or more",
            allowed=f"{format_size(free)}, the memory that is free",
            remedy="give fewer --devices or fewer settings; dpsim predict predicts any number of devices",
        )


def _at_most(declared: Experiment, first_s: float) -> str:
    """Say what is done at most, before the script has run once."""
    devices, cases = declared.values("devices"), len({(each["network"], each["runtime"]) for each in declared.cases})
    several = [len(declared.values(name)) for name in ("local_batch", "accumulate")]
    hook = bool({HOOK, BESIDE_FSDP} & {*declared.other_runtimes})
    caps = len(declared.values("fusion_threshold_bytes")) or (1 if hook or any(several) else MOST_CAPS)
    settings = (
        (cases + hook) * math.prod(max(count, 1) for count in several) * (len({*devices} - {1}) * caps + (1 in devices))
    )
    places = f" on each of {cases} places" if cases > 1 else ""
    return (
        f"at most {settings} settings: first {first_rounds_text(first_s)} of profiles and calibrations{places},"
        f" each after the start of the script in every process; then DDP trains in turns with them for the budget of"
        f" {format_duration(declared.budget_s)}, and {format_duration(limit_s(declared.budget_s))} at most where"
        f" {LEAST_ROUNDS} rounds of all settings need it: then {FEWEST_ROUNDS} are measured, and then fewer settings"
    )


def _check_same_batch(workload: Workload | None, now: Workload) -> None:
    """Raises ``ConfigError`` unless the script trains now on a batch that the workload was profiled at."""
    if workload is not None and not {*now.local_batches} <= {*workload.local_batches}:
        raise ConfigError(
            f"the script trains on {now.local_batches[0]} samples at once, and the workload was profiled at "
            f"{', '.join(map(str, workload.local_batches))}",
            allowed="a profile of the same training",
            remedy="give the script the arguments that it was profiled with, or leave --workload out",
        )
