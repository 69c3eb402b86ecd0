"""What fields decide: identities follow from the declarations, and no configuration is taken for another one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec.structs import replace

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.fields import Decides, deciding, declared, shared
from dpsim.harness.sweep.compare import _trains
from dpsim.harness.sweep.questions import completed
from dpsim.optimizer import AdamW
from dpsim.plan import Plan
from dpsim.records.reproduce import Reproduction, plan_name
from dpsim.records.sweep import Experiment
from dpsim.records.train import RECORDED, TrainConfig, TrainRecord, deciding_fields
from dpsim.setting import FIELDS, Setting
from dpsim.study.inputs import calibration_kind, profile_kind

PLAN = Plan(devices=2, global_batch=64, fusion_threshold_bytes=0.0)
OTHER: dict[str, Any] = {
    "devices": 4,
    "global_batch": 32,
    "accumulate": 2,
    "fusion_rule": "ddp",
    "fusion_threshold_bytes": 1024.0,
    "cycle_s": 5e-3,
    "algorithm": "ring",
    "overlap": "thread",
    "batch_norm": "global",
    "optimizer": AdamW(),
    "wire_dtype": "bfloat16",
    "strategy": "zero1",
    "layout": "2x1",
    "leaves": 8,
    "compute_dtype": "bfloat16",
}
"""Another value of every field of a plan."""


def changed(name: str) -> Setting:
    plan = replace(PLAN, **{name: OTHER[name]} | ({"batch_norm": "leaf"} if name == "leaves" else {}))
    return Setting(plan=plan, model="cnn")


class Declared(Noun, frozen=True):
    devices: int
    colour: Annotated[str, Decides.BITS] = "red"


class Undeclared(Noun, frozen=True):
    colour: str = "red"


def test_every_field_of_a_plan_has_another_value_here() -> None:
    assert set(OTHER) == set(Plan.__struct_fields__)


def test_a_field_declares_what_it_decides_itself_or_as_another_struct_does() -> None:
    assert declared(Declared, Plan) == {"devices": declared(Plan)["devices"], "colour": Decides.BITS}
    assert deciding(Decides.BITS | Decides.ORDER, Declared, Plan) == ("colour",)
    with pytest.raises(TypeError, match=r"Undeclared\.colour does not declare"):
        declared(Undeclared, Plan)


@pytest.mark.parametrize("name", Plan.__struct_fields__)
def test_identities_change_with_the_fields_that_decide_them_and_with_no_other(name: str) -> None:
    first, other = Setting(plan=PLAN, model="cnn"), changed(name)
    decides = declared(Plan)[name]
    assert (first.training != other.training) == bool(decides & (Decides.BITS | Decides.SHARES))
    assert (profile_kind(first) != profile_kind(other)) == bool(decides & Decides.COMPUTE_TIME)
    assert (calibration_kind(first) != calibration_kind(other)) == bool(decides & Decides.NETWORK_TIME)


@pytest.mark.parametrize("name", Plan.__struct_fields__)
def test_a_configuration_of_training_passes_every_field_on_to_its_plan(name: str) -> None:
    fields = {"devices": 4, "layout": "2x2"} if name == "layout" else {name: OTHER[name]}
    config = TrainConfig.of(**fields)
    assert getattr(config.plan, name) == fields[name]


@pytest.mark.parametrize("name", [name for name in Plan.__struct_fields__ if name not in ("devices", "layout")])
def test_a_reproduction_trains_with_every_field(name: str) -> None:
    plural = {"fusion_threshold_bytes": "fusion_thresholds_bytes", "strategy": "strategies"}
    several = plural.get(name, f"{name}s")
    value = (OTHER[name],) if several in Reproduction.__struct_fields__ else OTHER[name]
    field = several if several in Reproduction.__struct_fields__ else name
    reproduction = Reproduction(**{"devices": (2,), field: value})
    *_, last = reproduction.plans()
    assert getattr(last, name) == OTHER[name]


def test_the_saved_result_of_a_training_identifies_the_training() -> None:
    decisive = deciding_fields(Decides.BITS | Decides.SHARES | Decides.ORDER)
    assert {*decisive} - {*RECORDED, *TrainRecord.__struct_fields__} == {"selection", "backend"}  # see ``libraries``


@pytest.mark.parametrize("name", Plan.__struct_fields__)
def test_divergence_is_joined_to_the_training_that_has_it_and_to_no_other(name: str) -> None:
    assert _trains("cnn", PLAN, Setting(plan=PLAN, model="cnn"))
    assert not _trains("cnn", PLAN, Setting(plan=PLAN, model="mlp"))
    assert not _trains("cnn", PLAN, changed(name))
    single = replace(PLAN, devices=1)
    fields = {name: OTHER[name]} | ({"batch_norm": "leaf"} if name == "leaves" else {})
    if name not in ("devices", "layout"):
        alone = Setting(plan=replace(PLAN, devices=1, **fields), model="cnn")
        decides = declared(Plan)[name]
        assert _trains("cnn", single, alone) != bool(decides & (Decides.BITS | Decides.SHARES))


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"model": ("cnn", "mlp")}, "model"),
        ({"wire_dtype": ("bfloat16", "float16")}, "wire_dtype"),
        ({"global_batch": (32, 64), "compute_dtype": ("float32", "bfloat16")}, "global_batch, compute_dtype"),
    ],
)
def test_a_sweep_that_measures_divergence_has_one_training(axes: dict[str, Any], named: str) -> None:
    base = {
        "model": "cnn",
        "network": "node",
        "devices": 2,
        "global_batch": 64,
        "algorithm": "direct",
        "overlap": "off",
    }
    experiment = Experiment(
        name="grid",
        question="settings",
        steps=20,
        base={name: value for name, value in base.items() if name not in axes},
        axes=axes,
    )
    with pytest.raises(ConfigError, match=f"in a sweep over {named}: these are several trainings"):
        completed(experiment)
    assert completed(replace(experiment, steps=0)).steps == 0


def test_micro_batches_are_compared_with_each_other_and_with_whole_shares() -> None:
    reproduction = Reproduction(devices=(1, 2), fusion_thresholds_bytes=(0.0,), accumulates=(1, 4))
    names = [plan_name(plan) for plan in reproduction.plans()]
    assert names == [
        "1 device",
        "1 device, 4 micro-batches",
        "2 devices, 0, auto, off",
        "2 devices, 0, auto, off, 4 micro-batches",
    ]


ROOT = Path(__file__).parents[1]
LISTS = {
    "harness/sweep/grids.py": 1,
    "harness/sweep/norms.py": 1,
    "harness/sweep/questions/settings.py": 1,
    "model/points.py": 1,
    "model/rows.py": 1,
    "report/sweep/charts.py": 1,
    "report/prediction.py": 2,
    "report/sweep/warnings.py": 1,
}
"""How many lists of three fields or more a module still has. These numbers only become smaller."""


def test_no_module_but_the_declarations_lists_fields_by_hand() -> None:
    for path in sorted((ROOT / "dpsim").rglob("*.py")):
        name = path.relative_to(ROOT / "dpsim").as_posix()
        if name.startswith(("experiments/", "kernels/")) or name in ("plan.py", "setting.py"):
            continue
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.List | ast.Tuple | ast.Set)
        ]
        words = [{each.value for each in node.elts if isinstance(each, ast.Constant)} for node in nodes]
        found = sum(len(each & FIELDS.keys()) >= 3 for each in words)
        assert found <= LISTS.get(name, 0), f"{name} lists fields of a plan or a setting by hand: derive the list"


def test_shared_fields_are_arguments() -> None:
    assert shared(PLAN, Declared) == {"devices": 2}
    assert msgspec.structs.replace(PLAN, **shared(PLAN, Plan)) == PLAN
