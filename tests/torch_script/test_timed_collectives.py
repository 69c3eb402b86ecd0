"""What ranks take for collectives, and the tables that follow from the times of all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dpsim.constraints import FSDP
from dpsim.launch.job_python import OWN
from dpsim.study.calibration import LOSS_S, TIME_S, CalibrateConfig
from dpsim.study.rows import CalibratedCollective, Rows
from dpsim.study.runners.job_ranks import JobRanks
from dpsim.study.runners.script_processes import Processes
from dpsim.study.runners.timed_collectives import CollectiveTimes, tables_of
from dpsim.torch.script.probe.in_turns.visit import Timed
from dpsim.torch.script.request import Part

CONFIG = CalibrateConfig(
    algorithms=("gloo",), devices=(2,), overlaps=("thread",), max_bytes=4096, runtime="torch-ddp-gloo", slowdown=False
)
ALLREDUCE_S, UNIT_S, LATE_S = 2e-3, 1e-3, 0.5


def answers(timed: Timed) -> list[Any]:
    """Ranks of which each is ``LATE_S`` later than the one before; a load takes 10 % longer beside a stream."""
    ranks = range(timed.devices)
    assert timed.at_s > time.perf_counter() - 1.0
    if timed.what == "stream":
        taken_s = ALLREDUCE_S * timed.at_once
        last_s = LATE_S * (timed.devices - 1)
        return [[(LATE_S * rank + step, last_s + taken_s + step) for step in (10.0, 20.0)] for rank in ranks]
    if timed.what == "load":
        return [UNIT_S * timed.units] * timed.devices
    if timed.what == "beside":
        spans = [(ALLREDUCE_S * number, ALLREDUCE_S * (number + 1)) for number in range(timed.at_once)]
        return [(1.1 * UNIT_S * timed.units, spans)] * timed.devices
    spans = {kind: [(LATE_S * (timed.devices - 1), 1.0)] * 3 for kind in ("all-gather", "reduce-scatter")}  # type: ignore[assignment]
    return [spans] * timed.devices


def tables(config: CalibrateConfig, rows: Rows, parts: int = 1) -> list[CollectiveTimes]:
    return tables_of(config, config.collectives(), rows, answers, UNIT_S, parts)


def test_a_stream_begins_when_the_last_rank_is_ready_and_an_allreduce_has_its_share_of_it() -> None:
    rows = Rows()
    alone, beside = tables(CONFIG, rows)
    for table in (alone, beside):
        table.visit(0)
    subjects = CONFIG.collectives()
    assert [alone.sizes, beside.sizes] == [[4, 1024, 4096], [4, 4096]]
    for size in alone.sizes:
        assert rows.values(subjects[0], TIME_S, size) == pytest.approx([ALLREDUCE_S] * 2)
    for size in beside.sizes:
        assert rows.values(subjects[1], TIME_S, size) == pytest.approx([ALLREDUCE_S])
        units = rows.values(subjects[1], LOSS_S, size) * alone.ask.at_once(size) / (0.1 * UNIT_S)
        assert units >= 2.5 * ALLREDUCE_S * alone.ask.at_once(size) / UNIT_S - 1e-9, "the load outlasts the stream"


def test_turns_come_through_all_sizes_and_a_calibration_that_goes_on_is_a_new_visit() -> None:
    rows = Rows()
    alone, *_ = tables(CONFIG, rows, parts=2)
    subject = CONFIG.collectives()[0]
    alone.visit(0)
    assert [len(rows.values(subject, TIME_S, size)) for size in alone.sizes] == [2, 0, 2]
    again, *_ = tables(CONFIG, rows, parts=2)
    again.visit(0)
    assert [len(rows.values(subject, TIME_S, size)) for size in alone.sizes] == [2, 2, 2]


def test_both_collectives_of_fsdp_come_from_the_same_steps() -> None:
    rows = Rows()
    config = replace(CONFIG, runtime=FSDP, overlaps=(), sizes_bytes=(1024, 65536), strategy="zero3")
    for table in tables(config, rows):
        table.visit(0)
    subjects: list[CalibratedCollective] = config.collectives()
    assert {subject.collective.kind for subject in subjects} == {"all-gather", "reduce-scatter"}
    for subject in subjects:
        assert rows.values(subject, TIME_S, 65536) == pytest.approx([1.0 - LATE_S])


def test_replicas_are_timed_together_and_their_shards_have_the_sizes_of_their_part() -> None:
    rows, asked = Rows(), list[Timed]()
    config = replace(CONFIG, runtime=FSDP, overlaps=(), devices=(4, 8), sizes_bytes=(65536,))
    config = replace(config, strategy="zero3:prefetch=0,replicas=2")

    def noted(timed: Timed) -> list[Any]:
        asked.append(timed)
        kinds = ("all-gather", "reduce-scatter", "allreduce")
        return [{kind: [(0.0, 1.0)] * 3 for kind in kinds}] * timed.devices

    for table in tables_of(config, config.collectives(), rows, noted, UNIT_S, 1):
        table.visit(0)
    sizes = {(each.collective.kind, each.collective.devices): rows.parts(each, TIME_S) for each in config.collectives()}
    halves = {(kind, devices): (65536,) for kind in ("all-gather", "reduce-scatter") for devices in (2, 4)}
    assert sizes == halves | {("allreduce", 2): (65536 // 4,)}
    assert {(timed.devices, timed.size_bytes) for timed in asked} == {(4, 65536), (8, 65536)}


def test_gathers_and_sums_of_other_types_have_the_sizes_of_as_many_numbers() -> None:
    rows, asked = Rows(), list[Timed]()
    types = {"gather_dtype": "bfloat16", "reduce_dtype": "float64"}
    config = replace(CONFIG, runtime=FSDP, overlaps=(), sizes_bytes=(1024, 65536), strategy="zero3", **types)

    def noted(timed: Timed) -> list[Any]:
        asked.append(timed)
        return answers(timed)

    for table in tables_of(config, config.collectives(), rows, noted, UNIT_S, 1):
        table.visit(0)
    assert {(timed.size_bytes, timed.gather_dtype, timed.reduce_dtype) for timed in asked} == {
        (size, "bfloat16", "float64") for size in config.sizes_bytes
    }
    for subject in config.collectives():
        share = 1 / 2 if subject.collective.kind == "all-gather" else 2
        assert rows.values(subject, TIME_S, int(65536 * share)) == pytest.approx([1.0 - LATE_S])


@pytest.mark.torch
@pytest.mark.parametrize(("devices", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_ranks_time_what_they_are_asked_for(devices: int, replicas: int, tmp_path: Path) -> None:
    """On their first ranks alone too, while the others sleep."""
    part = Part(kind="collectives", number=0, ranks=devices, counts=(max(devices - 1, 1), devices), fully_shard=True)
    if devices == 1 or replicas > 1:
        part = replace(part, counts=(devices,), replicas=replicas)
    with JobRanks.started([part], tmp_path, OWN) as job:
        processes = Processes(job)
        job.start([0])
        connections = [job.accept() for _ in range(devices)]
        by_rank = {job.receive(connection)[1]: connection for connection in connections}
        processes.connections += [by_rank[rank] for rank in range(devices)]
        assert all(job.receive(connection).taken > 0 for connection in processes.connections)
        for count in part.counts:

            def asked(what: str, count: int = count, **more: Any) -> list[Any]:
                return processes.time(Timed(what, count, 1024, time.perf_counter() + 2e-3, **more))

            for spans in asked("stream", at_once=5, reduce_dtype="bfloat16"):
                assert len(spans) == 3 and all(begun_s < ended_s for begun_s, ended_s in spans)
            assert len(asked("load", units=2)) == count and min(asked("load", units=2)) > 0
            for loaded_s, spans in asked("beside", at_once=5, units=4):
                assert loaded_s > 0 and len(spans) == 5
            types = {"gather_dtype": "bfloat16", "reduce_dtype": "float32"}
            for of_rank in asked("sharded", units=4, **types) if count > 1 else ():
                counts = {kind: len(spans) for kind, spans in of_rank.items()}
                between = {"allreduce": 4 * 3} if replicas > 1 else {}
                assert counts == {"all-gather": 2 * 4 * 3, "reduce-scatter": 4 * 3} | between, (
                    "four units, given up after forward"
                )
        processes.end()
