"""The engine of the what-if page against ``dpsim.predict``, in a real browser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import evaluated, needs_browser

import dpsim
from dpsim import codec, machine, workload
from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError
from dpsim.explore.page import engine
from dpsim.explore.world import world
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.machine import Machine
from dpsim.plan import OVERLAPS, Plan
from dpsim.predict.defaults import CERTAIN, for_prediction
from dpsim.predict.interval import predict
from dpsim.workload import Workload

ROOT = Path(__file__).parents[2]
FILES = ROOT / "dpsim" / "experiments" / "machines"
STRATEGIES = ("data-parallel", "zero1", "zero2", "zero2:buckets=4", "zero3", "zero3:prefetch=2,reshard=no", "zero3:prefetch=0")
SETTINGS = 200


def setting_of(plan: Plan, local_batch: int, **varied: float | None) -> dict[str, Any]:
    """A setting as the page has it."""
    strategy = {"name": plan.parallelism.name} | msgspec.structs.asdict(plan.parallelism)
    names = "devices accumulate fusion_rule fusion_threshold_bytes cycle_s algorithm overlap batch_norm"
    return {name: getattr(plan, name) for name in names.split()} | {
        "local_batch": local_batch,
        "devices_a_node": plan.devices_a_node if plan.layout else 0,
        "strategy": strategy,
        "latency_s": None,
        "bandwidth_bytes_per_s": None,
        "contention": None,
        **varied,
    }


def varied_machine(known: Machine, layout: str, varied: dict[str, float | None]) -> Machine:
    """The machine with the link and the contention of a setting: as with another machine file, or --contention."""
    changes = {name: value for name, value in varied.items() if name != "contention" and value is not None}
    if changes:
        field = "link_in_node" if layout.startswith("1x") and known.link_in_node else "link"
        link = msgspec.structs.replace(getattr(known, field), **changes)
        known = msgspec.structs.replace(known, allreduce=(), halves=(), overlap=(), **{field: link})
    if varied["contention"] is not None:
        known = msgspec.structs.replace(known, contention=varied["contention"], contention_uncertainty=CERTAIN)
    return known


def random_case(draw: random.Random, layers: Workload, known: Machine) -> tuple[dict[str, Any], Machine, Plan] | None:
    """A setting of the page with the plan and the machine that it stands for; None for one that is impossible."""
    devices = draw.choice([1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16, 24, 64, 100, 1000, 100_000])
    of_a_node = draw.choice([0, 0, 0, 1, 2, 4, 8])
    nodes, rest = divmod(devices, of_a_node) if of_a_node else (0, 0)
    layout = "" if not of_a_node else f"1x{devices}" if nodes == 0 else "" if rest else f"{nodes}x{of_a_node}"
    local_batch = draw.choice([1, 2, 7, 16, 64, 100, 256])
    rule, accumulate = draw.choice([*FUSION_RULES, "horovod"]), draw.choice([1, 1, 1, 2, 4])
    threshold = draw.choice([None, 0.0, 1000.0, 32768.0, 1e6, 25e6, float("inf")])
    varied: dict[str, float | None] = {"latency_s": None, "bandwidth_bytes_per_s": None, "contention": None}
    if known.link is not None and draw.random() < 0.5:
        varied["latency_s"] = draw.choice([None, 0.0, 1e-6, 5e-5])
        varied["bandwidth_bytes_per_s"] = draw.choice([None, 1e8, 1.25e9, 5e10])
    if draw.random() < 0.3:
        varied["contention"] = draw.choice([1.0, 2.5])
    table = draw.choice([each.algorithm for each in known.allreduce] or ["ring"])
    try:
        plan = Plan(
            devices=devices,
            layout=layout,
            global_batch=local_batch * accumulate * devices,
            accumulate=accumulate,
            fusion_rule=rule,
            fusion_threshold_bytes=threshold if rule in threshold_rules() else None,
            cycle_s=draw.choice([1e-3, 5e-3]),
            algorithm=draw.choice([table, *ALGORITHMS]),
            overlap=draw.choice(OVERLAPS),
            batch_norm=draw.choice(["local", "local", "local", "global"]),
            strategy="data-parallel" if rule == "horovod" else draw.choice(STRATEGIES),
        )
        prepared = for_prediction(layers, known, [devices])
        predict(layers, varied_machine(prepared, layout, varied), plan)
    except ConfigError:
        return None
    return setting_of(plan, local_batch, **varied), varied_machine(prepared, layout, varied), plan


def study(name: str) -> tuple[Workload, Machine]:
    """The last workload and machine that a committed study took with it."""
    raise NotImplementedError


def pairs() -> list[tuple[Workload, Machine]]:
    """Published workloads on links, on tables of other benchmarks, and on nodes with a link of their own."""
    googlenet = workload.read(FILES / "googlenet_k80.toml")
    resnet = workload.read(ROOT / "dpsim" / "validation" / "workloads" / "resnet50.toml")
    return [
        (googlenet, machine.read(FILES / "k80_10gbe.toml")),
        (googlenet, machine.read("10gbe")),
        (resnet, machine.read("nvlink3-8gpu+hdr-ib")),
        (resnet, machine.read(FILES / "ethernet_100gbit.toml")),
    ]


@needs_browser
def test_random_settings_are_predicted_as_by_python(tmp_path: Path) -> None:
    draw = random.Random(31)
    worlds = pairs()
    cases: list[dict[str, Any]] = []
    expected = []
    while len(cases) < SETTINGS:
        which = draw.randrange(len(worlds))
        layers, known = worlds[which]
        case = random_case(draw, layers, known)
        if case is None:
            continue
        setting, varied, plan = case
        prediction = predict(layers, varied, plan)
        cases.append({"world": which, "setting": setting})
        names = ("step_s", "low_s", "high_s", "exposed_communication_s", "communication_cost_s")
        expected.append([*(getattr(prediction, name) for name in names), prediction.buckets, prediction.extrapolated])
    given = codec.to_json({"worlds": [world(*each) for each in worlds], "cases": cases}, indent=None)
    script = engine() + f"""
    const given = JSON.parse({json.dumps(given)}, revived);
    return JSON.stringify(given.cases.map(({{world, setting}}) => {{
      try {{
        const it = predict(given.worlds[world], setting);
        return [it.step_s, it.low_s, it.high_s, it.exposed_s, it.cost_s, it.buckets.length, it.extrapolated];
      }} catch (error) {{ return error.stack; }}
    }}));"""
    answers = json.loads(evaluated(tmp_path, script))
    wrong, worst = [], 0.0
    for case, answer, right in zip(cases, answers, expected, strict=True):
        if isinstance(answer, str):
            wrong.append((case, answer, right)); continue
        errors = [abs(a - b) / max(right[0], 1e-12) for a, b in zip(answer, right)]
        worst = max(worst, *errors[:5])
        if max(errors[:5]) > 1e-6 or answer[5:] != right[5:]:
            wrong.append((case, answer, right))
    print(len(wrong), worst)
    for each in wrong[:8]: print(*each, sep="\n  ")
    assert not wrong
