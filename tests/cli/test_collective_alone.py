"""``dpsim predict --collective``: prices of collectives alone, from a machine file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim import codec
from dpsim.collective import Collective, Layout
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model.alone import KINDS, predict_alone
from dpsim.model.cost import cost
from dpsim.model.defaults import for_prediction
from dpsim.model.interval import predict
from dpsim.model.message import message
from dpsim.plan import Plan

Dpsim = Callable[..., tuple[int, str, str]]
TABLE = AllreduceCost(
    algorithm="nccl",
    devices=8,
    layout=Layout("1x8"),
    sizes_bytes=(1 << 20, 1 << 26, 1 << 30),
    time_s=(5e-5, 6e-4, 8.2e-3),
)
MACHINE = Machine(name="tables and a link", allreduce=(TABLE,), link=Link(latency_s=5e-6, bandwidth_bytes_per_s=2e10))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    codec.write(path, MACHINE)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "algorithm"), [("1x8", "nccl"), ("1x4", "nccl"), ("2x8", "ring")])
@pytest.mark.parametrize("size", [4096, 1 << 26, 1 << 31])
def test_a_collective_alone_costs_what_steps_are_charged_for_it(
    kind: str, layout: str, algorithm: str, size: int
) -> None:
    known = for_prediction(message(size), MACHINE)
    at = Layout(layout)
    collective = Collective(kind=kind, algorithm=algorithm, devices=at.nodes * at.of_a_node, layout=at)  # type: ignore[arg-type]
    alone = predict_alone(known, collective, size)
    assert (alone.seconds, alone.extrapolated) == cost(known, collective, size)
    assert 0 < alone.low_s < alone.seconds < alone.high_s
    if kind == "allreduce":
        plan = Plan(
            devices=collective.devices, layout=layout, global_batch=1024, fusion_rule="one", algorithm=algorithm
        )
        step = predict(message(size), known, plan)
        assert (step.step_s, step.low_s, step.high_s) == pytest.approx((alone.seconds, alone.low_s, alone.high_s))


def test_lists_make_every_combination_and_a_table_comes_back(dpsim: Dpsim, machine: Path) -> None:
    lists = ("--collective", "allreduce,broadcast", "--size", "1MiB,64MiB,1GiB", "--devices", "1x8,2x8")
    code, out, err = dpsim("predict", *lists, "--machine", machine, "--algorithm", "nccl,ring", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert len({tuple(map(str, point.values())) for point in shown["points"]}) == len(shown["points"]) == 2 * 3 * 2 * 2
    of_table = [
        point
        for point in shown["points"]
        if (point["collective"], point["layout"], point["algorithm"]) == ("allreduce", "1x8", "nccl")
    ]
    assert [point["predicted_s"] for point in of_table] == list(TABLE.time_s)
    assert {(point["rests_on"], point["extrapolated"]) for point in of_table} == {("its table", False)}
    for point in of_table:
        assert point["algbw_bytes_per_s"] == pytest.approx(point["size_bytes"] / point["predicted_s"])
        assert point["busbw_bytes_per_s"] == pytest.approx(2 * 7 / 8 * point["algbw_bytes_per_s"])
    assert shown["summary"]["interval_level"] is None and shown["summary"]["interval_clusters"] > 0


def test_the_table_says_what_prices_it_and_the_plot_is_drawn(dpsim: Dpsim, machine: Path, tmp_path: Path) -> None:
    at = ("--collective", "allreduce", "--size", "1MiB,64MiB", "--devices", "1x8,1x4", "--algorithm", "nccl")
    code, out, err = dpsim("predict", *at, "--machine", machine, "--plot", tmp_path / "alone.svg")
    assert code == 0, err
    assert "its table" in out and "tables of 1x8" in out and "the intervals are 90% by assumption" in out
    assert (tmp_path / "alone.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--size 1MiB --devices 8 --machine {m}", "without --collective"),
        ("--collective allreduce --devices 8 --machine {m}", "without --size"),
        ("--collective allreduce --size 1MiB --devices 8", "without --machine"),
        ("--collective allredcue --size 1MiB --devices 8 --machine {m}", "did you mean 'allreduce'"),
        ("--collective allreduce --size 0 --devices 8 --machine {m}", "--size 0"),
        ("--collective allreduce --size 6 --devices 8 --machine {m}", "whole float32 numbers"),
        ("--collective allreduce --size inf --devices 8 --machine {m}", "--size inf"),
        ("--collective allreduce --size 1MiB --devices 1 --machine {m}", "2 devices or more"),
        ("--collective allreduce --size 1MiB --devices 8 --machine {m} --find bandwidth", "--collective and --find"),
        ("--collective allreduce --size 1MiB --devices 8 --machine {m} --local-batch 4", "and --local-batch"),
        ("--collective allreduce --size 1MiB --devices 8 --machine {m} --workload w.json", "and --workload"),
    ],
)
def test_what_says_nothing_of_a_collective_alone_is_refused(dpsim: Dpsim, machine: Path, flags: str, said: str) -> None:
    code, out, err = dpsim("predict", *flags.format(m=machine).split())
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
