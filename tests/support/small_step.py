"""A workload of two layers, a machine with one table and a plan, small enough to price by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from dpsim.machine import AllreduceCost, Machine
from dpsim.plan import Plan
from dpsim.workload import Layer, Tensor, Workload


def workload(**changes: Any) -> Workload:
    """Forward 3 s, backward 6 s (b first: 4, then a: 2), 400 bytes each, 1 s update, 0.5 s overhead at batch 4."""
    layers = (
        Layer(name="a", forward_s=(1.0,), backward_s=(2.0,), tensors=(Tensor(name="wa", shape=(100,)),)),
        Layer(name="b", forward_s=(2.0,), backward_s=(4.0,), tensors=(Tensor(name="wb", shape=(100,)),)),
    )
    base = Workload(name="w", local_batches=(4,), layers=layers, update_s=1.0, overhead_s=0.5)
    return msgspec.structs.replace(base, **changes)


def machine(**changes: Any) -> Machine:
    """An allreduce on 2 devices: 1 s + 0.01 s a byte, known from 100 to 400 bytes."""
    table = AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(100, 200, 400), time_s=(2.0, 3.0, 5.0))
    return msgspec.structs.replace(Machine(name="m", allreduce=(table,)), **changes)


def plan(**changes: Any) -> Plan:
    return msgspec.structs.replace(Plan(devices=2, global_batch=8, fusion_rule="per-tensor"), **changes)
