"""All-gathers and reduce-scatters of nccl-tests: read into tables of their own, and what ZeRO-1 costs by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_outputs as outputs
import pytest
from published_files import EXPERIMENTS
from small_step import workload

from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.harness.machines import merged
from dpsim.imports import ImportConfig, import_machine
from dpsim.machine import Machine
from dpsim.model import predict
from dpsim.plan import Plan
from dpsim.validation.inputs import message

LOG = EXPERIMENTS / "machines" / "benchmarks" / "nccl_gtx1080.txt"
SUMS = [(1024, 8.0), (65536, 50.0), (1048576, 600.0)]
GATHERS = [(1024, 7.0), (65536, 30.0), (1048576, 310.0)]
SCATTERS = [(1024, 7.5), (65536, 33.0), (1048576, 330.0)]
RANKS = outputs.ranks(["a"] * 4)
PROGRAMS: dict[str, dict[str, Any]] = {
    "allreduce": {"program": "all_reduce_perf", "redop": "sum"},
    "all-gather": {"program": "all_gather_perf", "redop": "none"},
    "reduce-scatter": {"program": "reduce_scatter_perf", "redop": "sum"},
}
POINTS = {"allreduce": SUMS, "all-gather": GATHERS, "reduce-scatter": SCATTERS}
ReadTexts = Callable[..., Machine]


@pytest.fixture
def machine_of(tmp_path: Path) -> ReadTexts:
    def read(*texts: str, **given: Any) -> Machine:
        files = []
        for number, text in enumerate(texts):
            files.append(str(tmp_path / f"{number}.txt"))
            Path(files[-1]).write_text(text)
        return import_machine(ImportConfig(files=tuple(files), **given))[0]

    return read


def printed(kind: str, **changes: Any) -> str:
    options = PROGRAMS[kind] | {"lines_of_ranks": RANKS} | changes
    return outputs.nccl(POINTS[kind], POINTS[kind], 4, **options)


def reported(kind: str) -> str:
    return json.dumps(outputs.nccl_report(POINTS[kind], POINTS[kind], ["a"] * 4, **PROGRAMS[kind]))


def times(machine: Machine) -> dict[str, list[tuple[int, float]]]:
    return {
        table.kind: [(size, round(s * 1e6, 6)) for size, s in zip(table.sizes_bytes, table.time_s, strict=True)]
        for table in machine.allreduce + machine.halves
    }


@pytest.mark.parametrize("form", [printed, reported])
def test_each_collective_gets_a_table_of_its_own(form: Callable[[str], str], machine_of: ReadTexts) -> None:
    machine = machine_of(*(form(kind) for kind in POINTS))
    assert times(machine) == POINTS
    assert [t.kind for t in machine.allreduce] == ["allreduce"]
    assert {(t.algorithm, t.devices, t.layout) for t in machine.halves} == {("nccl", 4, "1x4")}
    if form is printed:  # three tables in one file are the same machine
        one = machine_of("".join(map(printed, POINTS)))
        assert (one.allreduce, one.halves, one.link) == (machine.allreduce, machine.halves, machine.link)


def test_files_that_are_read_alone_are_merged(machine_of: ReadTexts) -> None:
    gathers, scatters = machine_of(printed("all-gather")), machine_of(printed("reduce-scatter"))
    assert (gathers.allreduce, gathers.link) == ((), None)
    both = merged([gathers, scatters])
    assert {table.kind for table in both.halves} == {"all-gather", "reduce-scatter"}
    plan = Plan(devices=4, layout="1x4", global_batch=8, algorithm="nccl", strategy="zero1")
    assert predict(workload(), both, plan).step_s > 0
    with pytest.raises(ConfigError, match="what an allreduce by 'nccl' on 1x4 devices costs"):
        predict(workload(), both, Plan(devices=4, layout="1x4", global_batch=8, algorithm="nccl"))
    with pytest.raises(ConfigError, match="two other tables of all-gather, nccl, 1x4"):
        merged([gathers, gathers])


def test_the_time_of_a_zero1_step_comes_from_their_tables(machine_of: ReadTexts) -> None:
    plan = Plan(
        devices=4, layout="1x4", global_batch=8, algorithm="nccl", strategy="zero1", fusion_rule="one", overlap="off"
    )
    without, own = machine_of(printed("allreduce")), machine_of(*map(printed, POINTS))
    halves, tables = (predict(message(2**20), machine, plan) for machine in (without, own))
    # beside the MiB, 8 bytes are summed for what all devices log
    assert halves.step_s == pytest.approx(2 * 600e-6 / 2, rel=0.015) and halves.extrapolated
    assert tables.step_s == pytest.approx(310e-6 + 330e-6, rel=0.015)


def test_old_outputs_name_no_program_and_print_the_bus_bandwidth_twice() -> None:
    machine = import_machine(ImportConfig(files=(str(LOG),)))[0]
    assert [(t.kind, len(t.sizes_bytes), t.layout) for t in machine.allreduce + machine.halves] == [
        ("allreduce", 25, "1x2"),
        ("all-gather", 25, "1x2"),
        ("reduce-scatter", 25, "1x2"),
    ]
    assert [t.time_s[-1] for t in machine.allreduce + machine.halves] == [0.157295, 0.085704, 0.184732]


def test_a_program_that_an_old_output_does_not_name_is_found_by_its_rows(machine_of: ReadTexts) -> None:
    text = printed("all-gather", program_line="# nThread 1", root=False, checked="error", redop="")
    assert times(machine_of(text)) == {"all-gather": GATHERS}
    for line in ("# Collective test starting: all_gather_perf", "+ mpirun -np 4 ./build/all_gather_perf -b 1K -e 1M"):
        assert times(machine_of(text.replace("# nThread 1\n", line + "\n", 1))) == {"all-gather": GATHERS}
    with pytest.raises(FileFormatError, match="type float, redop none"):
        machine_of(text.replace("# nThread 1\n", "+ mpirun ./build/all_reduce_perf\n", 1))


@pytest.mark.parametrize(
    ("kind", "changes", "given"),
    [
        ("all-gather", {"redop": "sum"}, "redop sum, root -1 in a table of all_gather_perf"),
        ("reduce-scatter", {"redop": "max"}, "redop max, root -1 in a table of reduce_scatter_perf"),
        ("all-gather", {"lines_of_ranks": outputs.ranks(["a"] * 8)}, "64 elements of float in 1024 bytes"),
        ("reduce-scatter", {"wrong": "3"}, "#wrong is 3"),
        ("reduce-scatter", {"program_line": "# Collective test starting: all_reduce_perf"}, "64 elements of float"),
        ("allreduce", {"program_line": "# Collective test starting: reduce_scatter_perf"}, "256 elements of float"),
    ],
)
def test_rows_that_are_not_of_their_program_are_refused(
    kind: str, changes: dict[str, Any], given: str, machine_of: ReadTexts
) -> None:
    with pytest.raises(FileFormatError) as refused:
        machine_of(printed(kind, **changes))
    assert given in str(refused.value) and "line 1" in str(refused.value)


def test_a_bus_bandwidth_of_another_collective_is_refused(machine_of: ReadTexts) -> None:
    report = outputs.nccl_report(GATHERS, GATHERS, ["a"] * 4, **PROGRAMS["all-gather"])
    for side in ("in_place", "out_of_place"):
        report["results"][2][side]["bus_bw"] *= 2
    with pytest.raises(FileFormatError, match=r"results\[2\]: a busbw of .* on 4 devices") as refused:
        machine_of(json.dumps(report))
    assert refused.value.allowed.endswith("size / time x 0.75 for all_gather_perf")


def test_times_that_are_faster_than_memory_are_refused_with_their_file_and_table(machine_of: ReadTexts) -> None:
    text = outputs.osu([(4, 5.0), (2**30, 20.0)])
    with pytest.raises(
        FileFormatError, match=r"0.txt, table of line 3: allreduce table 'mpi' at 2 devices has 1073741824"
    ):
        machine_of(text, devices=(2,))


def test_the_same_table_twice_and_an_algorithm_without_halves_are_refused(machine_of: ReadTexts) -> None:
    with pytest.raises(ConfigError, match="two tables of all-gather by nccl on 1x4 devices"):
        machine_of(printed("all-gather"), printed("all-gather") + "\n")
    with pytest.raises(DpsimError, match="there is no reduce-scatter"):
        machine_of(printed("all-gather"), algorithms=("mpi",))
