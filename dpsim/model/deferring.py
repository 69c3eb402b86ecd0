"""What a script that reduces its gradients in several micro-batches would gain by doing so in the last one alone."""

from __future__ import annotations

import statistics

import numpy as np
from msgspec.structs import replace

from dpsim.machine import Machine
from dpsim.model.memory import memory
from dpsim.model.observed import Steps
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.units import format_duration, format_size
from dpsim.workload import Workload


def gain_of_deferring(workload: Workload, machine: Machine, plan: Plan, *, priced: bool = True) -> str:
    """Return what deferring saves of a predicted step, and the memory that it needs; nothing where there is no gain.

    Where the machine's links are not known (``priced``), it is what is reduced instead.
    """
    ddp = workload.ddp
    if ddp is None or ddp.deferred or min(plan.accumulate, plan.devices) == 1 or plan.parallelism.classes > 1:
        return ""
    then = replace(workload, ddp=replace(ddp, deferred=True))
    more_bytes = memory(then, plan, machine).total - memory(workload, plan, machine).total
    memory_words = f"needs {format_size(more_bytes)} more" if more_bytes > 0 else "needs no more memory"
    how = "set_requires_gradient_sync" if ddp.units else "no_sync"
    times = len(ddp.reducing(plan.accumulate))
    if not priced:
        saved = f"send {format_size(workload.gradient_bytes)} once"
    else:
        now_s, then_s = (price(scheduled(each, machine, plan), machine).step_s for each in (workload, then))
        saved = f"save {format_duration(now_s - then_s)} of {format_duration(now_s)} on {plan.devices} devices"
    return f"{plan.accumulate} micro-batches reduce {times} times; deferring ({how}) would {saved} and {memory_words}"


def observed_gain(steps: Steps) -> str:
    """Return what deferring saves of steps that ranks of DDP or FSDP were observed in; nothing where each step updates.

    An observed step ends where gradients were reduced. From one that has updated to the next it is one step of the
    script, of which all but the last would have no exposed reduction. FSDP then keeps whole gradients, not shards.
    """
    rank = steps.ranks[steps.typical]
    updating = [number for number, step in enumerate(rank.steps) if step.update_s > 0]
    times = statistics.mode(np.diff(updating).tolist()) if len(updating) > 1 else 1
    if times == 1:
        return ""
    saved_s, step_s = (times - 1) * float(steps.reduced_s.mean()), times * float(steps.step_s.mean())
    how, memory_words = "no_sync", "needs no more memory"
    if steps.sharded:
        more_bytes = sum(rank.bucket_bytes) * (len(steps.ranks) - 1) // len(steps.ranks)
        how, memory_words = "set_requires_gradient_sync", f"needs {format_size(more_bytes)} more"
    return (
        f"{times * rank.accumulate} micro-batches reduce {times} times; deferring ({how}) would save"
        f" {format_duration(saved_s)} of {format_duration(step_s)} and {memory_words}"
    )
