"""Whom dpsim competes with: nulls that know what it knows, and communication formulas that others have published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.collective import Layout
from dpsim.machine import Link, Machine
from dpsim.model.compare import nulls
from dpsim.model.link_fit import nonnegative
from dpsim.plan import Plan
from dpsim.validation.inputs import RowInputs, outcome_s
from dpsim.validation.published import PublishedRow, PublishedSet

Floats = NDArray[np.float64]
CALCULON, INDUCTOR = "Calculon", "PyTorch Inductor"
PERFECT = "perfect scaling"
MODELS = (CALCULON, INDUCTOR)
"""Those that are models; all others are nulls."""
_OTHER_MODEL = 100.0
_INTRA_NODE_BYTES_PER_S, _INTER_NODE_BYTES_PER_S = 300e9, 25e9
"""The defaults of ``torch._inductor.config.intra_node_bw`` and ``inter_node_bw``."""
_LL_MAX_BYTES_PER_S = (87.7e9, 39e9, 20.4e9)
_BASE_S, _NVLINK_S, _NETWORK_S, _OVERHEAD_S = 6.6e-6, 0.6e-6, 2.7e-6, 1e-6


def calculon(size_bytes: float, devices: int, latency_s: float, bytes_per_s: float) -> float:
    """Return latency + 2 M (1 - 1/n) / (bandwidth x efficiency), in seconds.

    Source: calculon-ai/calculon, calculon/network.py, ``Network.time`` of an all_reduce with scalar 2 and offset -1.
    """
    return latency_s + 2 * size_bytes * (1 - 1 / devices) / bytes_per_s


def inductor(size_bytes: float, nodes: int, devices: int) -> float:
    """Return the seconds of an allreduce by a ring with NCCL's protocol LL, on NVIDIA's Ampere with default bandwidths.

    base + (nsteps - nInter) intra + nInter inter + M nsteps / (n busbw), nsteps = 2(n-1), nInter = 2m on m > 1 nodes,
    busbw = min(LL's largest, 2 channels of the slowest link / 4).
    Source: pytorch/pytorch @ 01caf79e, torch/_inductor/comm_analysis.py, ``estimate_nccl_collective_runtime``; it takes
    every node to have 8 devices, here the nodes are those of the layout.
    """
    link = _INTRA_NODE_BYTES_PER_S if nodes == 1 else _INTER_NODE_BYTES_PER_S
    bus = min(_LL_MAX_BYTES_PER_S[min(nodes, 3) - 1], 2 * link / 4)
    steps, across = 2 * (devices - 1), 2 * nodes if nodes > 1 else 0
    inside_s = max(_NVLINK_S, _OVERHEAD_S if nodes > 1 else 0.0)
    latency_s = _BASE_S + (steps - across) * inside_s + across * _NETWORK_S
    return latency_s + size_bytes * steps / (devices * bus)


def of_collective(known: Sequence[PublishedRow], row: PublishedRow, plan: Plan) -> dict[str, float]:
    """Return what others say of an allreduce: seconds by their names, from the known rows alone.

    nearest table    the time on the nearest number of devices, as it is
    between tables   linear in the logarithms of time and devices between the two nearest, else the nearest
    alpha-beta       2(n-1) alpha + 2(n-1)/n M beta, alpha and beta fitted to all known rows
    Calculon         its formula, latency and bandwidth fitted to all known rows
    PyTorch Inductor its formula, with its own constants

    Known rows within one node say nothing of several nodes, nor these of one, where there are others.
    """
    size, devices = float(row.values["size_bytes"]), plan.devices
    tables: dict[tuple[int, str], list[tuple[float, float]]] = {}
    alike = [each for each in known if _on_one_node(each) == _on_one_node(row)] or known
    for each in alike:
        key = int(each.values["devices"]), str(each.values.get("layout", ""))
        tables.setdefault(key, []).append((float(each.values["size_bytes"]), each.outcome))
    times = {key: _at(sorted(points), size) for key, points in tables.items()}
    nearest = min(times, key=lambda key: (abs(math.log2(key[0] / devices)), *key))
    below, above = [key for key in times if key[0] <= devices], [key for key in times if key[0] >= devices]
    between = times[nearest]
    if below and above and (few := max(below))[0] != (many := min(above))[0]:
        share = math.log(devices / few[0]) / math.log(many[0] / few[0])
        between = times[few] ** (1 - share) * times[many] ** share
    n, sizes, seconds = np.array([(key[0], *point) for key, points in tables.items() for point in points]).T
    moved = 2 * (n - 1) / n * sizes
    alpha_s, beta = nonnegative(np.column_stack([2 * (n - 1), moved]), seconds)
    latency_s, slope = nonnegative(np.column_stack([np.ones_like(n), moved]), seconds)
    return {
        "nearest table": times[nearest],
        "between tables": between,
        "alpha-beta": float(2 * (devices - 1) * alpha_s + 2 * (devices - 1) / devices * size * beta),
        CALCULON: calculon(size, devices, float(latency_s), 1 / float(slope) if slope else math.inf),
        INDUCTOR: inductor(size, plan.layout.nodes if plan.layout else -(-devices // 8), devices),
    }


def _on_one_node(row: PublishedRow) -> bool:
    return Layout(str(row.values.get("layout", ""))).nodes == 1


def _at(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the seconds at a size: linear between points, in proportion beyond the last, the first value below."""
    sizes, times = np.array(points).T
    return float(times[-1] * size / sizes[-1] if size > sizes[-1] else np.interp(size, sizes, times))


def of_step(
    known: Sequence[PublishedRow], row: PublishedRow, inputs: Mapping[int, RowInputs], published: PublishedSet
) -> dict[str, float]:
    """Return what others say of a step: seconds by their names, from the known rows and the fitted inputs.

    Those of ``dpsim.model.nulls``; the nearest of the known steps, and their median (of several devices where there
    are such), each in proportion to the local batch; and computation followed by one allreduce of all gradients by each
    published formula, on the machine's link.
    """
    workload, machine, plan = inputs[row.line].workload, inputs[row.line].machine, inputs[row.line].plan
    predicted_s = {
        name.replace("_", " ").replace("alpha beta", "alpha-beta,"): seconds
        for name, (seconds, _) in nulls(workload, machine, plan).items()
    }

    def of_sample(each: PublishedRow) -> float:
        own = inputs[each.line].plan
        return outcome_s(each, published, own) / own.local_batch

    nearest = min(known, key=lambda each: _distance(each.values, row.values))
    alike = [each for each in known if each.values.get("model") == row.values.get("model")] or list(known)
    on_several_devices = [each for each in alike if inputs[each.line].plan.devices > 1] or alike
    predicted_s["nearest known step"] = of_sample(nearest) * plan.local_batch
    predicted_s["median of the known steps"] = (
        float(np.median([of_sample(each) for each in on_several_devices])) * plan.local_batch
    )
    if plan.devices > 1:
        nodes = plan.layout.nodes
        link, size = _link(machine, nodes), float(workload.gradient_bytes)
        free_s = predicted_s["free communication"]
        predicted_s[CALCULON] = free_s + calculon(size, plan.devices, link.latency_s, link.bandwidth_bytes_per_s)
        predicted_s[INDUCTOR] = free_s + inductor(size, nodes, plan.devices)
    return predicted_s


def _link(machine: Machine, nodes: int) -> Link:
    link = machine.link_in_node if nodes == 1 and machine.link_in_node else machine.link
    return link or Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how far two rows are: doublings between their numbers, and one for each name that differs."""
    total = 0.0
    for name in one.keys() & other.keys():
        first, second = one[name], other[name]
        if first == second:
            continue
        if isinstance(first, str) or min(first, second) <= 0 or max(first, second) == math.inf:
            total += _OTHER_MODEL if name == "model" else 1.0
        else:
            total += abs(math.log2(first / second))
    return total
