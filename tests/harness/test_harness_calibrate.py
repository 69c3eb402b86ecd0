"""``calibrate`` on two ranks with a tiny budget: tables that a machine file may hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim import codec
from dpsim.collective import Layout
from dpsim.errors import ConfigError
from dpsim.machine import SCHEMA, Machine, Selection
from dpsim.model import collective_cost
from dpsim.study.calibration import CalibrateConfig, calibrate, devices_to_calibrate

TINY = {"max_bytes": 5000, "seconds": 0.3}


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def real() -> Machine:
    return calibrate(CalibrateConfig(algorithms=("mpi", "ring"), **TINY), quiet)  # type: ignore[arg-type]


def test_every_algorithm_and_mechanism_has_a_table(real: Machine) -> None:
    assert real.network == "node" and not real.emulated_network
    assert [(table.algorithm, table.devices) for table in real.allreduce] == [("mpi", 2), ("ring", 2)]
    combinations = set(itertools.product(("mpi", "ring"), ("poll", "thread")))
    assert {(table.algorithm, table.overlap) for table in real.overlap} == combinations


def test_a_link_is_fitted_to_the_tables_and_prices_what_they_do_not_cover(real: Machine) -> None:
    assert real.link is not None and real.link.fitted_to == "mpi on 2, ring on 2"
    assert 0 <= real.link.median_residual <= real.link.largest_residual
    cost, extrapolated = collective_cost(real, "ring", 8, 4096)
    assert extrapolated and cost > collective_cost(real, "ring", 2, 4096)[0] / 2


@pytest.mark.slow
def test_the_slowdown_of_computation_is_measured_beside_a_model_too() -> None:
    config = CalibrateConfig(model="mlp:8", local_batch=4, overlaps=(), **TINY)  # type: ignore[arg-type]
    assert [slowdown.devices for slowdown in calibrate(config, quiet).compute_slowdown] == [2]


def test_times_are_positive_and_sizes_ascend_to_the_largest(real: Machine) -> None:
    for table in (*real.allreduce, *real.overlap):
        assert list(table.sizes_bytes) == sorted(set(table.sizes_bytes))
        assert table.sizes_bytes[-1] == 5000
        assert len(table.time_s) == len(table.sizes_bytes) and all(0 < t < 1 for t in table.time_s)
    assert all(loss >= 0 for table in real.overlap for loss in table.compute_loss_s)
    (slowdown,) = real.compute_slowdown
    assert slowdown.devices == 2 and 0.1 < slowdown.factor < 100


def test_what_auto_takes_by_size_is_measured_and_stored(real: Machine) -> None:
    assert real.selection == () and real.selected(2) is None  # auto was not calibrated there
    actual = calibrate(CalibrateConfig(overlaps=(), **TINY), quiet)  # type: ignore[arg-type]
    (selection,) = actual.selection
    assert [table.algorithm for table in actual.allreduce] == ["auto"]
    assert selection == actual.selected(2) and selection.algorithms[-1] == "two-shot"
    assert codec.decode(codec.to_builtins(actual), Machine, "machine") == actual


def test_a_selection_says_what_is_taken_for_a_size() -> None:
    usual = Selection.usual(4)
    assert [usual.algorithm(size) for size in (0, 4096, 4097, 10**9)] == ["one-shot"] * 2 + ["two-shot"] * 2
    assert Selection.usual(2).algorithm(4) == "two-shot"
    with pytest.raises(ConfigError, match="one more than sizes"):
        Selection(devices=2, algorithms=("two-shot",))
    with pytest.raises(ConfigError, match="ascending"):
        Selection(devices=2, algorithms=("one-shot", "two-shot", "one-shot"), below_bytes=(10, 10))


def test_an_emulated_link_is_never_faster_than_it_says() -> None:
    config = CalibrateConfig(network="paced:300us,100mbit", algorithms=("ring",), overlaps=("thread",), **TINY)  # type: ignore[arg-type]
    machine = calibrate(config, quiet)
    assert machine.emulated_network
    for table in (machine.allreduce[0], machine.overlap[0]):
        for size, time_s in zip(table.sizes_bytes, table.time_s, strict=True):
            rounds = 1 if size == 4 else 2  # one element has one chunk, which goes there and back
            assert time_s >= rounds * (300e-6 + size / 2 / 12.5e6)


@pytest.mark.slow
def test_a_layout_has_tables_of_its_own_and_nothing_inside_a_node_is_held_to_the_link() -> None:
    config = CalibrateConfig(
        network="paced:300us,100mbit",
        devices=("2x1", "1x2"),
        algorithms=("hierarchical",),
        overlaps=("thread",),
        **TINY,  # type: ignore[arg-type]
    )
    machine = calibrate(config, quiet)
    assert [t.layout for t in machine.allreduce] == [t.layout for t in machine.overlap] == ["1x2", "2x1"]
    inside, across = machine.allreduce
    assert min(across.time_s) > 300e-6
    size = inside.sizes_bytes[-1]
    assert collective_cost(machine, "hierarchical", 2, size, layout=Layout("1x2")) == (inside.time_s[-1], False)
    assert collective_cost(machine, "hierarchical", 2, size, layout=Layout("2x1")) == (across.time_s[-1], False)
    links = machine.link, machine.link_in_node
    assert [link.fitted_to for link in links if link] == ["hierarchical on 2x1", "hierarchical on 1x2"]
    assert collective_cost(machine, "ring", 2, size, layout=Layout("1x2"))[1]


@pytest.mark.slow
def test_a_wire_dtype_has_tables_of_its_own_of_half_the_bytes() -> None:
    config = CalibrateConfig(
        network="paced:300us,3mbit",
        algorithms=("direct",),
        overlaps=("thread",),
        wire_dtype="float16",
        **TINY,  # type: ignore[arg-type]
    )
    machine = calibrate(config, quiet)
    (alone,), (beside,) = machine.allreduce, machine.overlap
    assert alone.wire_dtype == beside.wire_dtype == "float16"
    size, due_s = alone.sizes_bytes[-1], 2 * (300e-6 + 1250 / 375e3)
    assert (size, beside.sizes_bytes[-1]) == (5000, 5000)
    assert alone.time_s[-1] >= due_s
    assert collective_cost(machine, "direct", 2, size, "float16") == (alone.time_s[-1], False)


def test_a_machine_survives_the_way_through_its_file(real: Machine, tmp_path: Path) -> None:
    codec.write(tmp_path / "machine.json", real)
    assert codec.read(tmp_path / "machine.json", Machine, "machine", SCHEMA) == real


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": (1,)}, "at least one count above 1"),
        ({"devices": (2, "2x0")}, "devices is '2x0'"),
        ({"devices": (2,), "algorithms": ("hierarchical",)}, "on the flat layout 2"),
        ({"devices": (2, 2)}, "devices is [2, 2]"),
        ({"algorithms": ("ring", "ring")}, "algorithms is ['ring', 'ring']"),
        ({"network": "paced:50us,1gbit", "algorithms": ("mpi",)}, "hides its messages"),
        ({"overlaps": ("off",)}, "unknown overlap mechanism 'off'"),
        ({"wire_dtype": "float16", "algorithms": ("ring",)}, "cannot send float16"),
        ({"seconds": 0.0}, "seconds is 0"),
        ({"max_bytes": 1}, "max_bytes is 1"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        calibrate(CalibrateConfig(**given), quiet)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(("network", "algorithm"), [("node", "auto"), ("paced:300us,100mbit", "ring")])
def test_a_pipeline_has_a_table_of_messages_and_no_collectives_where_a_stage_has_one_device(
    network: str, algorithm: str
) -> None:
    config = CalibrateConfig(
        network=network,
        devices=(1,),
        sends=(2,),
        algorithms=(algorithm,),
        strategy="pipeline",
        slowdown=False,
        **TINY,  # type: ignore[arg-type]
    )
    machine = calibrate(config, quiet)
    assert (machine.allreduce, machine.overlap, machine.link) == ((), (), None)
    agreement, table = machine.halves
    assert (agreement.kind, agreement.devices) == ("ordered-sum", 2)
    assert (table.kind, table.devices, table.sizes_bytes[-1]) == ("send", 2, 5000)
    if machine.emulated_network:
        assert table.time_s[-1] >= 300e-6 + 5000 / 12.5e6


def test_what_is_calibrated_follows_from_the_strategy() -> None:
    assert devices_to_calibrate("zero1", (2, 4)) == {"devices": (2, 4)}
    stages = {"devices": ("2x2", 4, "1x2", 2), "sends": ("2x2", 4)}
    assert devices_to_calibrate("pipeline:stages=2", ("2x2", 4)) == stages
    config = CalibrateConfig(sends=("2x4", 2), devices=(1,), strategy="pipeline")
    assert config.neighbours() == {"": 1, "1x2": 1, "2x1": 4} and config.ranks == 8
    beside = {
        name: {each.collective.kind for each in CalibrateConfig(strategy=name).collectives() if each.overlap}
        for name in ("zero1", "zero3")
    }
    assert beside["zero3"] - beside["zero1"] == {"all-gather"}
    alone = {
        name: {each.collective.kind for each in CalibrateConfig(strategy=name).collectives()}
        for name in ("data-parallel", "zero1", "zero3")
    }
    assert alone["zero1"] - alone["data-parallel"] == {"reduce-scatter", "all-gather", "ordered-sum"}
    assert alone["zero3"] - alone["zero1"] == {"copy"}


@pytest.mark.slow
def test_the_command_measures_messages_for_a_pipeline(
    dpsim: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    output = tmp_path / "machine.json"
    code, out, err = dpsim(
        "calibrate", "--strategy", "pipeline", "--budget", "100ms", "--set", "overlap=poll", "--output", output
    )
    assert code == 0, err
    assert "send between 2 devices" in out
    machine = codec.read(output, Machine, "machine", SCHEMA)
    assert {table.kind for table in machine.halves} == {"send", "ordered-sum"} and machine.allreduce
