"""Machines that contradict themselves: what is refused, with its place, and what a prediction warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_files import EXPERIMENTS
from small_step import workload

from dpsim import machine as machines
from dpsim.errors import ConfigError, FileFormatError
from dpsim.imports import ImportConfig, import_machine
from dpsim.machine import AllreduceCost, ComputeSlowdown, Link, Machine
from dpsim.model.cautions import cautions
from dpsim.plan import Plan
from dpsim.validation.case import read_cases
from dpsim.validation.inputs import _machine_of_tables
from dpsim.validation.published import read_sets

SIZES = (1024, 65536, 1048576)


def table(*time_s: float, **changes: Any) -> AllreduceCost:
    fields: dict[str, Any] = {"algorithm": "ring", "devices": 2, "sizes_bytes": SIZES, "time_s": time_s}
    return AllreduceCost(**fields | changes)


def sentences(machine: Machine, **changes: Any) -> tuple[str, ...]:
    plan = Plan(**{"devices": 2, "global_batch": 8, "algorithm": "ring", "overlap": "off"} | changes)
    return cautions(machine, [plan], workload())


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, "2.1e-08 s"),
        ({"kind": "all-gather"}, "1.05e-08 s"),
        ({"kind": "reduce-scatter"}, "1.05e-08 s"),
        ({"wire_dtype": "float16"}, "1.05e-08 s"),
    ],
)
def test_a_collective_faster_than_any_memory_is_refused(changes: dict[str, Any], least: str) -> None:
    with pytest.raises(ConfigError, match="at 2 devices has 1048576 bytes in 1e-08 s") as refused:
        table(1e-6, 1e-6, 1e-8, **changes)
    assert least in refused.value.allowed and "seconds" in refused.value.remedy
    table(1e-6, 1e-6, 2.2e-8, **changes)
    table(0.0, 0.0, 0.0, **changes)  # too short for a clock: a prediction warns of it


def test_two_tables_of_the_same_are_refused_with_their_file(tmp_path: Path) -> None:
    once = '[[allreduce]]\nalgorithm = "mpi"\ndevices = 8\nlayout = "2x4"\nsizes_bytes = [64]\ntime_s = [1e-5]\n'
    path = tmp_path / "m.toml"
    path.write_text('schema = "dpsim.machine/1"\nname = "m"\n' + once + once.replace("2x4", "4x2"))
    assert len(machines.read(path).allreduce) == 2
    path.write_text('schema = "dpsim.machine/1"\nname = "m"\n' + once + once.replace("1e-5", "2e-5"))
    with pytest.raises(FileFormatError) as refused:
        machines.read(path)
    assert "m.toml" in str(refused.value) and "[[allreduce]], its entries 1 and 2: mpi on 2x4" in str(refused.value)
    with pytest.raises(ConfigError, match=r"\[\[compute_slowdown\]\], its entries 1 and 3: 4 devices"):
        slowdowns = tuple(ComputeSlowdown(devices=n, factor=1.0 + n / 10) for n in (4, 2, 4))
        Machine(name="m", allreduce=(table(1.0, 2.0, 3.0),), compute_slowdown=slowdowns)


def test_times_that_fall_with_size_are_named() -> None:
    falling = Machine(name="m", allreduce=(table(9e-5, 1e-4, 7e-5),))
    (sentence,) = [each for each in sentences(falling) if "fall with size" in each]
    assert "ring on 2 devices (64 KiB in 100 us, 1 MiB in 70 us)" in sentence
    uncertain = Machine(name="m", allreduce=(table(9e-5, 1e-4, 7e-5, relative_uncertainty=0.3),))
    noisy = Machine(name="m", allreduce=(table(9e-5, 1e-4, 8.5e-5),))
    for machine in (uncertain, noisy):
        assert not any("fall with size" in each for each in sentences(machine))
    halves = Machine(name="m", halves=tuple(table(1e-4, 2e-4, 1e-4, kind=k) for k in ("reduce-scatter", "all-gather")))
    (sentence,) = [each for each in sentences(halves, strategy="zero1") if "fall with size" in each]
    assert "reduce-scatter by ring" in sentence and "all-gather by ring" in sentence


def test_published_tables_do_not_count_as_falling() -> None:
    read = [
        machines.read(path)
        for path in sorted((EXPERIMENTS / "machines").glob("*.toml"))
        if path.stem != "googlenet_k80"
    ]
    logs = [("nccl_a100.txt", ()), ("nccl_gtx1080.txt", ()), ("osu_2_nodes.txt", (2,)), ("osu_4_nodes.txt", (4,))]
    folder = EXPERIMENTS / "machines" / "benchmarks"
    read += [import_machine(ImportConfig(files=(str(folder / name),), devices=given))[0] for name, given in logs]
    sets = read_sets()
    collectives = [case for case in read_cases(sets) if case.quantity == "collective" and not case.apart]
    read += [_machine_of_tables(case, sets[case.dataset].rows, case.dataset) for case in collectives]
    assert len(read) > 8
    for machine in read:
        for each in machine.allreduce + machine.halves:
            strategy = "zero1" if each.kind != "allreduce" else "data-parallel"
            of_table = {"devices": each.devices, "layout": each.layout, "algorithm": each.algorithm}
            found = sentences(machine, global_batch=840 * each.devices, strategy=strategy, **of_table)
            assert not any("fall with size" in sentence for sentence in found), found


def test_a_link_inside_a_node_slower_than_the_one_between_nodes_is_named() -> None:
    slow, fast = (Link(latency_s=1e-6, bandwidth_bytes_per_s=rate) for rate in (1e9, 1e11))
    swapped = sentences(Machine(name="m", link=fast, link_in_node=slow), layout="2x1")
    assert any("slower (1 GB/s (8 Gbit/s)) than the one between nodes (100 GB/s" in each for each in swapped)
    for machine in (Machine(name="m", link=slow, link_in_node=fast), Machine(name="m", link=fast)):
        assert not any("slower" in each for each in sentences(machine, layout="2x1"))


@pytest.mark.parametrize(
    ("line", "given", "remedy"),
    [
        ('bandwidth_bytes_per_s = "10 gb"', "bandwidth '10 gb' is not understood", "1gbit"),
        ('bandwidth = "10 gb"', "unknown field `bandwidth`", "'bandwidth_bytes_per_s'"),
        ('bandwidth_bytes_per_s = 1e9\nmessage_overhead_s = "5 parsec"', "duration '5 parsec'", "50us"),
    ],
)
def test_unknown_units_are_refused_with_their_file(line: str, given: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(f'schema = "dpsim.machine/1"\nname = "m"\n[link]\nlatency_s = 1e-6\n{line}\n')
    with pytest.raises((ConfigError, FileFormatError)) as refused:
        machines.read(path)
    assert f"{path}" in str(refused.value) and given in str(refused.value) and remedy in refused.value.remedy
