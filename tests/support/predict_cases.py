"""Random workloads, machines and plans for the tests of the lowering and of the model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dpsim.algorithms import RUNNABLE, algorithms_in
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.machine import AllreduceCost, ComputeSlowdown, Link, Machine, OverlapCost
from dpsim.plan import OVERLAPS, Plan
from dpsim.workload import Layer, Tensor, Workload

SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 1e-2))


@st.composite
def workloads(draw: st.DrawFn, launches: bool = True, dtypes: tuple[str, ...] = ("float32",)) -> Workload:
    layers = []
    for i in range(draw(st.integers(1, 6))):
        backward = draw(SECONDS)
        tensors = [
            Tensor(name=f"t{i}.{j}", shape=(draw(st.integers(0, 50_000)),), dtype=draw(st.sampled_from(dtypes)))
            for j in range(draw(st.integers(0, 3)))
        ]
        early = draw(st.one_of(st.none(), st.floats(0.0, 1.0)))
        layers.append(
            Layer(
                name=f"layer{i}",
                forward_s=(draw(SECONDS),),
                backward_s=(backward,),
                tensors=tuple(tensors),
                gradient_ready_s=None if early is None else (early * backward,),
                launch_s=draw(SECONDS) if launches and draw(st.booleans()) else 0.0,
                activation_bytes_per_sample=float(draw(st.integers(0, 1000))),
            )
        )
    return Workload(
        name="random", local_batches=(8,), layers=tuple(layers), update_s=draw(SECONDS), overhead_s=draw(SECONDS)
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Tables of ``mpi`` at 2 devices (solo, and sometimes beside), a link for everything else."""
    sizes = sorted(draw(st.sets(st.integers(0, 300_000), min_size=1, max_size=4)))

    def column() -> tuple[float, ...]:
        return tuple(sorted(draw(SECONDS) for _ in sizes))

    tables: dict[str, Any] = {"algorithm": "mpi", "devices": 2, "sizes_bytes": tuple(sizes)}
    mechanisms = draw(st.sampled_from([(), ("thread",), ("poll", "thread")]))
    return Machine(
        name="random",
        allreduce=(AllreduceCost(time_s=column(), **tables),),
        overlap=tuple(
            OverlapCost(overlap=m, time_s=column(), compute_loss_s=column(), poll_s=draw(SECONDS), **tables)
            for m in mechanisms
        ),
        compute_slowdown=(ComputeSlowdown(devices=2, factor=draw(st.floats(0.5, 3.0))),),
        link=Link(latency_s=draw(SECONDS), bandwidth_bytes_per_s=1e8, reduce_s_per_byte=1e-10),
    )


@st.composite
def plans(draw: st.DrawFn, rules: tuple[str, ...] = tuple(FUSION_RULES)) -> Plan:
    rule = draw(st.sampled_from(rules))
    devices, accumulate = draw(st.sampled_from([1, 2, 2, 3, 5])), draw(st.integers(1, 3))
    threshold = draw(st.one_of(st.none(), st.sampled_from([0.0, 1e4, 1e5, float("inf")])))
    algorithm = draw(st.sampled_from(algorithms_in(*RUNNABLE)))
    nodes = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    layout = f"{nodes}x{devices // nodes}" if algorithm == "hierarchical" else ""
    return Plan(
        devices=devices,
        accumulate=accumulate,
        global_batch=devices * accumulate * draw(st.integers(1, 9)),
        fusion_rule=rule,  # type: ignore[arg-type]
        fusion_threshold_bytes=threshold if rule in threshold_rules() else None,
        algorithm=algorithm,
        layout=layout,  # type: ignore[arg-type]
        overlap=draw(st.sampled_from(OVERLAPS)),  # type: ignore[arg-type]
        cycle_s=draw(st.sampled_from([1e-4, 1e-2])),
    )
