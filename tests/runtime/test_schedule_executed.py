"""The Schedule decides: who changes it changes what is run and what is predicted, and nothing else has to follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from ranks_runtime import edited

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.machine import AllreduceCost, Machine
from dpsim.model import price
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.runtime.describe import describe
from dpsim.runtime.program import QueuedCollective, compiled
from dpsim.schedule import ALLREDUCE_EVENT, OTHER_EVENT, Schedule
from dpsim.timeline import Timeline, TimelineRecord
from dpsim.workload import Workload

MODEL, STEPS = "mlp:16,16,16", 2
EDITS: dict[str, tuple[Any, ...]] = {
    "as lowered": (),
    "two allreduces swapped": ("swap", 0, 2),
    "the first allreduce held back": ("delay", 0, "backward dense2"),
    "an allreduce in the middle held back": ("delay", 3, "backward dense1"),
}
OVERLAPS = ("off", "inline", "poll")


def workload() -> Workload:
    """The model with made-up times, all different from 0, so that events follow one another."""
    known = describe(build_model(MODEL, (8, 8, 1), 10), "model")
    layers = tuple(
        msgspec.structs.replace(layer, forward_s=(1.0,), backward_s=(2.0,), gradient_ready_s=(1.5,))
        for layer in known.layers
    )
    return msgspec.structs.replace(known, local_batches=(4,), layers=layers, update_s=1.0, overhead_s=1.0)


def plan(devices: int, overlap: str) -> Plan:
    return Plan(devices=devices, global_batch=8, fusion_rule="per-tensor", algorithm="ring", overlap=overlap)  # type: ignore[arg-type]


def machine(devices: int) -> Machine:
    table = AllreduceCost(algorithm="ring", devices=devices, sizes_bytes=(4, 400_000), time_s=(0.125, 0.125))
    return Machine(name="m", allreduce=(table,))


def begins(step: Timeline) -> list[str]:
    """The names of the operations of one step, in the order in which they first begin."""
    order = np.argsort(step.start_s, kind="stable")
    names = dict.fromkeys(step.operations[code] for code in step.operation[order])
    return [name for name in names if name not in ("wait", "loss", "step overhead")]


def predicted(devices: int, overlap: str, edit: tuple[Any, ...]) -> list[str]:
    schedule = edited(lower(workload(), plan(devices, overlap)), edit)
    return begins(price(schedule, machine(devices)).timeline())


@pytest.mark.parametrize("devices", [2, 3])
def test_an_edited_schedule_changes_the_run_and_the_prediction_alike(
    devices: int, on_ranks: Callable[..., Any]
) -> None:
    keys = [(overlap, name) for overlap in OVERLAPS for name in EDITS]
    cases = [
        {
            "model": MODEL,
            "dataset": "digits",
            "network": "paced:50us,1gbit",
            "plan": codec.to_builtins(plan(devices, overlap)),
            "edit": EDITS[name],
        }
        for overlap, name in keys
    ]
    answers = on_ranks("ranks_runtime:recorded", {"cases": cases, "steps": STEPS}, devices=devices)
    measured: dict[tuple[str, str], list[str]] = {}
    for (overlap, name), answer in zip(keys, answers, strict=True):
        line = Timeline.from_record(codec.decode(answer["timeline"], TimelineRecord, "timeline"))
        expected = predicted(devices, overlap, EDITS[name])
        sent = [operation for operation in expected if operation.startswith("allreduce")]
        for step in range(STEPS):
            for rank in range(devices):
                events = begins(line.select(step=step, rank=rank))
                if overlap != "poll":
                    assert events == expected, (overlap, name)
                assert [operation for operation in events if operation.startswith("allreduce")] == sent, (overlap, name)
                if name == "the first allreduce held back":
                    assert events.index("allreduce 0") > events.index("backward dense2")
        measured[overlap, name] = begins(line.select(step=0, rank=0))
    for overlap in ("off", "inline"):
        assert measured[overlap, "two allreduces swapped"] != measured[overlap, "as lowered"]
    for name in EDITS:
        assert (measured["inline", name] == measured["inline", "as lowered"]) == (name == "as lowered")


@pytest.mark.parametrize("devices", [2, 3])
def test_a_sharded_schedule_is_executed_in_its_order_and_predicted_alike(
    devices: int, on_ranks: Callable[..., Any]
) -> None:
    sharded = [msgspec.structs.replace(plan(devices, overlap), strategy="zero1") for overlap in (*OVERLAPS, "thread")]
    edits: tuple[tuple[Any, ...], ...] = ((), ("swap gathers", 0, 2))
    keys = [(of, edit) for of in sharded for edit in edits]
    fixed = {"model": MODEL, "dataset": "digits", "network": "paced:50us,1gbit"}
    cases = [fixed | {"plan": codec.to_builtins(of), "edit": edit} for of, edit in keys]
    answers = on_ranks("ranks_runtime:recorded", {"cases": cases, "steps": STEPS}, devices=devices)
    for (of, edit), answer in zip(keys, answers, strict=True):
        schedule = edited(lower(workload(), of), edit)
        expected = begins(price(schedule, machine(devices)).timeline())
        behind = expected[expected.index("synchronise") :]
        buckets = [str(bucket) for bucket in schedule.bucket[schedule.parameter_collectives]]
        assert behind == ["synchronise", "update", *(f"all-gather {bucket}" for bucket in buckets)]
        assert (buckets[:3] == ["2", "1", "0"]) == bool(edit)
        line = Timeline.from_record(codec.decode(answer["timeline"], TimelineRecord, "timeline"))
        for step in range(STEPS):
            for rank in range(devices):
                events = begins(line.select(step=step, rank=rank))
                if of.overlap in ("off", "inline"):
                    assert events == expected
                assert events[events.index("synchronise") :] == behind
                sent = [f"reduce-scatter {bucket}" for bucket in schedule.bucket[schedule.gradient_collectives]]
                assert [name for name in events if name.startswith("reduce-scatter")] == sent
                assert set(events) == set(expected)


def test_the_runtime_refuses_what_it_does_not_execute() -> None:
    schedule = lower(workload(), plan(2, "inline"))

    def changed(**columns: Any) -> Schedule:
        return dataclasses.replace(schedule, **columns)

    kind = schedule.kind.copy()
    kind[kind == ALLREDUCE_EVENT] = OTHER_EVENT
    with pytest.raises(ConfigError, match="operations of kind other"):
        compiled(changed(kind=kind))
    with pytest.raises(ConfigError, match="does not end with the update"):
        compiled(changed(kind=schedule.kind[::-1]))
    sharded = lower(workload(), msgspec.structs.replace(plan(2, "inline"), strategy="zero1"))
    last = int(sharded.parameter_collectives[-1])
    early = dataclasses.replace(sharded, depends_on=np.where(sharded.depends_on == last - 8, 0, sharded.depends_on))
    program = compiled(sharded)
    assert len(program.queue) - program.before_update == sharded.buckets > 0
    with pytest.raises(ConfigError, match="does not wait for their update"):
        compiled(early)


def test_an_allreduce_waits_for_every_layer_whose_gradients_it_carries() -> None:
    schedule = lower(workload(), msgspec.structs.replace(plan(2, "poll"), fusion_rule="one"))
    program = compiled(schedule)
    layers = len([layer for layer in workload().layers if layer.tensors])
    assert program.queue == (QueuedCollective(ALLREDUCE_EVENT, 0, layers),)


def test_replicas_add_up_their_shards_behind_each_reduce_scatter_as_predicted(on_ranks: Callable[..., Any]) -> None:
    plans = [msgspec.structs.replace(plan(4, each), strategy="zero3:replicas=2") for each in (*OVERLAPS, "thread")]
    fixed = {"model": MODEL, "dataset": "digits", "network": "paced:50us,1gbit"}
    cases = [fixed | {"plan": codec.to_builtins(of)} for of in plans]
    answers = on_ranks("ranks_runtime:recorded", {"cases": cases, "steps": STEPS}, devices=4)
    for of, answer in zip(plans, answers, strict=True):
        line = Timeline.from_record(codec.decode(answer["timeline"], TimelineRecord, "timeline"))
        schedule = lower(workload(), of)
        queued = np.flatnonzero(schedule.bucket >= 0).tolist()
        expected = [(schedule.operation_name(number), int(schedule.size_bytes[number])) for number in queued]
        assert [name for name, _ in expected if name.endswith(" 0")][-2:] == ["reduce-scatter 0", "allreduce 0"]
        for rank in range(4):
            step = line.select(step=1, rank=rank)
            events = zip(step.start_s.tolist(), step.operation.tolist(), step.size_bytes.tolist(), strict=True)
            sent = [(step.operations[code], size) for _, code, size in sorted(events)]
            assert [each for each in sent if each[0] in dict(expected)] == expected
