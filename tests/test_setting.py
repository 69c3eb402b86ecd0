"""Settings and grids: every combination once, written as a user writes it; what is impossible is refused by name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_step import workload

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.fields import assigned
from dpsim.harness.sweep.questions import compared, completed, group_name
from dpsim.machine import Link, Machine
from dpsim.model.points import plan_one
from dpsim.plan import Plan
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.sweep import Experiment
from dpsim.setting import FIELDS, Grid, Setting, setting_of, settings_of

SMALL: dict[str, Any] = {"model": "mlp:8", "global_batch": 64}
VALUES = {
    "devices": st.sampled_from([1, 2, 4, "2x2"]),
    "global_batch": st.integers(8, 64),
    "algorithm": st.sampled_from(["ring", "direct", "halving-doubling"]),
    "overlap": st.sampled_from(["off", "poll", "auto"]),
    "fusion_threshold_bytes": st.sampled_from([0, 4096.0, math.inf, "64KiB"]),
}
AXES = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(values, min_size=1, max_size=3, unique=True).map(tuple) for name, values in VALUES.items()
    },
)


@given(AXES)
def test_a_grid_has_every_combination_once_and_is_the_same_when_read_again(axes: dict[str, tuple[Any, ...]]) -> None:
    experiment = Experiment(base={"model": "mlp:8"}, axes=axes)
    assert len(experiment.rows) == math.prod(map(len, axes.values()))
    assert all(experiment.values(name) == values for name, values in axes.items())
    assert {name for name, values in axes.items() if len(values) > 1} == {*experiment.varied}
    assert codec.decode(codec.to_builtins(experiment), Experiment, "experiment") == experiment


@given(AXES, st.sampled_from(sorted(VALUES)), st.integers(1, 3))
def test_a_changed_field_has_the_new_values_and_the_others_keep_theirs(
    axes: dict[str, tuple[Any, ...]], name: str, count: int
) -> None:
    grid, given_values = Grid(axes=axes), tuple(range(count))
    after = grid.changed(**{name: given_values})
    assert after.values(name) == given_values
    assert all(after.values(other) == values for other, values in axes.items() if other != name)
    assert grid.changed(**{name: None}).values(name) == ()


def test_cases_change_together_and_the_last_axis_varies_fastest() -> None:
    cases = ({"network": "node", "algorithm": "direct"}, {"network": "paced:1us,1gbit", "algorithm": "ring"})
    grid = Grid(base=SMALL, cases=cases, axes={"devices": (1, 2), "overlap": ("off", "poll")})
    rows = [(row["network"], row["algorithm"], row["devices"], row["overlap"]) for row in grid.rows]
    assert rows[:3] == [("node", "direct", 1, "off"), ("node", "direct", 1, "poll"), ("node", "direct", 2, "off")]
    assert len(rows) == 8 and rows[4][:2] == ("paced:1us,1gbit", "ring")
    assert grid.varied == ("network", "algorithm", "devices", "overlap")


def test_a_row_is_read_as_a_user_writes_it() -> None:
    setting = setting_of({"model": "mlp:8", "devices": "2x2", "local_batch": 8, "fusion_threshold_bytes": "64KiB"})
    assert setting.plan == Plan(devices=4, layout="2x2", global_batch=32, fusion_threshold_bytes=65536.0)
    assert setting.devices_token == "2x2" and setting.text("fusion_threshold_bytes") == "64 KiB"
    paced = setting_of(SMALL | {"network": "paced:1us,1gbit", "leaves": 8, "overlap": "auto"})
    assert (paced.plan.algorithm, paced.plan.batch_norm, paced.plan.overlap) == ("ring", "leaf", "off")
    adamw = setting_of(SMALL | {"optimizer": {"kind": "adamw", "learning_rate": 0.5}})
    assert adamw.text("optimizer") == "AdamW"


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": 4, "strategy": "pipeline:stages=2", "accumulate": 2},
        {"devices": 4, "strategy": "pipeline:stages=2"},
        {"devices": 4, "accumulate": 2},
        {"devices": "2x2", "strategy": "zero1", "accumulate": 3},
    ],
)
def test_a_local_batch_is_what_a_device_has_at_once_in_a_grid_in_a_prediction_and_in_a_sweeps_record(
    fields: dict[str, Any],
) -> None:
    of_grid = setting_of({"model": "mlp:8", "local_batch": 16, **fields})
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    settings = {name: value for name, value in fields.items() if name != "devices"}
    halves = tuple(msgspec.structs.replace(layer, output_bytes_per_sample=4) for layer in workload().layers)
    predicted, _ = plan_one(
        workload(layers=halves),
        Machine(name="m", link=link),
        Grid.of(devices=fields["devices"], local_batch=16, **settings),
    )
    assert of_grid.plan.local_batch == predicted.local_batch == 16
    assert of_grid.plan.global_batch == predicted.global_batch
    assert vars(ComparedPoint)["local_batch"].of(SimpleNamespace(setting=of_grid)) == 16


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"base": {"devises": 2}}, "did you mean 'devices'"),
        ({"axes": {"devices": ()}}, "devices is []"),
        ({"axes": {"devices": (2, 2)}}, "devices is [2, 2]"),
        ({"axes": {"fusion_threshold_bytes": ("1MiB", 1048576)}}, "is ['1MiB', 1048576]"),
        ({"axes": {"fusion_threshold_bytes": ("1024KiB", "1MiB")}}, "is ['1024KiB', '1MiB']"),
        (
            {"axes": {name: tuple(range(1, 101)) for name in ("devices", "global_batch", "leaves", "accumulate")}},
            "a grid of 100000000 settings",
        ),
        ({"base": {"devices": 2}, "axes": {"devices": (1, 2)}}, "devices is an axis"),
        ({"compared": ("speed",)}, "unknown field of a setting 'speed'"),
    ],
)
def test_a_grid_that_means_nothing_is_refused(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(**grid)
    assert message in str(caught.value)


def test_all_impossible_settings_are_named_at_once() -> None:
    axes = {"devices": (2, 8), "algorithm": ("ring", "mpi")}
    grid = Grid(base={"model": "mlp:8", "global_batch": 4, "network": "paced:1us,1gbit"}, axes=axes)
    with pytest.raises(ConfigError) as caught:
        settings_of(grid.rows)
    text = str(caught.value)
    assert text.startswith("3 of 4 settings are impossible")
    assert "devices 2, algorithm mpi" in text and "devices 8, algorithm ring; devices 8, algorithm mpi" in text
    assert "hides its messages" in text and "cannot feed 8 devices" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"global_batch": 8, "local_batch": 4}, "a local batch of 4 and a global batch of 8"),
        ({"global_batch": "many"}, "a setting with a wrong value"),
        ({"global_batch": 8, "optimizer": {"kind": "none"}}, "a setting with a wrong value"),
        ({"global_batch": 8, "fusion_threshold_bytes": "huge"}, "huge"),
        ({"global_batch": 8, "devices": "two"}, "devices is 'two'"),
    ],
)
def test_a_wrong_value_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setting_of(row)


def test_settings_with_the_same_training_differ_in_their_times_alone() -> None:
    plan = Plan(devices=2, global_batch=8)
    faster = msgspec.structs.replace(plan, algorithm="ring", overlap="poll", fusion_threshold_bytes=0.0)
    larger = msgspec.structs.replace(plan, global_batch=16)
    settings = [Setting(plan=each, model="mlp:8") for each in (plan, faster, larger)]
    assert settings[0].training == settings[1].training != settings[2].training
    assert settings[0].training != Setting(plan=plan, model="mlp:9").training


@pytest.mark.parametrize(
    ("axes", "chosen", "fields", "groups"),
    [
        (
            {"devices": (1, 2), "algorithm": ("ring", "direct")},
            (),
            ("algorithm",),
            {"node; 1 device", "node; 2 devices"},
        ),
        ({"devices": (1, 2), "global_batch": (64, 128)}, (), ("global_batch",), {"node; 1 device", "node; 2 devices"}),
        ({"devices": (1, 2)}, (), ("devices",), {"node"}),
        (
            {"devices": (1, 2), "algorithm": ("ring", "direct")},
            ("devices", "algorithm"),
            ("devices", "algorithm"),
            {"node"},
        ),
        ({"overlap": ("off", "poll"), "model": ("mlp:8", "mlp:9")}, (), ("overlap",), {"node; mlp:8", "node; mlp:9"}),
    ],
)
def test_only_settings_of_one_problem_are_compared(
    axes: dict[str, Any], chosen: tuple[str, ...], fields: tuple[str, ...], groups: set[str]
) -> None:
    base = {name: value for name, value in (SMALL | {"devices": 2}).items() if name not in axes}
    experiment = completed(Experiment(base=base, axes=axes, compared=chosen))
    assert compared(experiment) == fields
    assert {group_name(experiment, setting_of(row)) for row in experiment.rows} == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": SMALL | {"devices": 2}}, "has a single setting"),
        ({"base": SMALL, "axes": {"algorithm": ("ring", "direct")}}, "a sweep on one device"),
        ({"base": SMALL | {"devices": 2}, "axes": {"overlap": ("off", "all")}}, "overlap all in a sweep over settings"),
        ({"base": {"devices": 2}, "axes": {"overlap": ("off", "poll")}}, "a setting without a batch"),
        ({"base": {"devices": 2}, "axes": {"global_batch": (64, 5000)}}, "a global batch of 5000 samples"),
        ({"question": "why", "base": SMALL}, "unknown question 'why'"),
        (
            {"question": "devices", "base": {"model": "mlp:8"}, "axes": {"devices": (1, 2), "global_batch": (64, 128)}},
            "global_batch has several values",
        ),
    ],
)
def test_a_question_that_a_grid_cannot_answer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        completed(Experiment(**changes))


def test_the_questions_read_thresholds_with_their_unit_and_refuse_what_is_no_number() -> None:
    axes = {"devices": (1, 2), "fusion_threshold_bytes": ("64KiB", 0, "inf")}
    swept = completed(Experiment(question="fusion-threshold", base=SMALL, axes=axes))
    assert swept.values("fusion_threshold_bytes") == (0, 65536.0, math.inf)
    for field, value in (("global_batch", "many"), ("accumulate", "two")):
        with pytest.raises(ConfigError, match="a setting with a wrong value"):
            completed(Experiment(base=SMALL | {field: value}, axes={"devices": (1, 2)}))


def test_a_sweep_leaves_a_threshold_unset_where_the_default_makes_other_buckets() -> None:
    """DDP's first bucket closes at 1 MiB where no cap is set, and at the cap where one is."""
    for rule, expected in (("ddp", {None}), ("tarantella", {32.0 * 2**10})):
        experiment = Experiment(question="devices", base=SMALL | {"fusion_rule": rule}, axes={"devices": (1, 2)})
        settings = settings_of(completed(experiment).rows)
        assert {setting.plan.fusion_threshold_bytes for setting in settings} == expected


def test_every_field_of_a_plan_may_vary() -> None:
    assert {*Plan.__struct_fields__} <= {*FIELDS}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("overlap=poll,off,leaves=4", {"overlap": "poll,off", "leaves": "4"}),
        ("strategy=pipeline:stages=2,order=1f1b,leaves=4", {"strategy": "pipeline:stages=2,order=1f1b", "leaves": "4"}),
        ("network=node,paced:50us,1gbit", {"network": "node,paced:50us,1gbit"}),
        (" leaves = 4 ", {"leaves": "4"}),
    ],
)
def test_assigned_fields_have_lists_and_settings_of_their_own(text: str, values: dict[str, str]) -> None:
    assert assigned([text], "--set", FIELDS) == values
