"""Predictions of fixed inputs change only with ``MODEL_VERSION``, which records state beside their predictions.

After a change that alters predicted numbers: raise ``dpsim.model.version.MODEL_VERSION``, then run this file as a
program, which writes the table again.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dpsim import codec
from dpsim.experiments.bench_predict import machine as shared_memory
from dpsim.experiments.bench_predict import resnet50
from dpsim.machine import SCHEMA as MACHINE
from dpsim.machine import Machine
from dpsim.machine_library import library
from dpsim.model import memory, nulls, predict
from dpsim.model.version import MODEL_VERSION
from dpsim.plan import Plan
from dpsim.workload import SCHEMA as WORKLOAD
from dpsim.workload import Workload

TABLE = Path(__file__).with_name("predictions_of_model.json")
MACHINES = Path(__file__).parents[2] / "experiments" / "machines"
STRATEGIES = ("data-parallel", "zero1", "zero2", "zero3")


def cases() -> Iterator[tuple[str, Workload, Machine, Plan]]:
    googlenet = codec.read(MACHINES / "googlenet_k80.toml", Workload, "workload", WORKLOAD)
    k80 = codec.read(MACHINES / "k80_10gbe.toml", Machine, "machine", MACHINE)
    hdr = codec.read(library()["hdr-ib"], Machine, "machine", MACHINE)
    nvlink = codec.read(library()["nvlink4-8gpu"], Machine, "machine", MACHINE)
    rules = ("tarantella", "horovod", "ddp", "capped", "per-tensor", "one", "mg-wfbp")
    for rule, overlap, devices in itertools.product(rules, ("off", "inline", "poll", "thread"), (1, 4)):
        if (rule, overlap) not in (("horovod", "off"), ("horovod", "inline")):
            plan = Plan(devices=devices, global_batch=32 * devices, fusion_rule=rule, algorithm="ring", overlap=overlap)
            yield f"googlenet on k80: {rule}, {overlap}, {devices}", googlenet, k80, plan
    for algorithm, layout in itertools.product(("ring", "hierarchical", "mpi"), ("2x8", "16x8")):
        devices = math.prod(map(int, layout.split("x")))
        plan = Plan(devices=devices, layout=layout, global_batch=32 * devices, algorithm=algorithm, overlap="thread")
        yield f"resnet50 on hdr: {algorithm}, {layout}", resnet50(), hdr, plan
    for strategy, overlap in itertools.product(STRATEGIES, ("off", "thread")):
        plan = Plan(devices=8, global_batch=256, algorithm="ring", overlap=overlap, strategy=strategy)
        yield f"resnet50 on nvlink: {strategy}, {overlap}", resnet50(), nvlink, plan
    plan = Plan(devices=8, global_batch=512, algorithm="ring", accumulate=2, strategy="pipeline")
    layers = tuple(msgspec.structs.replace(each, output_bytes_per_sample=4096.0) for each in resnet50().layers)
    yield "resnet50 on nvlink: pipeline", msgspec.structs.replace(resnet50(), layers=layers), nvlink, plan
    shaped = msgspec.structs.replace(k80, network="shaped:4x200mbit+slow-host=50%")
    yield "googlenet on uneven links", googlenet, shaped, Plan(devices=4, global_batch=128, algorithm="ring")
    yield "resnet50 on tables", resnet50(), shared_memory(), Plan(devices=8, global_batch=256, overlap="thread")


def predicted() -> dict[str, list[float]]:
    """Return step, exposed communication, interval, memory and the nulls' steps of each case."""
    rows = {}
    for name, workload, machine, plan in cases():
        step = predict(workload, machine, plan)
        of_nulls = nulls(workload, machine, plan)
        needed = float(memory(workload, plan, machine).total)
        values = [step.step_s, step.exposed_communication_s, step.low_s, step.high_s, needed]
        rows[name] = codec.rounded([*values, *(of_nulls[null][0] for null in sorted(of_nulls))])
    return rows


def differing(stated: dict[str, list[float]], today: dict[str, list[float]]) -> list[str]:
    """Return the names of the cases that both have, and whose predictions differ in more than a last digit."""
    close = {
        name: len(stated[name]) == len(today[name])
        and all(
            math.isclose(*pair, rel_tol=1e-8, abs_tol=1e-14) for pair in zip(stated[name], today[name], strict=True)
        )
        for name in stated
        if name in today
    }
    return [name for name, same in close.items() if not same]


def test_predictions_change_only_with_the_version_of_the_model() -> None:
    table = codec.read_raw(TABLE, "table")
    assert table["model_version"] == MODEL_VERSION, "run this file as a program: it writes the table of the new version"
    today = predicted()
    assert table["predictions"].keys() == today.keys()
    assert differing(table["predictions"], today) == [], "raise MODEL_VERSION, then run this file as a program"


def test_a_prediction_that_moved_in_its_seventh_digit_is_seen() -> None:
    stated = {"a": [1.0, 2e-6], "b": [3.0]}
    assert differing(stated, {"a": [1.0, 2.0000002e-6], "b": [3.0]}) == ["a"]
    assert differing(stated, {"a": [1.0 + 1e-12, 2e-6], "b": [3.0], "new": [1.0]}) == []


@pytest.mark.parametrize(
    ("value", "expected"), [(0.1 + 0.2, 0.3), (1234567890.4, 1234567890.0), (3e-17, 0.0), (-2e-9, -2e-9), (7, 7)]
)
def test_hashed_numbers_have_nine_digits(value: float, expected: float) -> None:
    assert codec.rounded({"a": [value]}) == {"a": [expected]}


if __name__ == "__main__":
    before = codec.read_raw(TABLE, "table") if TABLE.exists() else {"model_version": 0, "predictions": {}}
    now = predicted()
    changed = differing(before["predictions"], now)
    if changed and before["model_version"] == MODEL_VERSION:
        sys.exit(f"raise MODEL_VERSION first: other predictions of {', '.join(changed)}")
    codec.write(TABLE, {"model_version": MODEL_VERSION, "predictions": now})
