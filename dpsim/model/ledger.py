"""The ledger: what was predicted of a job is kept, and scored by the next run of it that is measured.

It is part of ``dpsim.model.past``. Nothing leaves the machine.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dpsim.collective import parse_devices
from dpsim.fusion_rules import DDP_RULES, FUSION_RULES
from dpsim.installation import VERSION
from dpsim.machine import NODE, Machine
from dpsim.model import past
from dpsim.model.past import Expected, Job, Prediction, Score
from dpsim.model.residuals import group_name, ratio
from dpsim.model.rows import PredictedRow, fastest_of
from dpsim.model.version import MODEL_VERSION
from dpsim.plan import Plan
from dpsim.strategy import DataParallel
from dpsim.workload import Workload

MOST_POINTS = 50
"""The predicted steps that an entry keeps, the fastest thresholds of all devices and batches first."""
LEAST_STEPS = 20
"""Clean steps behind warm-up that a run is scored by, at least."""
VARIABLE = "DPSIM_LEDGER"
_ON_ONE_DEVICE = {"strategy": DataParallel.name, "fusion_rule": "", "cap": "", "network": "", "wire": ""}
"""What decides nothing where there is nobody to communicate with."""


def job_of(workload: Workload, plan: Plan, network: str, device: str = "") -> Job:
    """Return the job that trains a workload by a plan; ``device`` is the model where the workload does not say it."""
    ddp, rule = workload.ddp, plan.fusion_rule
    takes_cap = FUSION_RULES.find(rule).default_threshold_bytes is not None
    default = rule in DDP_RULES and plan.fusion_threshold_bytes is None
    own = f"{plan.algorithm}, overlap {plan.overlap}, leaves {plan.leaves}, batch norm {plan.batch_norm}"
    job = Job(
        parameters=parameters_digest(workload),
        optimizer=str(plan.optimizer.__struct_config__.tag) if ddp is None else ddp.optimizer,
        strategy=plan.strategy,
        layout=str(plan.layout or plan.devices),
        local_batch=plan.local_batch,
        accumulate=plan.accumulate,
        fusion_rule="ddp" if rule in DDP_RULES else rule,
        cap="default" if default else f"{plan.threshold_bytes:.0f}" if takes_cap else "",
        wire=plan.wire_dtype or workload.most_common_dtype("reduced"),
        device=workload.device or device,
        network=network,
        how=f"{own}, {plan.compute_dtype}{', emulated' * workload.emulated_compute}" if ddp is None else "",
    )
    return msgspec.structs.replace(job, **_ON_ONE_DEVICE) if plan.devices == 1 else job


def parameters_digest(workload: Workload) -> str:
    """Return a digest of the names, shapes and types of what is trained, in their order."""
    if workload.ddp is not None and workload.ddp.parameters_sha256:
        return workload.ddp.parameters_sha256[:16]
    if "parameters" not in workload.memo:
        tensors = (f"{each.name} {each.shape} {each.dtype}" for each in workload.tensors)
        workload.memo["parameters"] = hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16]
    return str(workload.memo["parameters"])


def network_of(machine: Machine) -> str:
    """Return the name of a machine's network: of one that dpsim calibrated the network's, else the machine's own."""
    calibrated = machine.relative_uncertainty is not None or machine.network != NODE
    return machine.network if calibrated else machine.name


def on() -> bool:
    """Whether predictions are kept: not in CI, nor where ``DPSIM_LEDGER`` or the configuration says ``off``."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return (os.environ.get(VARIABLE) or _configured() or "on").lower() not in ("off", "0", "no", "false")


def configuration() -> Path:
    """Return the user's configuration file, in which ``ledger = "off"`` ends the ledger."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dpsim" / "config.toml"


def _configured() -> str:
    try:
        value = tomllib.loads(configuration().read_text(encoding="utf-8")).get("ledger", "")
    except (OSError, RuntimeError, ValueError):  # no file, no home, no TOML
        return ""
    return "off" if value is False else str(value)


def keep(command: str, rows: Iterable[PredictedRow], at: str, inputs: Mapping[str, object]) -> Path | None:
    """Keep what one command line predicted; return the file, or ``None`` where nothing is kept.

    ``at`` is the moment, and ``inputs`` are the records by whose SHA-256 the entry is sealed.
    """
    if not on() or not (every := list(rows)):
        return None
    if len(every) > MOST_POINTS:
        fastest = {id(row) for row in fastest_of(every)}
        every.sort(key=lambda row: id(row) not in fastest)
    first = every[0]
    entry = Prediction(
        at=at,
        command=command,
        workload=first.workload.name,
        machine=first.machine.name,
        measured_on=past.machine_key(first.machine, first.workload.device),
        inputs={name: _sha256(value) for name, value in inputs.items()},
        points=tuple(map(_expected, every[:MOST_POINTS])),
        left_out=max(len(every) - MOST_POINTS, 0),
        dpsim=VERSION,
        model_version=MODEL_VERSION,
        version=first.workload.ddp.torch if first.workload.ddp else "",
    )
    return past.append(msgspec.structs.replace(entry, sha256=seal(entry)))


def _expected(row: PredictedRow) -> Expected:
    predicted, plan = row.prediction, row.plan
    low_s, high_s = (predicted.step_s if end is None else end for end in (predicted.low_s, predicted.high_s))
    group = group_name(
        plan.devices,
        row.machine,
        emulated_compute=row.workload.emulated_compute,
        script=row.workload.ddp is not None,
    )
    return Expected(
        job=job_of(row.workload, plan, network_of(row.machine)),
        step_s=predicted.step_s,
        low_s=low_s,
        high_s=min(high_s, 1e9),
        group=group,
        factor=predicted.interval_factor,
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, enc_hook=str)).hexdigest()


def seal(entry: Prediction) -> str:
    """Return the SHA-256 of all else that an entry has."""
    return _sha256(msgspec.structs.replace(entry, sha256=""))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a job: the median of its clean steps behind warm-up, and how many there were.

    ``name`` tells it from other runs, and ``at`` is when it began, in UTC. ``version`` is that of PyTorch.
    """

    job: Job
    step_s: float
    steps: int
    name: str
    at: str
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the ledger says of the runs of a command.

    ``scores`` are those of predictions of the same jobs, each with the entry that it is of. ``unscored`` says in a
    sentence why others were not scored. ``all_scores`` are those that are kept, these included.
    """

    scores: tuple[tuple[Score, Prediction], ...] = ()
    runs: tuple[Run, ...] = ()
    unscored: tuple[str, ...] = ()
    all_scores: tuple[Score, ...] = ()


def score(runs: Sequence[Run], at: str) -> Scored:
    """Score the latest prediction of each run's job that was made before the run, and keep the scores.

    A run that was scored before is not kept twice. Nothing is scored where the ledger is off.
    """
    if not runs or not on():
        return Scored()
    kept = past.read()
    intact = [entry for entry in kept.predictions if entry.sha256 == seal(entry)]
    scores, scored_runs, unscored = list[tuple[Score, Prediction]](), list[Run](), list[str]()
    known = {(each.prediction, each.run, each.job): each for each in kept.scores}
    new: list[Score] = []
    for run in runs:
        earlier = [entry for entry in intact if entry.at < run.at]
        found = _latest(earlier, run.job)
        if isinstance(found, str):
            unscored += [found] if found else []
        elif run.steps < LEAST_STEPS:
            unscored.append(f"{run.steps} clean steps were measured, and at least {LEAST_STEPS} are needed")
        elif not run.step_s > 0:
            unscored.append("the steps that were measured take no time")
        else:
            expected, entry = found
            made = _score(run, expected, entry, at)
            if (before := known.get((entry.sha256, run.name, run.job))) is None:
                past.append(made)
                new.append(made)
            scores.append((before or made, entry))
            scored_runs.append(run)
    return Scored(
        scores=tuple(scores),
        runs=tuple(scored_runs),
        unscored=tuple(dict.fromkeys(unscored)),
        all_scores=(*kept.scores, *new),
    )


def _score(run: Run, expected: Expected, entry: Prediction, at: str) -> Score:
    own = ratio(run.step_s, expected.step_s, expected.low_s, expected.high_s) * expected.factor
    return Score(
        at=at,
        prediction=entry.sha256,
        run=run.name,
        job=run.job,
        expected_s=expected.step_s,
        low_s=expected.low_s,
        high_s=expected.high_s,
        measured_s=run.step_s,
        steps=run.steps,
        measured_on=entry.measured_on,
        group=expected.group,
        ratio=float(f"{own:.4g}"),
        workload=entry.workload,
    )


def _latest(entries: Sequence[Prediction], job: Job) -> tuple[Expected, Prediction] | str:
    """Return the latest prediction of a job, and its entry; or why there is none: empty where nobody asked for it."""
    for entry in reversed(entries):
        of_job = [point for point in entry.points if not differences(point.job, job)]
        networks = {point.job.network for point in of_job}
        if len(of_job) == 1:
            return of_job[0], entry
        if len(networks) > 1:
            return f"it was predicted on {' and '.join(sorted(networks))}, and on which of them it ran is not known"
        if of_job:
            return "one command line predicted it in several ways, as by several algorithms"
    nearest = [
        (differences(point.job, job), number, entry)
        for number, entry in enumerate(entries)
        for point in entry.points
        if point.job.parameters == job.parameters
    ]
    if not nearest:
        return ""
    differing, _, entry = min(nearest, key=lambda each: (len(each[0]), -each[1]))
    beyond = f", which keeps {MOST_POINTS} of its points" if entry.left_out else ""
    words = ", ".join(f"{name} {then or 'unknown'} and not {now or 'unknown'}" for name, then, now in differing)
    return f"the nearest prediction of this model{beyond} was of {words}"


def differences(predicted: Job, run: Job) -> list[tuple[str, str, str]]:
    """Return (what, as predicted, as it ran) of all by which a job is another; what one does not know is no such."""
    differing = []
    for name, words in _WORDS.items():
        then, now = getattr(predicted, name), getattr(run, name)
        same = _same_layout(then, now) if name == "layout" else then == now
        if not same and not (name in _MAY_BE_UNKNOWN and "" in (then, now)):
            differing.append((words, _text(name, then), _text(name, now)))
    return differing


_MAY_BE_UNKNOWN = ("optimizer", "device", "network", "wire", "how")
_WORDS = {
    "parameters": "the parameters",
    "optimizer": "optimizer",
    "strategy": "strategy",
    "layout": "devices",
    "local_batch": "local batch",
    "accumulate": "micro-batches",
    "fusion_rule": "fusion rule",
    "cap": "bucket cap",
    "wire": "gradients sent as",
    "device": "device",
    "network": "network",
    "how": "communication",
}


def _text(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value} bytes" if name == "cap" and value.isdigit() else str(value)


def _same_layout(one: str, other: str) -> bool:
    """Whether two layouts may be the same: a number of devices alone says nothing of nodes."""
    (devices, layout), (others, other_layout) = parse_devices(one), parse_devices(other)
    return devices == others and (not layout or not other_layout or layout == other_layout)


def summary(scores: Sequence[Score]) -> tuple[int, int, float]:
    """Return how many predictions were scored, how many of them were inside, and the median of their errors."""
    errors = [abs(each.expected_s / each.measured_s - 1) for each in scores]
    return len(scores), sum(each.inside for each in scores), statistics.median(errors) if errors else 0.0
