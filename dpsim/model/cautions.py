"""Sentences for readers of predictions: which assumptions they rest on, and what to do about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import msgspec

from dpsim.algorithms import ALGORITHMS, NCCL
from dpsim.collective import Collective
from dpsim.ddp_settings import FSDP_ON_GPUS
from dpsim.fusion_rules import DEFAULT_RULE, FUSION_RULES
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model.cost import has_tables, idle_curve, sharing, table_for, tables_of, whole
from dpsim.model.formulas import message_s
from dpsim.model.prices import local_share, own_allreduces_s, waiting_factor
from dpsim.model.slowest import EXACT_DEVICES
from dpsim.plan import Plan
from dpsim.uncertainty import ASSUMED_COMPUTE, ASSUMED_LINK, ASSUMED_TABLE, CONTENTION_ENDS
from dpsim.units import format_bandwidth, format_duration, format_size
from dpsim.workload import Workload

_DEVIATIONS_90 = NormalDist().inv_cdf(0.95)


def cautions(machine: Machine, plans: Sequence[Plan], workload: Workload | None = None) -> tuple[str, ...]:
    """One sentence for each assumption behind the predictions of these plans on a machine. Pure.

    With ``workload`` also for what is assumed of its steps.
    """
    on_several = [plan for plan in plans if plan.devices > 1]
    sentences = [
        _default_rule(on_several, workload),
        _processor_and_gpus(on_several, workload),
        _no_gloo(machine, on_several, workload),
        _published(machine, on_several),
        _implausible(machine, on_several),
        _falling(machine, on_several),
        _slow_node(machine, on_several),
        _shared_cores(machine, [p for p in on_several if sharing(machine, p.devices, p.layout) > 1]),
        _link(machine, [p for p in on_several if not _has_table(machine, p)]),
        _halves(machine, on_several),
        _no_shared_memory([p for p in on_several if not _has_table(machine, p)]),
        _waiting(machine, on_several, workload),
        _synchronised(machine, on_several),
        _fixed_share(machine, plans, workload),
        _whole_buckets([p for p in on_several if p.fusion_rule not in ("per-tensor", "fsdp")], workload),
        _assumed(machine, on_several, workload),
        _own_allreduces(machine, on_several, workload),
        _waited_for(on_several, workload),
        _free_overlap(machine, [p for p in on_several if p.overlap in ("poll", "thread")]),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _no_gloo(machine: Machine, plans: Sequence[Plan], workload: Workload | None) -> str:
    """That PyTorch on processors communicates by gloo, of which a machine that dpsim calibrated has no tables."""
    if workload is None or workload.ddp is None or not machine.cores or machine.emulated_network:
        return ""
    others = sorted({plan.algorithm for plan in plans} - {"gloo", "nccl", "mpi"})
    if not others:
        return ""
    return (
        f"PyTorch on processors communicates by gloo, and this is priced by {' and '.join(others)}, dpsim's own, which"
        " is many times as fast: a machine file of gloo is made by dpsim calibrate --algorithm gloo"
    )


def _priced(machine: Machine, plan: Plan) -> tuple[Collective, ...]:
    """Return the collectives whose tables price a plan: the halves of an allreduce where the machine has such tables.

    For those that it has no tables of, the tables of the allreduce stand.
    """
    collective = machine.priced(plan.collective)
    if collective.kind == "allreduce":
        return (collective,)
    both = collective, msgspec.structs.replace(collective, kind="all-gather")
    return tuple(half if has_tables(machine, half) else whole(half) for half in both)


def _has_table(machine: Machine, plan: Plan) -> bool:
    return all(table_for(tables_of(machine, each.kind), each) is not None for each in _priced(machine, plan))


def _published(machine: Machine, plans: Sequence[Plan]) -> str:
    """Where the numbers of a machine come from that somebody published, and how far they are to be trusted."""
    link = machine.link
    if not plans or not machine.date or link is None or link.relative_uncertainty is None:
        return ""
    factor = math.exp(_DEVIATIONS_90 * link.relative_uncertainty)
    return (
        f"{machine.name}: published ({machine.date}), not measured here, and taken to be known to a factor of"
        f" {factor:.2f} either way at 90 %; {machine.calibrated_on}"
    )


def _assumed(machine: Machine, plans: Sequence[Plan], workload: Workload | None) -> str:
    """What makes intervals wide where files state no uncertainty."""
    if not plans or workload is None or workload.emulated_compute:
        return ""
    tables = [table_for(tables_of(machine, each.kind), each) for plan in plans for each in _priced(machine, plan)]
    layers = workload.relative_uncertainty is None
    layer_times = f"layer times ({ASSUMED_COMPUTE:.0%} is assumed)" * layers
    link = machine.link
    bare_link = link is not None and not link.fitted_to and link.relative_uncertainty is None
    if all(table is None for table in tables) and bare_link:
        sends = f"the link ({ASSUMED_LINK:.0%})"
    elif tables and all(table is not None and table.relative_uncertainty is None for table in tables):
        sends = f"allreduces ({ASSUMED_TABLE:.0%})"
    else:
        sends = ""
    if not (layers or sends):
        return ""
    share = "most" if layers and sends else "much"
    return (
        f"{share} of the interval is assumed, not measured: the files state no uncertainty of"
        f" {' and '.join(part for part in (layer_times, sends) if part)}"
    )


def _listed(plans: Sequence[Plan], what: Callable[[Plan], str]) -> str:
    return ", ".join(dict.fromkeys(map(what, plans)))


def _layout(plan: Plan) -> str:
    return plan.layout or str(plan.devices)


def _default_rule(plans: Sequence[Plan], workload: Workload | None) -> str:
    """Name the rule and the threshold that hold where nobody names one, and the workload does not say who trains."""
    if workload is None or workload.ddp is not None or workload.source.startswith("dpsim "):
        return ""
    default = FUSION_RULES.find(DEFAULT_RULE)
    if not any(p.fusion_rule == DEFAULT_RULE and p.fusion_threshold_bytes is None for p in plans):
        return ""
    size = format_size(default.default_threshold_bytes or 0.0)
    return (
        f"buckets are those of dpsim's own rule where no other is named: {DEFAULT_RULE}, with threshold {size}; for"
        " those of PyTorch's DistributedDataParallel give --fusion-rule ddp"
    )


def _processor_and_gpus(plans: Sequence[Plan], workload: Workload | None) -> str:
    on_cpu = workload is not None and (" on cpu," in workload.source or workload.source.startswith("dpsim profile: "))
    if not on_cpu or all(plan.algorithm != NCCL for plan in plans):
        return ""
    return (
        "the layer times are of a CPU, and nccl adds up between GPUs: the step is of neither; profile the script on one"
        " of those GPUs"
    )


def _implausible(machine: Machine, plans: Sequence[Plan]) -> str:
    tables = [table_for(machine.allreduce, whole(machine.priced(p.collective))) for p in plans]
    odd = [p for p, table in zip(plans, tables, strict=True) if table is not None and _cannot_be_right(table)]
    if not odd:
        return ""
    return (
        f"the machine's table of {_listed(odd, lambda p: f'{p.algorithm} on {_layout(p)}')} devices cannot be right: it"
        " has zero seconds for every size, or less than half the time for the largest as for the smallest; calibrate"
        " it again"
    )


def _cannot_be_right(table: AllreduceCost) -> bool:
    return not any(table.time_s) or table.time_s[-1] < table.time_s[0] / 2


def _falling(machine: Machine, plans: Sequence[Plan]) -> str:
    """Name tables in which a larger size takes less time than a smaller one, by more than errors explain at 90 %.

    The error of each time is the table's, and at least ``ASSUMED_TABLE``: published tables fall by up to 11 %.
    """
    collectives = dict.fromkeys(each for plan in plans for each in _priced(machine, plan))
    falls = []
    for collective in collectives:
        table = table_for(tables_of(machine, collective.kind), collective)
        if table is None or _cannot_be_right(table):
            continue
        error = ASSUMED_TABLE if table.relative_uncertainty is None else table.relative_uncertainty
        least = math.exp(-_DEVIATIONS_90 * math.sqrt(2) * max(error, ASSUMED_TABLE))
        longest = list(itertools.accumulate(table.time_s, max))
        number = min(range(len(longest)), key=lambda i: table.time_s[i] / longest[i] if longest[i] else 1.0)
        if table.time_s[number] < least * longest[number]:
            before = table.sizes_bytes[table.time_s.index(longest[number])]
            falls.append(
                f"{collective.kind} by {collective.algorithm} on {collective.layout or collective.devices} devices"
                f" ({format_size(before)} in {format_duration(longest[number])},"
                f" {format_size(table.sizes_bytes[number])} in {format_duration(table.time_s[number])})"
            )
    if not falls:
        return ""
    return f"times fall with size in the machine's table of {'; '.join(falls)}: measure these sizes again"


def _slow_node(machine: Machine, plans: Sequence[Plan]) -> str:
    link, in_node = machine.link, machine.link_in_node
    if not plans or link is None or in_node is None:
        return ""
    inside, across = in_node.bandwidth_bytes_per_s, link.bandwidth_bytes_per_s
    if inside >= across:
        return ""
    return (
        f"the machine's link inside a node is slower ({format_bandwidth(inside)}) than the one between nodes"
        f" ({format_bandwidth(across)}): see whether link_in_node and link are interchanged"
    )


def _shared_cores(machine: Machine, plans: Sequence[Plan]) -> str:
    if not plans:
        return ""
    flat = any(not plan.layout for plan in plans)
    remark = "; if they are on several nodes, give a machine file calibrated between nodes (docs/cluster.md)" * flat
    factors = _listed(plans, lambda p: f"{sharing(machine, p.devices, p.layout):.2g} times on {_layout(p)}")
    return (
        f"{_listed(plans, _layout)} devices share {machine.cores} cores: computation is taken to be slower by their "
        f"ratio ({factors} devices){remark}"
    )


def _link(machine: Machine, plans: Sequence[Plan]) -> str:
    curves = {
        plan: [
            idle_curve(machine, each)
            for each in _priced(machine, plan)
            if table_for(tables_of(machine, each.kind), each) is None
        ]
        for plan in plans
    }
    by_link = [plan for plan in plans if any(curve.scaled is None for curve in curves[plan])]
    by_tables = [plan for plan in plans if any(curve.scaled is not None for curve in curves[plan])]
    tables = dict.fromkeys(
        f"{table.algorithm} on {table.layout or table.devices}"
        for of_plan in curves.values()
        for curve in of_plan
        for table in (curve.scaled.tables if curve.scaled else ())
    )
    named = {
        f"the nearest tables ({', '.join(tables)}), scaled by the algorithm's rounds and bytes": by_tables,
        _named(machine.link) if machine.link else "": by_link,
    }
    sentences = [
        f"no table of the machine covers {_listed(priced, lambda p: f'{p.algorithm} on {_layout(p)}')} devices: priced"
        f" by {source}; calibrate these device counts for better ones"
        for source, priced in named.items()
        if priced
    ]
    return "; ".join(sentences)


def _halves(machine: Machine, plans: Sequence[Plan]) -> str:
    sharded = [p for p in plans if p.collective.kind != "allreduce" and not _has_halves(machine, p)]
    if not sharded:
        return ""
    missing = _listed(sharded, lambda p: f"{p.algorithm} on {_layout(p)}")
    by_link = any(p.algorithm == NCCL and not has_tables(machine, whole(machine.priced(p.collective))) for p in sharded)
    ring = ", by nccl on the link as much as going around its ring once" * by_link
    return (
        f"the machine has no tables of reduce-scatters and all-gathers by {missing} devices: each is taken to cost half"
        f" of the allreduce{ring}; calibrate with --strategy zero1, or import all_gather_perf and reduce_scatter_perf"
        " of nccl-tests with dpsim calibrate --from"
    )


def _has_halves(machine: Machine, plan: Plan) -> bool:
    return all(each.kind != "allreduce" for each in _priced(machine, plan))


def _named(link: Link) -> str:
    numbers = f"{format_duration(message_s(link))}, {format_bandwidth(link.bandwidth_bytes_per_s)}"
    if not link.fitted_to:
        return f"the link that the machine file states ({numbers})"
    return (
        f"a link ({numbers}) fitted to {link.fitted_to} devices (residual {link.median_residual:.0%} in the median, "
        f"{link.largest_residual:.0%} at most)"
    )


def _waiting(machine: Machine, plans: Sequence[Plan], workload: Workload | None) -> str:
    beyond = [
        p
        for p in plans
        if workload is not None
        and workload.step_spread
        and p.devices > EXACT_DEVICES
        and waiting_factor(machine, workload, p.devices) > 1
    ]
    if not beyond:
        return ""
    return (
        f"waiting for the slowest of {_listed(beyond, _layout)} devices is extrapolated: a profile shows what steps "
        f"last on up to {EXACT_DEVICES} devices, and beyond that the slowest is taken to last longer by as much for "
        "every doubling as from 4 to 8"
    )


def _whole_buckets(plans: Sequence[Plan], workload: Workload | None) -> str:
    if not plans or workload is None or workload.ddp is None or not workload.ddp.whole_buckets:
        return ""
    return (
        "the workload knows DDP's buckets, but not the gradients in them: no prediction can divide a bucket, and"
        " --fusion-rule per-tensor sends them as they were"
    )


def _own_allreduces(machine: Machine, plans: Sequence[Plan], workload: Workload | None) -> str:
    """What the allreduces of a script's own take of a step, or in which strategies they are left out."""
    if not plans or workload is None or workload.ddp is None or not workload.ddp.own_allreduce_bytes:
        return ""
    priced = [plan for plan in plans if plan.parallelism.classes == 1]
    left_out = _listed([plan for plan in plans if plan.parallelism.classes > 1], lambda p: p.strategy)
    costs = _listed(
        priced, lambda p: f"{format_duration(own_allreduces_s(machine, p, workload))} of a step on {_layout(p)} devices"
    )
    contained = f"; nothing hides them, and they take {costs}" if priced else ""
    return (
        f"the script asks for {workload.ddp.own_allreduces} of its own in each step{contained}"
        f"{f'; they are no part of the prediction for {left_out}' if left_out else ''}"
    )


def _waited_for(plans: Sequence[Plan], workload: Workload | None) -> str:
    waiting = [plan for plan in plans if plan.algorithm == "gloo" and plan.overlap == "inline"]
    if not waiting or workload is None or workload.ddp is None or not workload.ddp.units:
        return ""
    return FSDP_ON_GPUS.rstrip(".")


def _no_shared_memory(plans: Sequence[Plan]) -> str:
    explicit = [p for p in plans if p.algorithm != "auto" and ALGORITHMS.find(p.algorithm).place == "shared memory"]
    if not explicit:
        return ""
    return (
        f"{_listed(explicit, lambda p: p.algorithm)} works in memory that all devices of one node share, and the "
        "machine says nothing of its cost there: a formula for messages is used; choose --algorithm "
        "ring or another that sends messages, if the devices are joined by a network"
    )


def _free_overlap(machine: Machine, plans: Sequence[Plan]) -> str:
    if not plans or machine.overlap:
        return ""
    taken = machine.computation_taken if "computation_taken" in machine.assumed else 0
    free = "overlap {}to cost no compute time"
    costly = f"overlap inside a node {{}}to cost {taken:.0%} of its time in computation, and none between nodes"
    costs = f"{costly if taken else free} (the machine has no overlap tables); compare --set overlap=off"
    if machine.computation_taken and not taken:
        costs = "{}to cost the computation that is stated"
    if "contention" not in machine.assumed:
        return costs.format("is assumed ")
    most, least = CONTENTION_ENDS
    lasts = (
        f"an allreduce beside backward is assumed to last {machine.contention:g} times as long as alone (the interval"
        f" reaches from {least:g} to {most:g} times), and "
    )
    return lasts + costs.format("")


def _synchronised(machine: Machine, plans: Sequence[Plan]) -> str:
    if not plans or "compute_slowdown" not in machine.assumed:
        return ""
    factor, growth = machine.compute_slowdown[0].factor, math.exp(machine.loss_growth or 0.0)
    return (
        f"computation is assumed to last {factor:g} times as long on two devices as on one, as each waits for the"
        f" slowest, and {growth:.3g} times as long again for each further doubling (loss_growth): neither the machine's"
        " compute_slowdown nor the workload's step_spread states it"
    )


def _fixed_share(machine: Machine, plans: Sequence[Plan], workload: Workload | None) -> str:
    if workload is None or "fixed_share" not in machine.assumed:
        return ""
    (known,) = workload.local_batches
    if all(local_share(plan) == known for plan in plans):
        return ""
    return (
        f"{machine.fixed_share:.0%} of the layer times at local batch {known}, the only one that they are known at, are"
        " assumed to stay as they are at every batch (the machine's fixed_share)"
    )
