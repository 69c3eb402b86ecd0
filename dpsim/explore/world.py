"""The world of a what-if page: what its engine (``engine/*.js``) computes predictions from, as one JSON object.

The engine has the arithmetic, and no number of its own but the formulas' own: layers, tables, links, and what is
assumed of them come from here, under the names that they have in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec

from dpsim import codec, uncertainty
from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError
from dpsim.explore.written import written
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering import lower
from dpsim.lowering.computation import global_statistics_bytes, inputs_of
from dpsim.machine import AllreduceCost, Link, Machine, Network, OverlapCost
from dpsim.model import scaling, slowest
from dpsim.model import uncertainty as of_prices
from dpsim.model.defaults import CERTAIN, for_prediction
from dpsim.model.formulas import wire_share
from dpsim.model.interval import (
    COMMON_MODEL_ERROR,
    EMULATED_LINK_SHARE,
    EMULATED_MODEL_ERROR,
    EMULATED_OWN_ERROR,
    OWN_MODEL_ERROR,
)
from dpsim.model.residuals import LEVEL, width_of
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import Plan
from dpsim.schedule import KINDS
from dpsim.uncertainty import IntervalWidth
from dpsim.units import ITEM_BYTES
from dpsim.workload import Workload

_MACHINES = Path(str(resources.files("dpsim.experiments") / "machines"))
EXAMPLE_WORKLOAD, EXAMPLE_MACHINE = _MACHINES / "googlenet_k80.toml", "10gbe"
"""What a page shows where nothing is named: published layer times, on a link whose latency and bandwidth may move."""
MOST_LAYERS = 3000
"""The layers that a page holds: a change is drawn within a second."""
MOST_BYTES = 850_000
"""What a page's world may take: with its scripts and its style the page stays below 1 MB."""
_SEVERAL = 2
_LARGER_BATCHES = 8
"""Times the largest profiled local batch that a page goes up to."""
_CONSTANTS = {
    **{name: value for name, value in vars(uncertainty).items() if name.startswith("ASSUMED_")},
    **{name: getattr(of_prices, name) for name in ("BATCH_STEP", "SIZE_STEP", "DEVICES_STEP", "NORMAL_95")},
    **{name: getattr(scaling, name) for name in ("SCALED_STEP", "UNMEASURED_LAYOUT")},
    "COMMON_MODEL_ERROR": COMMON_MODEL_ERROR,
    "OWN_MODEL_ERROR": OWN_MODEL_ERROR,
    "EMULATED_MODEL_ERROR": EMULATED_MODEL_ERROR,
    "EMULATED_OWN_ERROR": EMULATED_OWN_ERROR,
    "EMULATED_LINK_SHARE": EMULATED_LINK_SHARE,
    "CONTENTION_ENDS": uncertainty.CONTENTION_ENDS,
    "CERTAIN": CERTAIN,
    "DEVIATIONS": NormalDist().inv_cdf((1 + LEVEL) / 2),
}


def world(
    workload: Workload,
    machine: Machine,
    local_batches: Sequence[int] = (),
    optimizer: Optimizer | None = None,
    widths: Sequence[IntervalWidth] = (),
) -> dict[str, Any]:
    """Return what the engine needs of a workload and a machine, which may be that of a file.

    ``widths`` are those of a study's intervals, in place of a prediction's beforehand. ``local_batches`` are in it
    beside those that every page has, and ``left_out`` says which strategies it lacks. What is assumed of a machine
    that nobody calibrated is filled in (``dpsim.model.defaults``). Raises ``ConfigError`` for what a page cannot hold:
    more than ``MOST_LAYERS`` layers, and slow devices.
    """
    if len(workload.layers) > MOST_LAYERS:
        raise ConfigError(
            f"a page of workload {workload.name!r} with {len(workload.layers)} layers",
            allowed=f"up to {MOST_LAYERS}, which a browser prices while a slider moves",
            remedy="join layers in the workload file, or ask dpsim predict",
        )
    if machine.slow_devices:
        raise ConfigError(
            f"a page of machine {machine.name!r}, some of whose devices are slow",
            allowed="equal devices",
            remedy="take slow_devices out of the machine file, or ask dpsim predict",
        )
    known = for_prediction(workload, machine)
    if widths:
        known = msgspec.structs.replace(known, interval_widths=tuple(widths))
    most = _LARGER_BATCHES * workload.local_batches[-1]
    powers = (1 << power for power in range(most.bit_length()))
    batches = sorted({*powers, *workload.local_batches, *local_batches})
    of_all = {
        "workload": _workload(workload, optimizer or Sgd()),
        "local_batches": batches,
        "kinds": KINDS,
        "machine": _machine(workload, known),
        "rules": {
            name: {
                field: getattr(rule, field)
                for field in ("summary", "default_threshold_bytes", "needs_costs", "while_running")
            }
            for name, rule in FUSION_RULES.items()
            if not rule.needs_units or (workload.ddp is not None and workload.ddp.units)
        },
        "constants": _CONSTANTS,
    }
    room_bytes = MOST_BYTES - len(codec.to_json(of_all, indent=None))
    schedules, left_out = written(workload, batches, room_bytes)
    return of_all | {"schedules": schedules, "left_out": left_out}


def _workload(workload: Workload, optimizer: Optimizer) -> dict[str, Any]:
    order, item_bytes, slots = workload.ready_order, [*ITEM_BYTES.values()], workload.optimizer_slots
    columns = (order.layer.tolist(), order.size_bytes.tolist(), order.dtype_code.tolist())
    fields = (
        "name local_batches update_s overhead_s overhead_per_sample_s loss_s accumulation_factor emulated_compute"
        " relative_uncertainty input_s_per_sample input_workers input_prefetch state_bytes own_allreduce_bytes"
        " update_bytes gradient_memory"
    )
    return {name: getattr(workload, name) for name in fields.split()} | {
        "optimizer_slots": len(optimizer.slots) if slots is None else slots,
        "layers": _columns(
            {
                "name": layer.name,
                "forward_s": layer.forward_s,
                "backward_s": layer.backward_s,
                "gradient_ready_s": layer.gradient_ready_s,
                "launch_s": layer.launch_s,
                "launch_backward_s": layer.launched_backward_s,
                "inputs": inputs,
                "tensors": len(layer.tensors),
                "activation_bytes_per_sample": layer.activation_bytes_per_sample,
                "output_bytes_per_sample": layer.output_bytes_per_sample,
                "work_bytes": layer.work_bytes,
                "work_bytes_per_sample": layer.work_bytes_per_sample,
                "statistics_bytes": global_statistics_bytes(layer),
            }
            for layer, inputs in zip(workload.layers, inputs_of(workload), strict=True)
        ),
        "ready_order": _columns(
            {"layer": layer, "size_bytes": size, "dtype": code, "item_bytes": item_bytes[code]}
            for layer, size, code in zip(*columns, strict=True)
        ),
        "slowest": _slowest(workload),
    }


def _columns(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Rows with the same keys as columns, which the engine makes rows again: a third of the bytes."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {"columns": columns}


def _slowest(workload: Workload) -> dict[str, Any] | None:
    """What n devices wait for the slowest: E[max] for n = 1 to 8, and its growth with ln(n / 8) beyond."""
    if not workload.step_spread:
        return None
    most = slowest.EXACT_DEVICES
    expected = [
        slowest.expected_slowest(workload.step_spread, n, correlation=workload.step_correlation)
        for n in range(1, most + 1)
    ]
    return {"expected": expected, "growth": (expected[-1] - expected[most // 2 - 1]) / math.log(2)}


def _machine(workload: Workload, machine: Machine) -> dict[str, Any]:
    """A machine for the engine."""
    fields = (
        "name network emulated_network cores relative_uncertainty contention contention_uncertainty network_adapters"
        " wiring collective_overhead_s collective_overhead_uncertainty fixed_share"
        " fixed_share_uncertainty loss_growth loss_growth_uncertainty computation_taken computation_taken_uncertainty"
        " known_devices nodes_per_rack of_one_node of_several_nodes devices_a_node largest_node assumed wake_s"
        " memory_bytes"
    )
    return {name: getattr(machine, name) for name in fields.split()} | {
        "link": _link(machine.link),
        "emulated_link": _emulated(machine),
        "link_in_node": _link(machine.link_in_node),
        "link_between_racks": _link(machine.link_between_racks),
        "compute_slowdown": [msgspec.structs.asdict(slowdown) for slowdown in machine.compute_slowdown],
        "allreduce": _tables(machine.allreduce),
        "halves": _tables(machine.halves),
        "overlap": _tables(machine.overlap),
        "interval_factor": {
            "one": _factor(workload, machine, 1, batch=workload.local_batches[-1]),
            "several": _factor(workload, machine, _SEVERAL, batch=workload.local_batches[-1]),
            "other_batch": _factor(workload, machine, _SEVERAL, batch=2 * workload.local_batches[-1]),
        },
        "algorithms": {
            name: {
                field: getattr(algorithm, field)
                for field in ("summary", "place", "sixteen_bit_messages", "has_reduce_scatter")
            }
            for name, algorithm in ALGORITHMS.items()
        },
    }


def _link(link: Link | None) -> dict[str, Any] | None:
    if link is None:
        return None
    fields = msgspec.structs.asdict(link)
    return fields | {"fitted": bool(fields.pop("fitted_to"))}


def _emulated(machine: Machine) -> dict[str, float] | None:
    """The link that the machine's network emulates."""
    network = Network.parse(machine.network) if machine.emulated_network else Network()
    if not network.paced:
        return None
    return {"latency_s": network.latency_s, "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s}


def _tables(tables: Sequence[AllreduceCost | OverlapCost]) -> list[dict[str, Any]]:
    """Tables without their quantiles, each with the share of its bytes on the wire over those of float32."""
    return [
        {name: value for name, value in msgspec.structs.asdict(table).items() if name not in ("p10_s", "p90_s")}
        | {"wire_share": wire_share(table.wire_dtype)}
        for table in tables
    ]


def _factor(workload: Workload, machine: Machine, devices: int, *, batch: int) -> float:
    """How many times as wide as the model's own intervals on so many devices at a local batch are."""
    plan = Plan(devices=devices, global_batch=devices * batch, fusion_rule="one")
    return width_of(machine, lower(workload, plan)).factor
