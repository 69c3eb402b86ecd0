"""``calibrate --from``: machines from the outputs of nccl-tests, OSU and IMB, and what is refused in them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_outputs as outputs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_files import EXPERIMENTS, PREDICT

from dpsim import machine as machines
from dpsim.constraints import check
from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.imports import ImportConfig, import_machine
from dpsim.machine import Machine, Network
from dpsim.model import collective_cost
from dpsim.model.link_fit import fitted_link

Dpsim = Callable[..., tuple[int, str, str]]
POINTS = [(1024, 4.62), (65536, 50.43), (1048576, 631.29)]
IN_PLACE = [(1024, 4.51), (65536, 48.2), (1048576, 590.0)]
TWO_NODES = ["alpha"] * 4 + ["beta"] * 4
PUBLISHED = EXPERIMENTS / "machines" / "benchmarks"


@pytest.fixture
def machine_of(tmp_path: Path) -> Callable[..., Machine]:
    def read(*texts: str, **given: Any) -> Machine:
        files = []
        for number, text in enumerate(texts):
            files.append(str(tmp_path / f"{number}.txt"))
            Path(files[-1]).write_bytes(text.encode())
        return import_machine(ImportConfig(files=tuple(files), **given))[0]

    return read


MachineOf = Callable[..., Machine]


def points_of(machine: Machine, table: int = 0) -> list[tuple[int, float]]:
    cost = machine.allreduce[table]
    return [(size, round(time_s * 1e6, 6)) for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)]


def on(machine: Machine) -> list[tuple[str, int, str]]:
    return [(cost.algorithm, cost.devices, cost.layout) for cost in machine.allreduce]


SIZES = st.lists(st.integers(1, 2**40).map(lambda n: 4 * n), min_size=1, max_size=8, unique=True).map(sorted)


@st.composite
def swept(draw: st.DrawFn) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Out-of-place and in-place points of the same sizes, in whole hundredths of a microsecond.

    None is faster than memory: twice the bytes at 100 TB/s, within what is rounded.
    """
    sizes = draw(SIZES)

    def points() -> list[tuple[int, float]]:
        return [(size, draw(st.integers(1 + size // 400_000, 10**10).map(lambda n: n / 100))) for size in sizes]

    return points(), points()


def read_text(folder: Path, text: str, **given: Any) -> Machine:
    path = folder / "allreduce.txt"
    path.write_text(text)
    return import_machine(ImportConfig(files=(str(path),), keep_outliers=True, **given))[0]


@given(both=swept(), full=st.booleans(), datatype=st.sampled_from(["", "MPI_CHAR"]), devices=st.integers(2, 4096))
def test_osu_comes_back_as_it_was_printed(
    both: tuple[Any, Any], full: bool, datatype: str, devices: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = outputs.osu(both[0], full=full, datatype=datatype)
    machine = read_text(tmp_path_factory.getbasetemp(), text, devices=(devices,))
    assert (points_of(machine), on(machine)) == (both[0], [("mpi", devices, "")])


@given(tables=st.dictionaries(st.integers(2, 4096), swept(), min_size=1, max_size=3), defects=st.booleans())
def test_imb_comes_back_as_it_was_printed(
    tables: dict[int, Any], defects: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = outputs.imb({count: both[0] for count, both in tables.items()}, defects=0.0 if defects else None)
    machine = read_text(tmp_path_factory.getbasetemp(), text)
    assert on(machine) == [("mpi", count, "") for count in tables]
    assert [points_of(machine, number) for number in range(len(tables))] == [both[0] for both in tables.values()]


@given(both=swept(), devices=st.integers(2, 64), old=st.booleans(), each=st.booleans(), stamp=st.booleans())
def test_nccl_text_comes_back_as_it_was_printed(
    both: tuple[Any, Any], devices: int, old: bool, each: bool, stamp: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    more: dict[str, Any] = {"root": not old, "stamp": stamp} | (
        {"checked": "error", "wrong": "4e-07"} if old else {"each": each}
    )
    text = outputs.nccl(*both, devices, lines_of_ranks=outputs.ranks(["node"] * devices), **more)
    for out_of_place, expected in zip((True, False), both, strict=True):
        machine = read_text(tmp_path_factory.getbasetemp(), text, out_of_place=out_of_place)
        printed = [(size, round(float(outputs.float_text(us, 7)), 6)) for size, us in expected]
        assert (points_of(machine), on(machine)) == (printed, [("nccl", devices, f"1x{devices}")])


@given(both=swept(), processes=st.integers(1, 8), of_a_process=st.integers(2, 8))
def test_nccl_json_comes_back_as_it_was_printed(
    both: tuple[Any, Any], processes: int, of_a_process: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = outputs.nccl_json(*both, ["node"] * processes, of_a_process)
    for out_of_place, expected in zip((True, False), both, strict=True):
        machine = read_text(tmp_path_factory.getbasetemp(), text, out_of_place=out_of_place)
        assert (points_of(machine), on(machine)) == (
            expected,
            [("nccl", processes * of_a_process, f"1x{processes * of_a_process}")],
        )


def test_nothing_is_invented(machine_of: MachineOf) -> None:
    machine = machine_of(outputs.imb({2: POINTS, 4: POINTS}))
    assert (machine.link, machine.link_in_node) == (fitted_link(machine.allreduce), None)
    derived = ("name", "allreduce", "link")
    rest = {name: getattr(machine, name) for name in Machine.__struct_fields__ if name not in derived}
    assert rest == {name: getattr(Machine(name="", allreduce=machine.allreduce), name) for name in rest} | {
        "calibrated_on": "IMB Allreduce on 2 devices; IMB Allreduce on 4 devices",
        "source": "dpsim calibrate --from 0.txt: IMB Allreduce, Intel(R) MPI Benchmarks 2021.3, MPI-1 part,"
        " MPI Version : 3.1 (out of place, mean over ranks, MPI_FLOAT)",
    }


@pytest.mark.parametrize("prefix", ["0: ", "  0: ", "[1,0]<stdout>:", "[1,0]<stdout>: ", "[prterun-a-1@1,0]<stdout>: "])
@pytest.mark.parametrize("text", [outputs.osu(POINTS), outputs.nccl(POINTS, IN_PLACE, 8), outputs.imb({8: POINTS})])
def test_what_a_launcher_puts_before_every_line_is_taken_away(prefix: str, text: str, machine_of: MachineOf) -> None:
    labelled = "".join(prefix + line for line in text.splitlines(keepends=True))
    assert machine_of(labelled, devices=(8,)).allreduce == machine_of(text, devices=(8,)).allreduce


@pytest.mark.parametrize(("type", "wire_dtype"), [("half", "float16"), ("bfloat16", "bfloat16")])
def test_tables_of_16_bits_price_gradients_that_travel_so(type: str, wire_dtype: str, machine_of: MachineOf) -> None:
    text = outputs.nccl(POINTS, IN_PLACE, 8, type=type, lines_of_ranks=outputs.ranks(["alpha"] * 8))
    (table,) = machine_of(text).allreduce
    assert (table.wire_dtype, table.algorithm, table.sizes_bytes) == (wire_dtype, "nccl", (2048, 131072, 2097152))
    assert collective_cost(machine_of(text), "nccl", 8, 131072, wire_dtype) == (table.time_s[1], False)
    with pytest.raises(ConfigError, match="runs only with --backend cuda"):
        check("network", algorithm="nccl", network=Network())


def test_a_row_far_from_its_neighbours_is_named(tmp_path: Path, dpsim: Dpsim) -> None:
    points = [(1024, 4.6), (4096, 52.0), (16384, 6.1), (65536, 9.9), (2**20, 160.0)]
    (tmp_path / "osu.txt").write_text(outputs.osu(points))
    code, _, err = dpsim(
        "calibrate", "--from", str(tmp_path / "osu.txt"), "--devices", "2", "--output", str(tmp_path / "m.json")
    )
    assert code == 0 and err.count("warning") == 1
    assert "line 5: 4096 bytes in 52 us, between 4.6 and 6.1 us" in err


def test_from_is_repeated_and_reads_standard_input(
    tmp_path: Path, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (2, 4):
        (tmp_path / f"{count}.txt").write_text(outputs.osu(POINTS))
    out = str(tmp_path / "m.json")
    files = ["--from", str(tmp_path / "2.txt"), "--from", str(tmp_path / "4.txt"), "--devices", "2,4"]
    assert dpsim("calibrate", *files, "--output", out)[0] == 0
    assert on(machines.read(Path(out))) == [("mpi", 2, ""), ("mpi", 4, "")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(outputs.osu(POINTS).encode())))
    assert dpsim("calibrate", "--from", "-", "--devices", "8", "--output", out)[0] == 0
    assert on(machines.read(Path(out))) == [("mpi", 8, "")]


def test_the_source_holds_the_versions_that_the_file_names(machine_of: MachineOf) -> None:
    machine = machine_of(outputs.nccl(POINTS, IN_PLACE, 8, lines_of_ranks=outputs.ranks(TWO_NODES)))
    assert machine.source == (
        "dpsim calibrate --from 0.txt: nccl-tests all_reduce_perf, nccl-tests version 2.17.9 nccl-headers=22807"
        " nccl-library=22807, NCCL version 2.28.7+cuda13.0 (in place)"
    )
    assert machine.name == "8 x NVIDIA H100"
    assert machine.calibrated_on == "8 x NVIDIA H100; nccl-tests all_reduce_perf on 2x4 devices"
    assert "NCCL 2.28.7 (in place)" in machine_of(outputs.nccl_json(POINTS, IN_PLACE, TWO_NODES)).source
    machine = machine_of(outputs.osu(POINTS, datatype="MPI_INT"), devices=(2,))
    assert "OSU MPI Allreduce Latency Test v5.8 (out of place, mean over ranks, MPI_INT)" in machine.source


@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        (["one"] * 8, "1x8"),
        (TWO_NODES, "2x4"),
        (["a", "b", "c", "d"], "4x1"),
        (["a", "b"] * 4, ""),
        (["a"] * 3 + ["b"] * 5, ""),
    ],
)
def test_the_layout_is_that_of_the_hosts(hosts: list[str], layout: str, machine_of: MachineOf) -> None:
    text = outputs.nccl(POINTS, IN_PLACE, len(hosts), lines_of_ranks=outputs.ranks(hosts))
    assert on(machine_of(text)) == on(machine_of(outputs.nccl_json(POINTS, IN_PLACE, hosts)))
    assert on(machine_of(text)) == [("nccl", len(hosts), layout)]


def test_devices_chooses_among_the_tables_of_a_file_and_may_say_how_they_stand(machine_of: MachineOf) -> None:
    text = outputs.imb({1: POINTS, 2: POINTS, 8: POINTS})
    assert on(machine_of(text)) == [("mpi", 2, ""), ("mpi", 8, "")]
    assert on(machine_of(text, devices=("2x4",))) == [("mpi", 8, "2x4")]
    text = outputs.nccl(POINTS, IN_PLACE, 8, lines_of_ranks=outputs.ranks(TWO_NODES))
    assert on(machine_of(text, devices=(8,))) == [("nccl", 8, "")]


def test_several_files_are_one_machine(machine_of: MachineOf) -> None:
    texts = outputs.osu(POINTS), outputs.osu(IN_PLACE), outputs.imb({2: POINTS})
    machine = machine_of(*texts, devices=(4, 8, 2), algorithms=("ring", "ring", "mpi"))
    assert on(machine) == [("ring", 4, ""), ("ring", 8, ""), ("mpi", 2, "")]
    assert points_of(machine, 1) == IN_PLACE


def test_a_file_of_several_runs_is_as_many_tables(machine_of: MachineOf) -> None:
    runs = [outputs.nccl(POINTS, IN_PLACE, n, lines_of_ranks=outputs.ranks(["node"] * n)) for n in (2, 4, 8)]
    assert on(machine_of("".join(runs))) == [("nccl", n, f"1x{n}") for n in (2, 4, 8)]
    assert on(machine_of(outputs.osu(POINTS).replace("Allreduce", "Broadcast") + outputs.osu(POINTS), devices=(2,)))


@pytest.mark.parametrize("change", ["crlf", "bom", "indented", "collapsed", "logs"])
def test_what_does_not_change_a_table_is_allowed(change: str, machine_of: MachineOf) -> None:
    texts = {
        "nccl-tests": outputs.nccl(POINTS, IN_PLACE, 8, lines_of_ranks=outputs.ranks(TWO_NODES)),
        "osu": outputs.osu(POINTS, full=True),
        "imb": outputs.imb({8: POINTS}),
    }
    for name, text in texts.items():
        lines = text.split("\n")
        row = next(number for number, line in enumerate(lines) if line.split()[:1] == ["65536"])
        logs = ["[host:17] UCX  WARN  something", "a:1:2 [0] NCCL INFO Launch mode Parallel", "# a comment"]
        changed = {
            "crlf": text.replace("\n", "\r\n"),
            "bom": "\ufeff" + text,
            "indented": "\n".join("    " + line for line in lines),
            "collapsed": "\n".join(" ".join(line.split()) for line in lines),
            "logs": "\n".join(["loaded module x", *lines[:row], *logs, *lines[row:], "real 0m9.5s"]),
        }[change]
        given: dict[str, Any] = {"devices": (8,)} if name == "osu" else {}
        assert machine_of(changed, **given).allreduce == machine_of(text, **given).allreduce, name
        assert machine_of(changed, format=name, **given).allreduce == machine_of(text, **given).allreduce, name


def test_sizes_that_imb_could_not_measure_are_left_out(machine_of: MachineOf) -> None:
    text = outputs.imb({2: POINTS}).replace(
        "\n\n\n# All", '\n      2097152 out-of-mem.; needed X=   0.402 GB; use flag "-mem X"\n\n# All'
    )
    assert points_of(machine_of(text)) == POINTS


RANKED = outputs.nccl(POINTS, IN_PLACE, 2, lines_of_ranks=outputs.ranks(["a", "a"]))
REFUSED = [
    # nccl-tests
    (RANKED.replace("(us)", "(ms)"), "line 12", "(us)"),
    (outputs.nccl(POINTS, IN_PLACE, 2, time="cputime"), "line 9", "without -C"),
    (outputs.nccl(POINTS, IN_PLACE, 2, wrong="17"), "line 11: #wrong is 17", "measure again"),
    (outputs.nccl(POINTS, IN_PLACE, 2, checked="error", wrong="3e+01"), "line 11: #wrong is 30", "measure again"),
    (outputs.nccl(POINTS, IN_PLACE, 2, verdict="3 FAILED"), "out of bounds values: 3 FAILED", "measure again"),
    (outputs.nccl(POINTS, IN_PLACE, 2, type="int8"), "type int8", "-d float -o sum"),
    (outputs.nccl(POINTS, IN_PLACE, 2, redop="max"), "redop max", "-d float -o sum"),
    (outputs.nccl(POINTS, IN_PLACE, 2, program="alltoall_perf"), "line 2: a table of", "all_gather_perf"),
    (outputs.nccl(POINTS, IN_PLACE, 4, lines_of_ranks=outputs.ranks(["a"] * 8)), "busbw", "size / time x 2 (n-1) / n"),
    (RANKED.replace("631.29", "63.129"), "algbw of 1.66 GB/s", "algbw = size / time"),
    (RANKED.replace(" 262144 ", " 262145 "), "262145 elements", "4 bytes per element"),
    (RANKED.replace("Rank  1", "Rank  0"), "line 7: rank 0 twice: two runs on one device each", "MPI=1"),
    (RANKED.replace("Rank  1 Group  0", "Rank  1 Group  1"), "rank 1 of group 1", "NCCL_TESTS_SPLIT"),
    (RANKED[: RANKED.index("631.29") + 4], "line 15", "cut off"),
    # OSU
    (outputs.osu([*POINTS, (64, 3.0)]), "line 7: 64 bytes after 1048576", "one sweep"),
    (outputs.osu([*POINTS, (1048576, 3.0)]), "line 7: 1048576 bytes after 1048576", "one sweep"),
    (outputs.osu([(2**61, 3.0)]), "line 4", "2^60"),
    (outputs.osu([(64, 0.0)]), "line 4: 64 bytes in 0.0 us", "more than 0 us"),
    (outputs.osu([]), "line 3: a table without a row", "run the benchmark again"),
    (outputs.osu(POINTS).replace("(us)", "(ms)"), "line 3: columns '# Size", "Avg Latency(us)"),
    (outputs.osu(POINTS, passed="Fail"), "line 4: Validation is 'Fail'", "Pass"),
    (outputs.osu(POINTS).replace("50.43", "  N/A"), "line 5: Avg Latency(us) is 'N/A'", "two digits"),
    (outputs.osu(POINTS).replace("631.29", "631.2"), "line 6", "cut off"),
    (outputs.osu(POINTS).replace("65536", "65,536"), "line 5: Size is '65,536'", "digits alone"),
    (outputs.osu(POINTS).replace("65536", "1.0E5"), "line 5: Size is '1.0E5'", "digits alone"),
    (outputs.osu(POINTS).replace("65536", "*****"), "line 5: Size is '*****'", "digits alone"),
    (outputs.osu(POINTS).replace("65536", "\uff165536"), "line 5: Size is '\uff165536'", "digits alone"),
    (outputs.osu(POINTS).replace("\n65536", "\n\n65536"), "line 6: a row outside its table", "empty line"),
    (outputs.osu(POINTS).replace("631.29", "63.29"), "line 6: a row that ends elsewhere", "line it up"),
    (outputs.osu(POINTS).replace("65536 ", "srun: error"), "line 5: 3 columns", "another program's output"),
    (outputs.osu(POINTS).replace("MPI", "MPI Non-blocking"), "line 2: no OSU allreduce", "osu_"),
    (outputs.osu(POINTS, full=True).replace("568.16", "868.16"), "line 6: a mean of", "between the two"),
    (outputs.osu(POINTS).replace(" 50.43", " 00.43"), "line 5: Avg Latency(us) is '00.43'", "two digits"),
    # IMB
    (outputs.imb({2: POINTS}, datatype="MPI_DOUBLE"), "line 6: MPI_Datatype for reductions", "MPI_FLOAT"),
    (outputs.imb({2: POINTS}, defects=1.0), "defects is '1.00'", "measure again"),
    (outputs.imb({2: POINTS}).replace("Allreduce", "Bcast"), "line 10: no IMB allreduce", "'Bcast'"),
    (outputs.imb({2: POINTS}).replace("t_avg[usec]", "t_avg[msec]"), "line 21: columns", "t_avg[usec]"),
    (outputs.imb({2: POINTS}).replace("#repetitions  t_min", "Group #repetitions t_min"), "", "-multi"),
    (outputs.imb({2: POINTS}).replace("s = 2", "s = two"), "line 18: a table that does not say", "N >= 1"),
    (outputs.imb({2: POINTS}).replace("631.29", "831.29"), "a mean of 831.29 us", "between the two"),
    # none of them
    ("hello\n", "line 1: the file looks like no benchmark", "osu_allreduce"),
    ("", "line 1: the file looks like no benchmark", "osu_allreduce"),
    (outputs.osu(POINTS) + outputs.imb({2: POINTS}), "looks like osu and like imb", "--format"),
    ('{"version": 2,\n "args": [}', "line 2: no valid JSON at column 11", "cut off"),
    ("{" * 100_000, "line 1", "cut off"),
    ('{"version": NaN}', "NaN is not a JSON number", "-J"),
    ('{"version": 2}', "required field `args`", "-J"),
]


@pytest.mark.parametrize(("text", "given", "more"), REFUSED)
def test_what_cannot_be_believed_is_refused(text: str, given: str, more: str, machine_of: MachineOf) -> None:
    devices = () if "Rank" in text or "#processes" in text else (2,)
    with pytest.raises(FileFormatError) as refused:
        machine_of(text, devices=devices)
    assert given in str(refused.value) and more in str(refused.value), refused.value


def _report(**changes: Any) -> str:
    report = outputs.nccl_report(POINTS, IN_PLACE, ["a", "a"])
    for path, value in changes.items():
        *folders, name = path.split("__")
        inside: Any = report
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        inside[name] = value
    return json.dumps(report)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"version": 3}, "version 3"),
        ({"args": ["alltoall_perf"]}, "'alltoall_perf'"),
        ({"config__ngpus": 10**12}, "2 processes of 1000000000000 devices"),
        ({"config__ngpus": 4}, "results[0]: a busbw"),
        ({"config__devices": []}, "0 processes"),
        ({"out_of_bounds__count": 2}, "out_of_bounds: 2"),
        ({"results": []}, "results: a table without a row"),
        ({"results__1__in_place": None}, "results[1]: in_place is null"),
        ({"results__1__in_place__time": "nan"}, "$.results[1].in_place.time"),
        ({"results__1__in_place__time": 1e999}, "Infinity is not a JSON number"),
        ({"results__1__in_place__time": 5.0}, "results[1]: 65536 bytes in 5.0 us"),
        ({"results__1__in_place__nwrong": 5.0}, "results[1]: #wrong is 5"),
        ({"results__1__size": -4, "results__1__count": -1}, "results[1]: -1 elements"),
        ({"results__1__size": 10**400}, "results[1]"),
        ({"results__1__redop": "prod"}, "results[1]: type float, redop prod"),
        ({"config__devices__0__device_info": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_report_that_cannot_be_believed_is_refused(
    changes: dict[str, Any], given: str, machine_of: MachineOf
) -> None:
    with pytest.raises(FileFormatError) as refused:
        machine_of(_report(**changes))
    assert given in str(refused.value)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(outputs.osu(POINTS).encode() + b"\xff")
    with pytest.raises(FileFormatError, match=r"line 7: byte 0xff is no UTF-8"):
        import_machine(ImportConfig(files=(str(tmp_path / "x"),), devices=(2,)))


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({}, "--devices N"),
        ({"devices": (1,)}, "2 devices or more"),
        ({"devices": (2, 4)}, "one --devices for all files, or one for each"),
        ({"devices": (2,), "algorithms": ("hierarchical",)}, "nodes x devices"),
        ({"devices": (2,), "algorithms": ("pigeon",)}, "ring"),
        ({"devices": (2,), "network": "paced:50us,1gbit"}, "ring"),
    ],
)
def test_what_osu_does_not_say_must_be_given_rightly(
    given: dict[str, Any], allowed: str, machine_of: MachineOf
) -> None:
    with pytest.raises(DpsimError) as refused:
        machine_of(outputs.osu(POINTS), **given)
    assert allowed in refused.value.allowed


def test_a_number_of_devices_that_contradicts_the_file_is_refused(machine_of: MachineOf) -> None:
    text = outputs.nccl(POINTS, IN_PLACE, 8, lines_of_ranks=outputs.ranks(TWO_NODES))
    for devices in (4, "4x2"):
        with pytest.raises(ConfigError, match="was measured on"):
            machine_of(text, devices=(devices,))
    with pytest.raises(FileFormatError, match="busbw"):
        machine_of(outputs.nccl(POINTS, IN_PLACE, 8), devices=(4,))


def test_a_table_given_twice_is_refused(machine_of: MachineOf, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two tables of allreduce by mpi on 2 devices"):
        machine_of(outputs.osu(POINTS), outputs.imb({2: POINTS}), devices=(2,))
    with pytest.raises(ConfigError, match="different files"):
        ImportConfig(files=("a", "a"))


def test_a_machine_from_a_file_predicts(dpsim: Dpsim, tmp_path: Path) -> None:
    output = tmp_path / "machine.json"
    files = ",".join(str(PUBLISHED / f"osu_{count}_nodes.txt") for count in (2, 4))
    code, out, err = dpsim("calibrate", "--from", files, "--devices", "2,4", "--output", output)
    assert code == 0, err
    assert "mpi on 4 devices, 19 sizes, out of place, mean over ranks" in out
    ours, written = machines.read(output), machines.read(EXPERIMENTS / "machines" / "k80_10gbe.toml")
    for table, known in zip(ours.allreduce, written.allreduce, strict=True):
        times = dict(zip(known.sizes_bytes, known.time_s, strict=True))
        rounded = {size: float(f"{time_s:.3e}") for size, time_s in zip(table.sizes_bytes, table.time_s, strict=True)}
        assert rounded == {size: times[size] for size in table.sizes_bytes}
    code, out, err = dpsim(*PREDICT[:-1], output, "--devices", "2,4", "--local-batch", "64", "--json")
    assert code == 0, err
    assert [point["calibrated_on"] for point in json.loads(out)["points"]] == [ours.calibrated_on] * 2


def test_the_import_as_json_says_what_each_table_is(dpsim: Dpsim, tmp_path: Path) -> None:
    file, output = PUBLISHED / "nccl_a100.txt", tmp_path / "m.json"
    code, out, err = dpsim("calibrate", "--from", file, "--out-of-place", "--output", output, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["points"][0] == {
        "devices": 2,
        "layout": "1x2",
        "algorithm": "nccl",
        "wire_dtype": "float32",
        "kind": "allreduce",
        "size_bytes": 2**20,
        "time_s": 44.21e-6,
    }
    assert [table["measured"] for table in shown["summary"]["imported"]] == ["out of place"]
    assert shown["summary"]["replaced"] is False


def test_only_a_machine_file_is_replaced_and_that_is_said(dpsim: Dpsim, tmp_path: Path) -> None:
    output, file = tmp_path / "m.json", tmp_path / "osu.txt"
    file.write_text(outputs.osu(POINTS))
    for expected in (False, True):
        code, out, err = dpsim("calibrate", "--from", file, "--devices", "2", "--output", output)
        assert (code, "replaced" in out) == (0, expected), err
    before = file.read_bytes(), output.read_bytes()
    code, _, err = dpsim("calibrate", "--from", file, "--devices", "2", "--output", file)
    assert (code, "a file of another kind" in err or "this command reads it" in err) == (2, True), err
    code, _, err = dpsim("calibrate", "--from", file, "--output", output)
    assert (code, "--devices N" in err) == (2, True)
    assert (file.read_bytes(), output.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.json", "osu.txt"]


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("calibrate --from x --budget 2s --model mlp", "--model, --budget: with --from nothing is measured"),
        ("calibrate --format osu --out-of-place", "--format, --out-of-place: without --from nothing is imported"),
        ("calibrate --from nowhere.txt --output never.json", "cannot read nowhere.txt"),
        ("calibrate --from a,,b", "--from is 'a,,b'"),
        ("calibrate --from x --format csv", "--format is 'csv'"),
    ],
)
def test_flags_that_do_not_belong_together_are_refused(command: str, given: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim(*command.split())
    assert (code, out) == (2, "")
    assert given in err
