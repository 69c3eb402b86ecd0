"""What the records of a watched job say: where its steps' time goes, and which bucket cap it should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dpsim import processor
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import NODE, AllreduceCost, Machine
from dpsim.model.deferring import observed_gain
from dpsim.model.explanation import Explanation, summed, without_parts
from dpsim.model.ledger import Run, job_of
from dpsim.model.link_fit import rate_of_time
from dpsim.model.observed import LEAST_STEPS, Steps, observed_parts
from dpsim.model.past import Job
from dpsim.model.points import plan_one
from dpsim.model.step import price, scheduled
from dpsim.model.thresholds import plan_thresholds
from dpsim.schedule import Schedule
from dpsim.setting import Grid
from dpsim.strategy import Zero3
from dpsim.torch.script.watched import WatchedRank, observed, watched_workload
from dpsim.units import format_duration
from dpsim.workload import Workload

_ALGORITHM, _OVERLAP = "mpi", "thread"
_SIZES_BYTES = tuple(4**power for power in range(1, 20))
LATENCIES_S = {"nccl": (10e-6, 30e-6, 100e-6), "gloo": (20e-6, 80e-6, 300e-6)}
"""What an allreduce of nothing may take, by PyTorch's backend; of others as of gloo.

One exposed time gives one number, so the rest of an allreduce's cost is found for each of these.
"""
_SLOW, _FAST = 1e6, 1e13
"""Bytes per second between which an allreduce's rate is looked for."""
_LEAST_CAP_BYTES = 2.0**18
_OF_UNITS = (
    "fully_shard has units; what others, links and batches would gain, dpsim explain --torch-script says of the script"
)
_LEAST_GAIN = 0.01
"""A gain below this is not advised: two runs of one job differ by more."""


@dataclass(frozen=True, kw_only=True)
class CapGain:
    """A bucket cap: its buckets, and the least and the largest gain in speed over the job's own, over what may be."""

    cap_bytes: float
    buckets: int
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Where the time of a watched job's steps goes, and what each other bucket cap would gain, the surest first.

    ``slow_rank`` is the rank for which the others wait in most steps, if there is one. ``caps`` is empty where
    ``untuned`` says why none is priced. Of a model of FSDP there is no workload.
    """

    ranks: tuple[WatchedRank, ...]
    explained: Explanation
    workload: Workload | None
    slow_rank: int | None
    caps: tuple[CapGain, ...] = ()
    untuned: str = ""

    @property
    def advised(self) -> CapGain | None:
        """The cap with the largest gain that is sure; None where the job's own is to be left."""
        best = self.caps[0] if self.caps else None
        return best if best is not None and best.low > 1 + _LEAST_GAIN else None


def watched(ranks: Sequence[WatchedRank], notes: Sequence[str] = ()) -> Watched:
    """Explain the steps of a job, and tune its bucket cap. Raises ``ConfigError`` where nothing was learned.

    ``notes`` are what there is to say beside that: records that are left out.
    """
    refusals = [each for each in ranks if each.reason]
    if refusals:
        raise ConfigError(
            f"the job cannot be watched: {refusals[0].reason}",
            allowed="a job that trains one model, with DistributedDataParallel on processors or CUDA devices, or with"
            " fully_shard on processors",
        )
    if ranks[0].ranks < 2:
        raise ConfigError("the job has one rank, which waits for nobody", allowed="2 ranks or more")
    count = min(len(each.steps) for each in ranks)
    if count < LEAST_STEPS:
        raise ConfigError(
            f"the job ended after {count} steps that could be watched",
            allowed=f"{LEAST_STEPS} or more, after those in which DDP rebuilds its buckets",
            remedy="watch a longer run",
        )
    ranks = tuple(sorted(ranks, key=lambda each: each.rank))
    steps = Steps(observed(ranks))
    parts = observed_parts(steps)
    explained = summed(
        ranks[0].script or ranks[0].model,
        f"{ranks[0].ranks} ranks",
        float(steps.step_s.mean()),
        parts,
        f"{count} steps of the job itself{steps.clean_share}",
        remedies=tuple(without_parts(parts)),
        notes=(*filter(None, [observed_gain(steps)]), *notes, *_notes(ranks)),
    )
    workload = None if steps.sharded else watched_workload(ranks, steps)
    slow_rank = None if steps.slow_rank is None else ranks[steps.slow_rank].rank
    seen = Watched(ranks=ranks, explained=explained, workload=workload, slow_rank=slow_rank)
    if workload is None:
        return replace(seen, untuned=_OF_UNITS)
    try:
        caps = _priced(workload, ranks[0], float(steps.exposed_s.mean()), float(steps.step_s.mean()))
    except ConfigError as error:
        return replace(seen, untuned=error.given)
    return replace(seen, caps=caps)


Span = tuple[float, float, bool]
"""When a block of time began and ended, and whether other processes left the cores to the job in it."""


def run_of(seen: Watched, at: str, blocks: Sequence[Span] = ()) -> Run:
    """Return the job as a run that began ``at`` a moment: the median of its clean steps.

    In these every rank had a core. Where the ranks compute on all cores, their threads wait for each other, which is no
    disturbance: there those steps are clean that lie in clean ``blocks``. Where nothing tells, all steps count.
    """
    first, of_ranks = seen.ranks[0], observed(seen.ranks)
    steps = Steps(of_ranks)
    clean = np.ones(len(steps.step_s), bool) if steps.clean is None else steps.clean.all(axis=0)
    if first.computes_on_every_core:
        within = [tuple(rank.steps[number] for rank in of_ranks.ranks) for number in steps.kept]
        spans = [[(each.began_s, each.ended_s) for each in step] for step in within]
        clean = clean | np.array([_in_clean_blocks(each, blocks) for each in spans], bool)
    step_s = steps.step_s[clean]
    here = first.ranks_here == first.ranks
    layout = str(first.ranks) if here else f"{first.ranks // first.ranks_here}x{first.ranks_here}"
    return Run(
        job=_job(seen, layout, NODE if here and first.device == "cpu" else ""),
        step_s=float(np.median(step_s)) if len(step_s) else 0.0,
        steps=len(step_s),
        name=f"{first.run} from {at}",
        at=at,
        version=first.torch,
    )


def _in_clean_blocks(spans: Sequence[tuple[float, float]], blocks: Sequence[Span]) -> bool:
    """Whether a step of several ranks lies in blocks that are all clean."""
    begin_s, end_s = min(began for began, _ in spans), max(ended for _, ended in spans)
    around = [clean for began, ended, clean in blocks if began < end_s and ended > begin_s]
    return bool(blocks) and blocks[0][0] <= begin_s and end_s <= blocks[-1][1] and all(around)


def _job(seen: Watched, layout: str, network: str) -> Job:
    first = seen.ranks[0]
    device = first.device_name or processor.model()
    if seen.workload is None:
        return Job(
            parameters=first.parameters_sha256[:16],
            optimizer=first.optimizer,
            strategy=Zero3().text,
            layout=layout,
            local_batch=first.local_batch,
            accumulate=first.accumulate,
            fusion_rule="fsdp",
            cap="",
            wire="",
            device=device,
            network=network,
        )
    grid = Grid.of(devices=layout, local_batch=first.local_batch)
    plan, _ = plan_one(seen.workload, _machine(first, 0.0, _FAST), grid)
    return job_of(seen.workload, plan, network, device)


def _notes(ranks: Sequence[WatchedRank]) -> tuple[str, ...]:
    first, notes = ranks[0], list[str]()
    if len(ranks) < first.ranks:
        numbers = ", ".join(str(each.rank) for each in ranks)
        notes.append(
            f"only ranks {numbers} of {first.ranks} were seen, those of this machine: waiting for another one counts as"
            " communication"
        )
    own_s = max(each.own_s for each in ranks)
    notes.append(f"watching took {format_duration(own_s)} in all of the rank that it took the longest")
    return tuple(notes)


def _priced(workload: Workload, rank: WatchedRank, exposed_s: float, step_s: float) -> tuple[CapGain, ...]:
    """Price every cap that makes other buckets, once for each latency. Raises ``ConfigError``.

    Where the ranks compute on all cores, an allreduce during backward may also save nothing: then a cap only changes
    how many latencies a step has.
    """
    free = _machine(rank, 0.0, _FAST)
    grid = Grid.of(devices=rank.ranks, local_batch=rank.local_batch, algorithm=_ALGORITHM, overlap=_OVERLAP)
    plan, script_defaults = plan_one(workload, free, grid)
    if script_defaults.unpriced or FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is None:
        raise ConfigError("; ".join(script_defaults.unpriced) or f"buckets by rule {plan.fusion_rule!r} have no cap")
    own, *others = (
        scheduled(workload, free, msgspec.structs.replace(plan, fusion_threshold_bytes=cap))
        for cap in plan_thresholds(workload, free, plan, _LEAST_CAP_BYTES)
    )
    gains: dict[float, list[float]] = {}
    for latency_s in LATENCIES_S.get(rank.backend, LATENCIES_S["gloo"]):
        machine = _as_seen(own, rank, latency_s, exposed_s)
        if machine is None:
            continue
        now = price(own, machine).prediction
        for other in others:
            then = price(other, machine).prediction
            each = gains.setdefault(other.plan.threshold_bytes, [])
            each.append(step_s / (step_s - now.step_s + then.step_s))
            if rank.computes_on_every_core:
                each.append(step_s / max(step_s + latency_s * (then.buckets - now.buckets), step_s - exposed_s))
    buckets = {other.plan.threshold_bytes: other.buckets for other in others}
    priced = [CapGain(cap_bytes=cap, buckets=buckets[cap], low=min(of), high=max(of)) for cap, of in gains.items()]
    return tuple(sorted(priced, key=lambda each: -each.low))


def _machine(rank: WatchedRank, latency_s: float, bytes_per_s: float) -> Machine:
    time_s = tuple(latency_s + size / bytes_per_s for size in _SIZES_BYTES)
    cost = AllreduceCost(algorithm=_ALGORITHM, devices=rank.ranks, sizes_bytes=_SIZES_BYTES, time_s=time_s)
    return Machine(name="the job's own communication", allreduce=(cost,))


def _as_seen(schedule: Schedule, rank: WatchedRank, latency_s: float, exposed_s: float) -> Machine | None:
    """A machine on which as much communication is exposed as was; None where the latency alone exposes more."""

    def exposed(bytes_per_s: float) -> float:
        return price(schedule, _machine(rank, latency_s, bytes_per_s)).prediction.exposed_communication_s

    rate = rate_of_time(exposed, exposed_s, _SLOW, _FAST)
    return None if rate is None else _machine(rank, latency_s, rate)
