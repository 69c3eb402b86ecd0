"""``explain_script``: trains a user's DDP or FSDP script on real ranks, observes it, and says where its time goes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dpsim import codec
from dpsim.collective import CollectiveKind
from dpsim.constraints import DDP_OVERLAPS, FSDP, LIBRARIES
from dpsim.errors import ConfigError
from dpsim.launch.job_python import OWN, JobPython
from dpsim.launch.jobs import check_launcher
from dpsim.launch.protection import script_protection
from dpsim.launch.scratch import scratch
from dpsim.launch.script_output import on_ranks_shown_once
from dpsim.launch.user_program import check_program, is_module
from dpsim.machine import AllreduceCost, ComputeSlowdown, Machine, Network
from dpsim.model.deferring import observed_gain
from dpsim.model.explanation import Explanation, Part, Remedy, summed, without_parts
from dpsim.model.observed import Observed, ObservedRank, Steps, joined, observed_parts, of_sizes
from dpsim.model.points import plan_one
from dpsim.model.remedies import remedies
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.progress import Progress, no_progress
from dpsim.setting import Grid
from dpsim.study.runners import observed
from dpsim.study.runners.job_ranks import JobRanks
from dpsim.study.task import ObserveTask
from dpsim.torch.script.profile_script import check_own_torch, profile_script
from dpsim.torch.script.request import Part as ScriptPart
from dpsim.torch.script.request import ScriptRequest
from dpsim.units import format_duration
from dpsim.workload import Workload

_ALGORITHM = "mpi"
_DEFAULT_CAP_BYTES = 25 * 2.0**20
_LARGER_BATCH, _PROFILED_STEPS = 2, 9
_MANY = 2.0
"""Times as many buckets as the default cap would make at most, from which the script is observed with that cap too."""
_TURNS = 2
_DEVIATIONS = 1.645


@dataclass(frozen=True, kw_only=True)
class ScriptToExplain:
    """A script, how its ranks communicate (``node``: by gloo), and how many of its steps are observed."""

    script: str
    arguments: tuple[str, ...] = ()
    devices: int = 2
    steps: int = 40
    network: str = "node"
    script_may_write: bool = False
    by: JobPython = OWN

    def __post_init__(self) -> None:
        if self.devices < 2:
            raise ConfigError(f"--devices is {self.devices}", allowed="2 or more: one rank waits for nobody")
        if self.steps < 20:
            raise ConfigError(f"--steps is {self.steps}", allowed="20 or more")


def explain_script(of: ScriptToExplain, progress: Progress) -> Explanation:
    """Observe the script on its ranks, profile it alone, and return where the time of its mean step goes.

    Where it has many more buckets than DDP's default makes, it is observed with that default too: small buckets cost
    what the step is then shorter by. The profile at a second batch says what of the computation no batch changes.
    Raises ``ConfigError``.
    """
    if of.by is OWN:
        check_own_torch()
    if Network.parse(of.network).paced:
        check_launcher()
    if not is_module(of.script):
        check_program(of.script)
    notes = list[str]()
    runs = _observed_runs(of, notes, progress)
    observed = runs[0]
    steps, base = Steps(observed), Steps(runs[-1])
    parts = observed_parts(base)
    if len(runs) > 1:
        small = _small_buckets(observed, steps, runs[1], base)
        parts, base = ([*parts, small], base) if small.low_s > 0 else (observed_parts(steps), steps)
    notes += filter(None, [observed_gain(steps)])
    workload = _profile(of, observed, notes, progress)
    predicted_remedies: tuple[Remedy, ...] = ()
    if workload is not None:
        notes += () if workload.ddp is None else workload.ddp.unpriced()
        workload, said = _as_observed(workload, observed.ranks[0])
        notes += said
        try:
            now = _predicted(of, observed, workload, parts)
            predicted_remedies = remedies(workload, *now, float(steps.step_s.mean()))
        except ConfigError as error:
            notes.append(f"Remedies are not predicted: {error.given}")
        parts = _split(parts, workload, observed)
    return summed(
        Path(of.script).name,
        f"{of.devices} ranks",
        float(steps.step_s.mean()),
        parts,
        f"{len(steps.step_s)} steps of real ranks{f' over {of.network}' * (of.network != 'node')}{steps.clean_share}",
        remedies=(*without_parts(parts), *predicted_remedies),
        notes=tuple(notes),
    )


def observe(
    of: ScriptToExplain, cap_bytes: float | None = None, progress: Progress = no_progress, units: int = 0
) -> Observed:
    """Train the script on its ranks and return what they observed. Raises ``ConfigError``.

    With a cap DDP has this one, and FSDP's smaller units are joined, where the script has so many.
    """
    with scratch("explain") as meeting:
        part = ScriptPart(
            kind="observe",
            number=0,
            ranks=of.devices,
            script=of.script if is_module(of.script) else str(Path(of.script).absolute()),
            arguments=of.arguments,
            steps=of.steps,
            bucket_cap_bytes=cap_bytes,
            joined_calls=0 if cap_bytes is None else units,
        )
        task = ObserveTask(part=part, meeting=str(meeting), network=of.network)
        protection = None if of.script_may_write else script_protection(of.script, of.arguments, str(meeting))
        if not Network.parse(of.network).paced:
            with JobRanks.started([part], meeting, of.by, protection, of.network) as job:
                return observed.observe(task, job, progress)
        task_name = "dpsim.study.runners.mpi_ranks:observe_on_ranks"
        plain = on_ranks_shown_once(task_name, task, devices=task.ranks, progress=progress, protection=protection)
    return codec.decode(plain, Observed, "observed")


def _observed_runs(of: ScriptToExplain, notes: list[str], progress: Progress) -> list[Observed]:
    """The script observed as it is, and where it has many buckets with DDP's default too, or with larger units.

    The two then take turns, so that a machine that changes its speed changes both.
    """
    first = observe(of, None, progress)
    sizes, units = first.ranks[0].bucket_bytes, first.ranks[0].units
    if len(sizes) <= _MANY * (2 + sum(sizes) // _DEFAULT_CAP_BYTES):
        return [first]
    words = (
        "units: in turns with those below 25 MiB joined" if units else "buckets: in turns with DDP's default of 25 MiB"
    )
    runs: dict[float | None, list[Observed]] = {None: [first], _DEFAULT_CAP_BYTES: []}
    for number in range(_TURNS):
        progress(f"{len(sizes)} {words}, {number + 1} of {_TURNS}")
        for cap_bytes in (_DEFAULT_CAP_BYTES, None)[: 2 if number < _TURNS - 1 else 1]:
            try:
                runs[cap_bytes].append(observe(of, cap_bytes, progress, units))
            except ConfigError as error:
                if not (units and cap_bytes):
                    raise
                notes.append(f"What small units cost is not known, for without some of them {error.given}")
                return [first]
    return [joined(each) for each in runs.values()]


def _small_buckets(observed: Observed, steps: Steps, larger: Observed, base: Steps) -> Part:
    """The part that the script's buckets cost: its step less that with DDP's default cap, as both were observed.

    With FSDP it is what its units cost, against larger ones.
    """
    sizes, kept = observed.ranks[0].bucket_bytes, len(larger.ranks[0].bucket_bytes)
    what, other = "buckets", f"{kept} with bucket_cap_mb=25"
    if observed.ranks[0].units:
        what, other = "units of fully_shard", f"{kept} of which the root's has all below 25 MiB (it is whole at once)"
    lost_s = float(steps.step_s.mean() - base.step_s.mean())
    error_s = _DEVIATIONS * float(np.hypot(*(s.step_s.std(ddof=1) / len(s.step_s) ** 0.5 for s in (steps, base))))
    return Part(
        kind="small buckets",
        seconds=lost_s,
        low_s=lost_s - error_s,
        high_s=lost_s + error_s,
        text=f"{len(sizes)} {what} of {of_sizes(sizes)}, against {other}, with"
        f" which the step was observed to take {format_duration(float(base.step_s.mean()))}",
    )


def _profile(of: ScriptToExplain, observed: Observed, notes: list[str], progress: Progress) -> Workload | None:
    """The script's profile in one process, at a larger batch too where its loaders take one."""
    batch = observed.ranks[0].local_batch
    request = ScriptRequest(
        script=of.script,
        arguments=of.arguments,
        devices=of.devices,
        steps=_PROFILED_STEPS,
        script_may_write=of.script_may_write,
    )
    try:
        progress(f"profiling one process on batches of {batch} and {_LARGER_BATCH * batch}")
        return profile_script(request, (batch, _LARGER_BATCH * batch), by=of.by)
    except ConfigError as error:
        notes.append(f"What of the computation no batch changes is not known: {error.given}")
    try:
        progress("profiling one process")
        return profile_script(request, by=of.by)
    except ConfigError as error:
        notes.append(f"Remedies are not predicted: {error.given}")
    return None


def _as_observed(workload: Workload, rank: ObservedRank) -> tuple[Workload, list[str]]:
    """The workload of what was observed as a step, and what to say of it.

    A step was observed from one reduction to the next; a script may reduce in several micro-batches of an update.
    """
    ddp = workload.ddp
    if ddp is None or ddp.accumulate <= rank.accumulate:
        return workload, []
    said = f"A step here ends where gradients are reduced: an update has {ddp.accumulate} micro-batches of the script."
    one = msgspec.structs.replace(ddp, accumulate=rank.accumulate, deferred=True)
    update_s = workload.update_s * rank.accumulate / ddp.accumulate
    return msgspec.structs.replace(workload, ddp=one, update_s=update_s), [said]


def _computed_s(workload: Workload, batch: int, accumulate: int) -> float:
    """Seconds that a step computes alone: layers, update, and what the profile has beside them."""
    times = workload.times(batch)
    return accumulate * float(times.forward_s.sum() + times.backward_s.sum()) + workload.update_s


def _split(parts: list[Part], workload: Workload, observed: Observed) -> list[Part]:
    """The parts with the computation in two, where the workload has two batches: what grows with it, and what does not.

    On the line through the two batches a step of no samples takes the second.
    """
    if len(workload.local_batches) < 2:
        return parts
    rank = observed.ranks[0]
    now_s, more_s = (_computed_s(workload, batch, rank.accumulate) for batch in workload.local_batches[:2])
    small, large = workload.local_batches[:2]
    fixed_s = now_s - (more_s - now_s) * small / (large - small)
    share = float(np.clip(fixed_s / now_s, 0.0, 1.0))
    split = []
    for part in parts:
        if part.kind != "computation":
            split.append(part)
            continue
        text = f"computation that a batch of {small} samples does not fill: {share:.0%} of it would be the same with"
        fixed = msgspec.structs.replace(_times(part, share), kind="small batch", text=f"{text} one sample")
        split += [_times(part, 1 - share), fixed]
    return split


def _times(part: Part, factor: float) -> Part:
    ends = {name: getattr(part, name) * factor for name in ("seconds", "low_s", "high_s")}
    return msgspec.structs.replace(part, **ends)


def _predicted(of: ScriptToExplain, observed: Observed, workload: Workload, parts: list[Part]) -> tuple[Machine, Plan]:
    """A machine that takes as long as was observed for computation and communication, and the script's plan.

    Its allreduces are those timed on the ranks, and its contention is such that as much of them is exposed. FSDP's
    gathers and reduce-scatters take what they took in the steps.
    """
    rank = observed.ranks[0]
    seconds = {part.kind: part.seconds for part in parts}
    alone_s = _computed_s(workload, rank.local_batch, rank.accumulate)
    factor = max(seconds["computation"] / alone_s, 0.5)
    slowdown = ComputeSlowdown(devices=of.devices, factor=factor)
    if rank.units:
        sharded = Machine(name="the ranks", halves=_halves(observed), compute_slowdown=(slowdown,))
        by_gloo = {"algorithm": LIBRARIES[FSDP], "overlap": DDP_OVERLAPS[FSDP][0]}
        plan, _ = plan_one(workload, sharded, Grid.of(devices=of.devices, local_batch=rank.local_batch, **by_gloo))
        return sharded, plan

    def machine(contention: float) -> Machine:
        order = np.argsort(observed.sizes_bytes)
        return Machine(
            name="the ranks",
            allreduce=(
                AllreduceCost(
                    algorithm=_ALGORITHM,
                    devices=of.devices,
                    sizes_bytes=tuple(observed.sizes_bytes[i] for i in order),
                    time_s=tuple(observed.time_s[i] for i in order),
                ),
            ),
            compute_slowdown=(slowdown,),
            contention=contention,
        )

    grid = Grid.of(devices=of.devices, local_batch=rank.local_batch, algorithm=_ALGORITHM, overlap="thread")
    plan, _ = plan_one(workload, machine(1.0), grid)
    exposed_s = seconds["communication"] + seconds.get("small buckets", 0.0)
    low, high = 1.0, 20.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        priced = price(scheduled(workload, machine(middle), plan), machine(middle)).prediction
        low, high = (middle, high) if priced.exposed_communication_s < exposed_s else (low, middle)
    return machine(low), plan


def _halves(observed: Observed) -> tuple[AllreduceCost, ...]:
    """The tables of FSDP's collectives: of each size the median, of a collective the rank that came last to it."""
    ranks, tables = observed.ranks, list[AllreduceCost]()
    kinds: dict[str, CollectiveKind] = {"gather": "all-gather", "reduce_scatter": "reduce-scatter"}
    for name, kind in kinds.items():
        sizes = getattr(ranks[0], f"{name}_bytes")
        of_size: dict[int, list[float]] = defaultdict(list)
        for steps in zip(*(rank.steps for rank in ranks), strict=True):
            spans = [getattr(step, f"{name}_s") for step in steps]
            if {len(each) for each in spans} == {len(sizes)}:
                for size, *seconds in zip(sizes, *spans, strict=True):
                    of_size[size].append(min(seconds))
        ordered = sorted(of_size)
        tables.append(
            AllreduceCost(
                algorithm=LIBRARIES[FSDP],
                devices=len(ranks),
                kind=kind,
                sizes_bytes=tuple(ordered),
                time_s=tuple(float(np.median(of_size[size])) for size in ordered),
            )
        )
    return tuple(tables)
