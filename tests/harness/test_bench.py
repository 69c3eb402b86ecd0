"""``dpsim bench allreduce``: what it checks, how calls begin together, what samples become, who takes part."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_bench import SingleRank

from dpsim import codec
from dpsim.columns import columns_of
from dpsim.dates import stamp
from dpsim.errors import CommunicationError, ConfigError, FileFormatError
from dpsim.experiments import results_page
from dpsim.harness.bench import measure
from dpsim.harness.bench.result import result
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.elementwise import scaling
from dpsim.launch import rank_info
from dpsim.records import bench
from dpsim.records.bench import AllreduceBench, BenchRecord, Series, System
from dpsim.records.bench_result import BenchPoint
from dpsim.report.bench import warnings
from dpsim.report.bench_tables import line_table, placements
from dpsim.study.environment import environment
from dpsim.study.runners.allreduce import systems, turns
from dpsim.study.runners.allreduce.algorithms import bench_algorithms

Dpsim = Callable[..., tuple[int, str, str]]
Python = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]


# What is asked.


@given(low=st.integers(1, 10**6), high=st.integers(0, 10**9), factor=st.integers(2, 100))
def test_sizes_grow_by_the_factor_from_the_smallest_up_to_the_largest(low: int, high: int, factor: int) -> None:
    sizes = AllreduceBench(min_bytes=4 * low, max_bytes=4 * low + high, factor=factor).sizes()
    assert sizes == [4 * low * factor**i for i in range(len(sizes))]
    assert sizes[-1] <= 4 * low + high < sizes[-1] * factor


def test_without_a_smallest_size_it_begins_at_one_element() -> None:
    assert AllreduceBench().sizes()[0] == 4 and AllreduceBench().sizes()[-1] == 64 * 2**20
    assert AllreduceBench(dtype="float64", max_bytes=8).sizes() == [8]


@pytest.mark.parametrize(
    ("flags", "given", "more"),
    [
        ("--min 1MiB --max 4B", "sizes from 1 MiB to 4 B", "exchange the two"),
        ("--min 3B", "sizes from 3 bytes", "multiples of 4 bytes"),
        ("--min 0", "--min is '0'", "1 byte or more"),
        ("--max inf", "--max is 'inf'", "64MiB"),
        ("--factor 1", "factor is 1", "2 or more"),
        ("--factor two", "--factor is 'two'", "a whole number"),
        ("--devices 0", "devices is 0", "2 to 1024"),
        ("--devices 1", "devices is 1", "2 to 1024"),
        ("--algorithm two-shoot", "unknown algorithm 'two-shoot'", "did you mean 'two-shot'?"),
        ("--algorithm hierarchical", "unknown algorithm 'hierarchical'", "ring"),
        ("--algorithm ring,,mpi", "--algorithm is 'ring,,mpi'", "single commas"),
        ("--dtype float16", "dtype float16 on backend cpu", "float32, float64"),
        ("--dtype float31", "unknown dtype 'float31'", "did you mean 'float32'?"),
        ("--peers goo", "unknown peer 'goo'", "did you mean 'gloo'?"),
        ("--peers nccl --max 4B", "the peer nccl is not installed", "--backend cuda"),
        ("--backend cuda", "backend 'cuda' finds no GPU here", "--backend cpu"),
        ("--backend cuda --peers mpi", "the peer mpi on backend cuda", "nccl"),
        ("--backend rocm", "--backend is 'rocm'", "cpu, cuda"),
        ("--peers openmpi=", "--peers is 'openmpi='", "NAME=FOLDER"),
        ("--peers auto,openmpi=/nowhere", "has no bin/python", "python -m venv"),
        ("--peers mpi=/nowhere", "a peer environment named 'mpi'", "any name but"),
        ("--peer-env openmpi=/nowhere", "--peer-env of dpsim bench", "--peers openmpi=/nowhere"),
        ("--network paced:50us,1gbit", "the network paced:50us,1gbit on backend cpu", "shaped:4x200mbit"),
        ("--network shaped:4x200mbit --devices 2", "2 devices on shaped:4x200mbit", "4: each is a host"),
        ("--network shaped:4x200mbit --peers gloo", "the peer gloo on shaped:4x200mbit", "--peers mpi or none"),
        ("--network shaped:4x200mbit --algorithm two-shot", "unknown algorithm 'two-shot'", "recursive-doubling"),
        ("--max 3TiB --factor 1024 --peers none", "take", "smaller --max"),
        ("--budget 0s", "the budget is 0.0 s", "more than 0 s"),
        ("--plot bandwidth.gif", "cannot draw --plot bandwidth.gif", ".png, .svg"),
        ("--plot /dev/null/x.png", "cannot write --plot", "choose another one with --plot"),
        ("--output /dev/null/x", "cannot write --output", "choose another one with --output"),
    ],
)
def test_a_mistake_is_explained_before_anything_starts(flags: str, given: str, more: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim("bench", "allreduce", *flags.split())
    assert (code, out) == (2, "")
    assert given in err and more in err


def test_inside_an_mpi_job_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_info, "job", lambda: rank_info.MpiJob(launcher="mpiexec", rank=0, size=2))
    with pytest.raises(ConfigError, match="inside an MPI job"):
        measure.measure(AllreduceBench(), lambda _: None)


# How calls begin and are timed.


@pytest.fixture
def page() -> Iterator[str]:
    """Memory for the stamps of a few ranks, as a path."""
    handle = os.memfd_create("test")
    os.ftruncate(handle, 512)
    yield f"/proc/{os.getpid()}/fd/{handle}"
    os.close(handle)


@pytest.mark.parametrize(("ranks", "oversubscribed"), [(1, False), (2, False), (3, True), (4, True)])
def test_nobody_begins_before_the_last_has_arrived(ranks: int, oversubscribed: bool, page: str) -> None:
    """Threads stand for ranks; nothing else holds them together, so that one may be a turn ahead of another."""
    arrived = np.zeros((30, ranks), np.int64)
    begun = np.zeros((30, ranks), np.int64)

    def run(rank: int) -> None:
        start, random = turns.Start(page, rank, ranks, oversubscribed=oversubscribed), np.random.default_rng(rank)
        for turn in range(len(arrived)):
            time.sleep(random.choice([0.0, 0.0, 1e-3]))
            arrived[turn, rank] = turns.clock()
            start.wait()
            begun[turn, rank] = turns.clock()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (begun.min(axis=1) >= arrived.max(axis=1)).all()


def test_bursts_come_in_a_random_order_that_all_ranks_share() -> None:
    variants = [
        turns.Variant(algorithm=name, source=0, target=0, call=print, repeat=repeat)
        for name, repeat in (("scaling", 0), ("two-shot", 0), ("two-shot", 1))
    ]
    order = turns.bursts(variants, 7, [20, 3, 2], [10, 5, 1])
    assert (
        order == turns.bursts(variants, 7, [20, 3, 2], [10, 5, 1]) != turns.bursts(variants, 8, [20, 3, 2], [10, 5, 1])
    )
    counts = [[sum((b.variant, b.cached) == (n, cached) for b in order) for cached in (False, True)] for n in range(3)]
    assert counts == [[20, 10], [20, 10], [20, 0]], "a repeated variant has no cached bursts"
    assert {(b.cached, b.calls, b.warm_up) for b in order} == {(False, 3, 2), (True, 5, 1)}


def test_as_many_calls_are_timed_as_were_asked_for_and_none_of_a_variant_is_lost(page: str) -> None:
    rank = SingleRank(page)
    variants = rank.prepare(400, seed=1)["variants"]
    assert [(v["algorithm"], v["in_place"], v["wrong"]) for v in variants] == [
        (turns.SCALING, True, 0),
        ("right", True, 0),
        ("right", False, 0),
        ("broken", True, 0),
    ]
    visit = rank.visit(400, seed=2, fresh=[3, 5, 2], cached=[2, 4, 1])
    assert [len(times) for times in visit["fresh"]] == [15] * 4
    assert [len(times) for times in visit["cached"]] == [8] * 4
    assert all(0 < ns < 10**9 for times in visit["fresh"] + visit["cached"] for ns in times)
    assert visit["wrong"] == [0] * 4


def test_wrong_sums_are_counted_in_the_check_and_while_timing(page: str) -> None:
    early = SingleRank(page, wrong_calls=range(1))
    assert [variant["wrong"] for variant in early.prepare(400, 1)["variants"]] == [0, 0, 0, 1]
    late = SingleRank(page, wrong_calls=range(1, 1000))
    assert not any(variant["wrong"] for variant in late.prepare(400, 1)["variants"])
    wrong = late.visit(400, seed=2, fresh=[3, 1, 0], cached=[1, 1, 0])["wrong"]
    assert wrong[:3] == [0, 0, 0] and wrong[3] >= 2


def test_the_script_for_other_pythons_needs_numpy_alone(python: Python) -> None:
    program = (
        f"import runpy, sys; runpy.run_path({turns.__file__!r});"
        "print({'dpsim', 'msgspec', 'mpi4py', 'torch', 'scipy'} & sys.modules.keys())"
    )
    done = python("-I", "-c", program)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=20)
@given(count=st.integers(0, 300))
def test_scaling_multiplies_every_element_once(dtype: str, count: int) -> None:
    x = np.arange(count + 1, dtype=dtype)
    scaling(x[:count], 0.5)()
    assert np.array_equal(x[:count], np.arange(count) / 2) and x[count] == count


@pytest.mark.parametrize("share", [1.0, 0.2, 1e-6])
def test_small_calls_come_in_bursts_and_large_ones_alone(share: float) -> None:
    for size in (4, 2**16):
        assert measure.effort(size, share)["fresh"][1] > 1
    for size in (2**16 + 4, 2**20, 2**24, 2**28):
        assert measure.effort(size, share)["fresh"][1:] == (1, 0)


# What samples become.


def series(system: str, algorithm: str, rounds_us: list[list[float]], **more: Any) -> Series:
    rounds = tuple(tuple(round(1e3 * us) for us in calls) for calls in rounds_us)
    plain: dict[str, Any] = {"size_bytes": 2**20, "in_place": True, "cached": False, "wrong": 0}
    return Series(system=system, algorithm=algorithm, rounds_ns=rounds, **plain | more)


def record(*entries: Series, devices: int = 4) -> BenchRecord:
    systems = [System(name="dpsim", peer="dpsim", kind="dpsim")]
    systems += [System(name=f"mpich-{level}", peer="mpich", kind="mpi") for level in ("single", "multiple")]
    systems += [
        System(name="openmpi-single", peer="openmpi", kind="mpi"),
        System(name="gloo", peer="gloo", kind="gloo"),
    ]
    return BenchRecord(
        bench=AllreduceBench(devices=devices, min_bytes=2**20, max_bytes=2**20, algorithms=("two-shot", "mpi")),
        environment=environment(),
        systems=tuple(systems),
        series=entries,
        measured_from=stamp(),
        measured_until=stamp(),
    )


FULL = (
    series("dpsim", "scaling", [[80, 80], [160]]),
    series("dpsim", "scaling", [[10], [10]], cached=True),
    series("dpsim", "two-shot", [[100, 100, 700], [200]], default=True),
    series("dpsim", "two-shot", [[120], [210]], repeat=1, default=True),
    series("dpsim", "two-shot", [[20], [20]], cached=True, default=True),
    series("dpsim", "two-shot", [[300], [300]], in_place=False, default=True),
    series("dpsim", "mpi", [[50], [500]]),
    series("mpich-single", "mpi", [[400], [800]]),
    series("mpich-single", "mpi", [[200], [401]], in_place=False),
    series("mpich-multiple", "mpi", [[900], [900]]),
    series("openmpi-single", "mpi", [[300], [600]]),
    series("gloo", "gloo", [[1000], [2000]]),
)


def test_a_time_is_the_median_of_the_rounds_medians_and_the_bound_is_of_the_same_rounds() -> None:
    points = {(p.system, p.algorithm, p.in_place, p.cached): p for p in result(record(*FULL)).points}
    assert len(points) == len(FULL) - 3  # the scalings and the repeat are no points
    one = points["dpsim", "two-shot", True, False]
    assert one.time_s == pytest.approx(150e-6) and one.samples == 4 and one.default
    assert one.p50_s == pytest.approx(150e-6) and one.p99_s == pytest.approx(700e-6, rel=0.05)
    assert one.algbw_bytes_per_s == pytest.approx(2**20 / 150e-6)
    assert one.busbw_bytes_per_s == pytest.approx(2**20 / 150e-6 * 2 * 3 / 4)
    assert one.fraction_of_bound == pytest.approx(0.8)
    assert one.bytes_moved == 8 * 2**20  # 2 n S
    assert points["dpsim", "two-shot", True, True].fraction_of_bound == pytest.approx(0.5)
    assert points["mpich-single", "mpi", True, False].fraction_of_bound == pytest.approx(0.2)


def test_the_gpus_own_copy_stands_beside_the_bound_and_is_no_allreduce() -> None:
    copies = (
        series("dpsim", turns.MEMCPY, [[60], [100]], in_place=False),
        series("dpsim", turns.MEMCPY, [[5], [5]], in_place=False, cached=True),
    )
    plain, copied = result(record(*FULL)), result(record(*FULL, *copies))
    assert copied.points == plain.points
    assert plain.sizes[0].memcpy_bytes_per_s is None
    assert copied.sizes[0].memcpy_bytes_per_s == pytest.approx(2 * 4 * 2**20 / 80e-6)
    assert copied.sizes[0].bound_bytes_per_s == plain.sizes[0].bound_bytes_per_s


def test_the_bound_of_small_sizes_is_left_out() -> None:
    small = [series(s.system, s.algorithm, [[1.0]], default=s.default, size_bytes=64) for s in FULL[:3:2]]
    changed = {"bench": {"min_bytes": 64, "max_bytes": 64}, "series": [codec.to_builtins(one) for one in small]}
    actual = result(codec.decode(codec.to_builtins(record(*FULL)) | changed, BenchRecord, "x"))
    assert actual.points[0].fraction_of_bound is None and actual.sizes[0].bound_s is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (FULL[:2], "no series of dpsim's default algorithm at 1 MiB"),
        ((*FULL[:4], series("gloo", "gloo", [[1000]])), "with 1 and 2 rounds"),
    ],
)
def test_a_record_that_cannot_be_compared_is_refused(entries: tuple[Series, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(*entries)


def test_each_peer_is_compared_at_its_fastest_mode_and_the_nearest_mpi_counts() -> None:
    (size,) = result(record(*FULL)).sizes
    assert (size.default, size.default_s) == ("two-shot", pytest.approx(150e-6))
    assert (size.best, size.default_fraction, size.noise) == ("two-shot", pytest.approx(0.8), pytest.approx(0.1))
    assert [(p.peer, p.system, p.in_place) for p in size.peers] == [
        ("mpich", "mpich-single", False),
        ("openmpi", "openmpi-single", True),
        ("gloo", "gloo", True),
    ]
    assert [p.ratio for p in size.peers] == [pytest.approx(r, rel=0.01) for r in (2, 3, 10)]
    assert size.best_mpi == size.peers[0] and size.best_mpi.low <= 2.01 <= 2.02 >= size.best_mpi.high - 0.01
    assert size.bound_bytes_per_s == pytest.approx(2 * 4 * 2**20 / 120e-6)


def test_what_was_wrong_has_a_row_and_no_times() -> None:
    actual = result(record(*FULL[:4], series("dpsim", "mpi", [], wrong=3)))
    (wrong,) = [p for p in actual.points if p.wrong]
    assert (wrong.algorithm, wrong.time_s, wrong.busbw_bytes_per_s, wrong.samples) == ("mpi", None, None, 0)
    assert actual.wrong == 3
    (warning,) = [warning for warning in warnings(actual) if warning.kind == "wrong"]
    assert warning.text == "3 elements were not the sum (dpsim mpi)"


def test_a_wrong_sum_ends_with_exit_code_1(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_: record(*FULL[:4], series("dpsim", "mpi", [], wrong=3)))
    assert dpsim("bench", "allreduce")[0] == 1


def test_a_row_has_both_placements_and_one_may_be_missing() -> None:
    pairs = placements(result(record(*FULL)), cached=False)
    shown = {algorithm: set(pair) for pair in pairs for algorithm in {point.algorithm for point in pair.values()}}
    assert shown["two-shot"] == {True, False} and shown["gloo"] == {True}


def test_a_record_survives_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / bench.RECORD
    codec.write_text(path, codec.to_json(record(*FULL), indent=None))
    assert bench.read(path).series == FULL
    path.write_text(path.read_text().replace('"two-shot"', "2", 1))
    with pytest.raises(FileFormatError):
        bench.read(path)


# Who takes part.


def environment_with(folder: Path, modules: list[str], *, mpiexec: str = "") -> str:
    """A folder that looks like a virtual environment whose Python has ``modules``."""
    (folder / "bin").mkdir(parents=True)
    scripts = {"python": f"#!/bin/sh\necho '{json.dumps(modules)}'\n"}
    if mpiexec:
        scripts["mpiexec"] = f"#!/bin/sh\n[ \"$1\" = --version ] && echo '{mpiexec}' && exit 0\necho broken; exit 3\n"
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return str(folder)


def names(asked: AllreduceBench) -> list[str]:
    return [launch.system.name for launch in systems.systems(asked)]


def test_named_environments_bring_their_library_and_lists_choose(tmp_path: Path) -> None:
    envs = {
        "openmpi": environment_with(tmp_path / "o", ["numpy", "mpi4py"], mpiexec="Open MPI 5"),
        "torch": environment_with(tmp_path / "t", ["numpy", "mpi4py", "torch"], mpiexec="HYDRA"),
    }
    everyone = "dpsim mpich-single mpich-multiple openmpi-single openmpi-multiple gloo gloo-free"
    assert names(AllreduceBench(peer_envs=envs)) == everyone.split()
    assert names(AllreduceBench(peer_envs=envs, peers=())) == ["dpsim"]
    assert names(AllreduceBench(peer_envs=envs, peers=("openmpi",))) == ["dpsim", "openmpi-single", "openmpi-multiple"]
    assert names(AllreduceBench(peer_envs=envs, peers=("gloo",))) == ["dpsim", "gloo", "gloo-free"]
    assert names(AllreduceBench(devices=64, peers=("mpi",))) == ["dpsim", "mpich-multiple", "mpich-multiple-throttled"]
    for modules in (["mpi4py"], ["numpy"]):
        with pytest.raises(ConfigError, match="of what a peer needs"):
            names(AllreduceBench(peer_envs={"x": environment_with(tmp_path / str(modules), modules)}))


def test_a_peer_that_does_not_start_is_left_out_with_a_warning_unless_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"max_bytes": 4, "budget_s": 0.01, "algorithms": ("two-shot",)}
    envs = {"bad": environment_with(tmp_path / "bad", ["numpy", "mpi4py"], mpiexec="HYDRA")}
    with pytest.raises(CommunicationError, match="bad-single ended with exit code 3: broken"):
        measure.measure(AllreduceBench(peer_envs=envs, peers=("bad",), **asked), lambda _: None)  # type: ignore[arg-type]
    two = systems.systems(AllreduceBench(peer_envs=envs, peers=("bad",)))[:2]
    monkeypatch.setattr(measure, "systems", lambda _: two)
    printed: list[str] = []
    actual = measure.measure(AllreduceBench(**asked), printed.append)  # type: ignore[arg-type]
    assert [system.name for system in actual.systems] == ["dpsim"]
    assert any(text.startswith("warning: bad-single takes no part") for text in printed)


# On ranks.


def run_json(dpsim: Dpsim, *more: str | Path) -> dict[str, Any]:
    code, out, err = dpsim("bench", "allreduce", "--json", "--budget", "10ms", *more)
    assert code == 0, err
    printed: dict[str, Any] = json.loads(out)
    assert (printed["schema"], printed["command"]) == ("dpsim.output/1", "bench allreduce")
    return printed


@pytest.mark.slow
def test_every_algorithm_and_the_installed_mpi_at_two_ranks_with_record_report_and_figure(
    dpsim: Dpsim, tmp_path: Path
) -> None:
    folder, plot = tmp_path / "report", tmp_path / "plot.svg"
    more = ("--min", "4B", "--max", "256KiB", "--factor", "65536", "--peers", "mpi", "--output", folder, "--plot", plot)
    printed = run_json(dpsim, *more)
    assert all(point.keys() == columns_of(BenchPoint).keys() for point in printed["points"])
    assert not any(point["wrong"] for point in printed["points"]) and printed["summary"]["wrong"] == 0
    actual = {(p["system"], p["algorithm"], p["size_bytes"]) for p in printed["points"]}
    assert {("dpsim", name, 4) for name in bench_algorithms("cpu")} <= actual
    assert {("dpsim", name, 2**18) for name in bench_algorithms("cpu") if name != "one-shot"} <= actual
    assert {system for system, _, _ in actual} == {"dpsim", "mpich-single", "mpich-multiple"}
    kinds = {(p["in_place"], p["cached"]) for p in printed["points"] if p["algorithm"] == "two-shot"}
    assert len(kinds) == 4
    assert {size["default"] for size in printed["summary"]["sizes"]} <= {"one-shot", "two-shot"}  # as measured here
    assert all(size["best_mpi"]["ratio"] > 0 for size in printed["summary"]["sizes"])
    files = {"allreduce.json", "index.html", "report.md", "bandwidth.svg", "bandwidth.png"}
    assert plot.read_text().startswith("<?xml") and {p.name for p in folder.iterdir()} == files
    kept = bench.read(folder / bench.RECORD)
    assert all(series.rounds_ns for series in kept.series)
    again = dpsim("report", folder, "--output", tmp_path / "again", "--json")
    assert json.loads(again[1])["points"] == printed["points"]
    assert (tmp_path / "again" / "report.md").read_text() == (folder / "report.md").read_text()


@pytest.mark.parametrize("devices", [3, 4])
def test_more_ranks_than_cores_are_right_and_come_to_an_end(devices: int, dpsim: Dpsim) -> None:
    more = "--max 8KiB --factor 1024 --peers none --algorithm two-shot,ring,direct --dtype float64"
    printed = run_json(dpsim, "--devices", str(devices), *more.split())
    assert {(p["devices"], p["wrong"], p["dtype"]) for p in printed["points"]} == {(devices, 0, "float64")}
    assert {p["algorithm"] for p in printed["points"]} >= {"two-shot", "ring", "direct"}


_OWN = """
def star(t, data):
    parts = [data.copy() for _ in range(t.size)]
    if t.rank == 0:
        yield [t.receive(parts[rank], rank) for rank in range(1, t.size)]
        data += sum(parts[1:])
        yield [t.send(data, rank) for rank in range(1, t.size)]
    else:
        yield [t.send(data, 0)]
        yield [t.receive(data, 0)]


def forgets_to_add(t, data):
    yield from ()


def waits_forever(t, data):
    yield [t.receive(data, (t.rank + 1) % t.size)]
"""


def test_a_users_own_allreduce_is_checked_and_timed_beside_dpsims_own(dpsim: Dpsim, tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(_OWN)
    more = ("--max", "4B", "--peers", "none", "--output", tmp_path / "report", "--algorithm")
    printed = run_json(dpsim, "--devices", "3", *more, f"{file}:star,direct")
    timed = {(p["algorithm"], p["wrong"]) for p in printed["points"] if p["time_s"]}
    assert timed >= {("own.py:star", 0), ("direct", 0)}
    page = (tmp_path / "report" / "report.md").read_text()
    assert "The default algorithm at each size" in page and "best MPI" not in page
    assert "Compared with the peers" not in page  # the title of the table of ratios
    kept = (tmp_path / "report" / bench.RECORD).read_text()
    assert (
        str(tmp_path) not in kept
        and bench.read(tmp_path / "report" / bench.RECORD).bench.algorithms[0] == "own.py:star"
    )
    code, out, _ = dpsim("bench", "allreduce", "--budget", "10ms", *more, f"{file}:forgets_to_add")
    assert code == 1 and "elements were not the sum (dpsim own.py:forgets_to_add)" in out
    assert "correct the function" in out


@pytest.mark.slow
def test_a_users_own_allreduce_that_waits_forever_is_named(dpsim: Dpsim, tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(_OWN)
    more = ("--max", "4B", "--peers", "none", "--algorithm")
    code, _, err = dpsim("bench", "allreduce", *more, f"{file}:waits_forever")
    assert code != 0 and re.search(
        r"own.py:waits_forever of 4 B has not ended after \d+ s: rank \d of 2 waits in its"
        r" round 1",
        err,
    )


@pytest.mark.parametrize(
    ("algorithm", "more", "given", "to_do"),
    [
        ("nowhere.py:star", "", "algorithm 'nowhere.py:star': there is no such file", "docs/extend.md"),
        ("own.py", "", "own.py has no function 'allreduce'", "own.py:FUNCTION"),
        ("own.py:star,own.py:star", "", "two algorithms are called own.py:star", "rename"),
        ("own.py:star", "--backend cuda", "own.py:star on backend cuda", "leave --backend cuda out"),
    ],
)
def test_an_allreduce_of_ones_own_that_cannot_run_is_refused(
    algorithm: str, more: str, given: str, to_do: str, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(_OWN)
    code, out, err = dpsim("bench", "allreduce", "--algorithm", algorithm, *more.split())
    assert (code, out) == (2, "") and given in err and to_do in err


# The page.


def test_the_page_takes_its_fractions_from_a_record(tmp_path: Path) -> None:
    codec.write(tmp_path / bench.RECORD, record(*FULL))
    heads, _, *rows = results_page.ladder(tmp_path / bench.RECORD).splitlines()
    assert heads.endswith("of the bound, 1 MiB, n = 4 |")
    assert [row.split(" | ")[:2] for row in rows] == [[f"| `{v.name}`", v.backend] for v in versions()]
    (row,) = [row for row in rows if row.startswith("| `two-shot` | cpu")]
    assert row.endswith("| 80.0% |")


def test_between_hosts_each_is_a_share_of_the_line_and_every_mpi_competes() -> None:
    bench = {"network": "shaped:4x200mbit+slow-host=50%", "min_bytes": 2**20, "max_bytes": 2**20}
    of_hosts = (
        series("dpsim", "auto", [[250e3], [252e3]], default=True),
        series("dpsim", "auto", [[250e3], [252e3]], repeat=1, default=True),
        series("dpsim", "mpi", [[240e3], [242e3]]),
        series("mpich-single", "mpi", [[300e3], [300e3]]),
        series("mpich-multiple", "mpi-persistent", [[260e3], [260e3]]),
    )
    actual = result(
        codec.decode(codec.to_builtins(record(*of_hosts)) | {"bench": bench | {"devices": 4}}, BenchRecord, "x")
    )
    line_s = 2 * 3 / 4 * 2**20 / (100e6 / 8)
    assert [point.fraction_of_bound for point in actual.points] == [
        pytest.approx(line_s / time_s) for time_s in (0.251, 0.241, 0.3, 0.26)
    ]
    (size,) = actual.sizes
    assert size.bound_s == pytest.approx(line_s) and size.default == "auto"
    assert size.best_mpi is not None and size.best_mpi.system == "dpsim"
    assert size.best_mpi.ratio == pytest.approx(0.241 / 0.251, rel=1e-3)
    assert [ratio.peer for ratio in size.peers] == ["mpich"]
    shown = line_table(actual)
    cells = dict(zip([column.head for column in shown.columns], shown.sections[0].rows[0], strict=True))
    assert (cells["auto / best MPI (95%)"][:4], cells["best MPI"]) == ("1.04", "dpsim")
    assert [cells[name] for name in ("auto", "mpi", "mpich-multiple")] == ["50.1%", "52.2%", "48.4%"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="shaped hosts need root and tc")
def test_between_shaped_hosts_auto_and_the_line_stand_in_one_table(dpsim: Dpsim) -> None:
    more = "--network shaped:2x5mbit --max 4KiB --factor 1024 --peers none --algorithm ring --budget 1s --json"
    code, out, err = dpsim("bench", "allreduce", *more.split())
    assert code == 0, err
    printed = json.loads(out)
    assert {row["algorithm"] for row in printed["points"]} == {"auto", "ring"}
    assert [size["bound_s"] for size in printed["summary"]["sizes"]] == [
        pytest.approx(size * 8 / 5e6) for size in (4, 4096)
    ]
