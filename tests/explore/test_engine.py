"""The engine of the what-if page against ``dpsim.model``, in a real browser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import evaluated, needs_browser

from dpsim import codec, machine, workload
from dpsim.algorithms import ALGORITHMS
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.explore.page import EXPLORED, engine, setting_of_strategy
from dpsim.explore.world import world
from dpsim.explore.written import DIVIDED, MICRO_BATCHES
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.machine import AllreduceCost, ComputeSlowdown, Link, Machine, Network, OverlapCost
from dpsim.model.defaults import CERTAIN, for_prediction
from dpsim.model.interval import predict
from dpsim.model.memory import Memory, memory
from dpsim.model.points import rows_of_plans
from dpsim.model.rows import best_of
from dpsim.model.step import Prediction
from dpsim.plan import OVERLAPS, Plan
from dpsim.records.sweep import read_predictions
from dpsim.strategy import parse_strategy
from dpsim.workload import Layer, Tensor, Workload

ROOT = Path(__file__).parents[2]
FILES = ROOT / "dpsim" / "experiments" / "machines"
STRATEGIES = (*EXPLORED, *DIVIDED, "zero2:buckets=4", "zero3:prefetch=2,reshard=no", "zero3:prefetch=0")
LOCAL_BATCHES = (1, 2, 7, 16, 64, 100, 256)
SETTINGS = 200


def setting_of(plan: Plan, local_batch: int, **varied: float | None) -> dict[str, Any]:
    """A setting as the page has it."""
    names = "devices accumulate fusion_rule fusion_threshold_bytes cycle_s algorithm overlap batch_norm"
    return {name: getattr(plan, name) for name in names.split()} | {
        "local_batch": local_batch,
        "devices_a_node": plan.devices_a_node if plan.layout else 0,
        "strategy": setting_of_strategy(plan.strategy),
        "latency_s": None,
        "bandwidth_bytes_per_s": None,
        "contention": None,
        **varied,
    }


def varied_machine(known: Machine, layout: str, varied: dict[str, float | None]) -> Machine:
    """The machine with the link and contention of a setting: as with another machine file, or --assume contention."""
    changes = {name: value for name, value in varied.items() if name != "contention" and value is not None}
    if changes:
        field = "link_in_node" if layout.startswith("1x") and known.link_in_node else "link"
        link = msgspec.structs.replace(getattr(known, field), **changes)
        known = msgspec.structs.replace(known, allreduce=(), halves=(), overlap=(), **{field: link})
        if known.emulated_network and (network := Network.parse(known.network)).emulated:
            paced = msgspec.structs.replace(network, **changes)
            token = f"paced:{paced.latency_s!r}s,{8 * paced.bandwidth_bytes_per_s!r}bit"
            known = msgspec.structs.replace(known, network=token)
    if varied["contention"] is not None:
        known = msgspec.structs.replace(known, contention=varied["contention"], contention_uncertainty=CERTAIN)
    return known


RULES = [rule for rule in FUSION_RULES if rule != "fsdp"]
"""Those of a page whose workload has no units of ``fully_shard``."""
Case = tuple[dict[str, Any], Prediction, Memory, dict[str, Any]]


def random_case(draw: random.Random, layers: Workload, known: Machine) -> Case | None:
    """A setting of the page, and what Python says of its step, memory and speedup; None for one that is impossible."""
    devices = draw.choice([1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16, 24, 64, 100, 1000, 100_000])
    of_a_node = draw.choice([0, 0, 0, 1, 2, 4, 8])
    nodes, rest = divmod(devices, of_a_node) if of_a_node else (0, 0)
    layout = "" if not of_a_node else f"1x{devices}" if nodes == 0 else "" if rest else f"{nodes}x{of_a_node}"
    local_batch, strategy = draw.choice(LOCAL_BATCHES), draw.choice(STRATEGIES)
    rule, accumulate = draw.choice([*RULES, "horovod"]), draw.choice([1, 1, 1, *MICRO_BATCHES])
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
            global_batch=local_batch * accumulate * (devices // parse_strategy(strategy).classes),
            accumulate=accumulate,
            fusion_rule=rule,
            fusion_threshold_bytes=threshold if rule in threshold_rules() else None,
            cycle_s=draw.choice([1e-3, 5e-3]),
            algorithm=draw.choice([table, *ALGORITHMS]),
            overlap=draw.choice(OVERLAPS),
            batch_norm=draw.choice(["local", "local", "local", "global"]),
            strategy=strategy,
        )
        of_setting = varied_machine(for_prediction(layers, known), layout, varied)
        predicted = predict(layers, of_setting, plan)
    except ConfigError:
        return None
    (best,) = best_of(rows_of_plans(layers, of_setting, [plan]))
    return setting_of(plan, local_batch, **varied), predicted, memory(layers, plan, of_setting), best


def studied(name: str) -> list[tuple[Workload, Machine]]:
    """What a committed study profiled and calibrated: tables of all overlaps, and of halves of allreduces."""
    known = read_predictions(ROOT / "reports" / name / "blind.json")
    return [(known.workloads[point.workload], known.machines[point.machine]) for point in known.points[-1:]]


def random_workload(draw: random.Random) -> Workload:
    """A few layers of a graph, with launches, early gradients, several dtypes, batches and batch norms."""
    batches = draw.choice([(8,), (4, 16), (2, 8, 64)])

    def seconds(most: float) -> tuple[float, ...]:
        return tuple(sorted(draw.uniform(0, most) for _ in batches))

    layers, blocks = list[Layer](), draw.choice([1, 1, 2, 4])
    activations, work = draw.choice([((0,), (0,)), ((0, 3000), (0,)), ((0, 3000), (0, 5000))])
    for i in range(draw.randint(1, 9)):
        backward = seconds(1e-2)
        tensors = tuple(
            Tensor(
                name=f"t{i}.{j}", shape=(draw.randint(0, 300_000),), dtype=draw.choice(["float32"] * 5 + ["float64"])
            )
            for j in range(draw.randint(0, 3))
        )
        layers.append(
            Layer(
                name=f"layer{i}",
                forward_s=seconds(5e-3),
                backward_s=backward,
                gradient_ready_s=draw.choice([None, tuple(draw.random() * each for each in backward)]),
                tensors=tensors,
                depends_on=draw.choice([None, None, tuple({f"layer{draw.randrange(i)}", f"layer{i - 1}"})])
                if i
                else None,
                launch_s=draw.choice([0.0, 0.0, 2e-3]),
                launch_backward_s=draw.choice([None, 1e-3]),
                batch_norm_channels=draw.choice([0, 64]) if tensors else 0,
                activation_bytes_per_sample=draw.choice(activations),
                output_bytes_per_sample=draw.randint(1, 10_000),
                work_bytes_per_sample=draw.choice(work),
            )
        )
        if blocks > 1 and tensors and draw.random() < 0.5:  # its columns in blocks, and what reads their sum
            whole = layers.pop()
            names = [f"{whole.name}.{block}" for block in range(blocks)]
            layers += [
                msgspec.structs.replace(
                    whole,
                    name=name,
                    tensors=tuple(msgspec.structs.replace(t, name=f"{t.name}.{block}") for t in tensors),
                    depends_on=whole.depends_on or ((layers[-1].name,) if layers else ()),
                    column_block=block,
                )
                for block, name in enumerate(names)
            ]
            layers.append(msgspec.structs.replace(whole, tensors=(), batch_norm_channels=0, depends_on=(*names,)))
    return Workload(
        name="random",
        local_batches=batches,
        layers=tuple(layers),
        update_s=draw.uniform(0, 1e-3),
        overhead_s=draw.uniform(0, 1e-3),
        ddp=draw.choice(
            [
                None,
                DdpSettings(torch="", devices=2, gradients=("kept", "released", "buckets")[len(layers) % 3]),
                DdpSettings(torch="", devices=2, own_allreduce_bytes=(4, 2**20)),
            ]
        ),
        update_bytes=1_000 * len(layers),
        overhead_per_sample_s=draw.choice([0.0, 1e-6]),
        loss_s=draw.choice([(), seconds(1e-3)]),
        step_spread=draw.choice([(), (0.9, 1.0, 1.3)]),
        step_correlation=draw.choice([0.0, 0.3, 1.0]),
        accumulation_factor=draw.choice([1.0, 1.1]),
        relative_uncertainty=draw.choice([None, 0.01]),
        input_s_per_sample=draw.choice([0.0, 1e-3]),
        emulated_compute=draw.random() < 0.2,
        state_bytes=draw.choice([0, 1000]),
        optimizer_slots=draw.choice([None, 0, 2]),
    )


def random_machine(draw: random.Random) -> Machine:
    """Tables of some device counts, layouts and collectives, and links."""
    sizes = tuple(sorted({draw.randint(0, 10 ** draw.randint(1, 7)) for _ in range(draw.randint(1, 6))}))

    def column() -> tuple[float, ...]:
        return tuple(sorted(draw.uniform(1e-5, 1e-2) for _ in sizes))

    def table(**fields: Any) -> dict[str, Any]:
        uncertain = draw.choice([None, 0.05])
        return {"sizes_bytes": sizes, "time_s": column(), "relative_uncertainty": uncertain} | fields

    def link() -> Link:
        return Link(
            latency_s=draw.uniform(0, 1e-4),
            bandwidth_bytes_per_s=10 ** draw.uniform(7, 11),
            reduce_s_per_byte=draw.choice([0.0, 1e-10]),
            message_overhead_s=draw.choice([0.0, 1e-5]),
            bucket_overhead_s=draw.choice([0.0, 1e-5]),
            fitted_to=draw.choice(["", "mpi on 2"]),
            median_residual=draw.choice([0.0, 0.3]),
            relative_uncertainty=draw.choice([None, 0.1]),
        )

    algorithms = draw.sample(["auto", "mpi", "ring", "nccl", "direct", "hierarchical"], 3)
    places = draw.sample([(2, ""), (4, ""), (8, ""), (4, "1x4"), (8, "2x4"), (16, "4x4"), (4, "4x1")], 3)
    places = [place for place in places if place[1] or "hierarchical" not in algorithms]
    every = [{"algorithm": name, "devices": n, "layout": layout} for name in algorithms for n, layout in places]
    halves: list[dict[str, Any]] = [
        each | {"kind": kind} for each in every for kind in ("reduce-scatter", "all-gather", "copy", "ordered-sum")
    ]
    send: dict[str, Any] = {"algorithm": "direct", "devices": 2, "kind": "send"}
    sends = [send | {"layout": layout} for layout in ("", "1x2", "2x1")]
    halves += [each for each in sends if draw.random() < 0.5]
    mechanisms = draw.choice([(), ("thread",), ("poll", "thread")])
    racks = draw.random() < 0.3
    return Machine(
        name="random",
        allreduce=tuple(AllreduceCost(**table(**each)) for each in every),
        halves=tuple(AllreduceCost(**table(**each)) for each in halves if draw.random() < 0.3),
        overlap=tuple(
            OverlapCost(**table(overlap=name, compute_loss_s=column(), poll_s=draw.choice([0.0, 1e-5]), **each))
            for name in mechanisms
            for each in every
            if draw.random() < 0.7
        ),
        compute_slowdown=draw.choice([(), (ComputeSlowdown(devices=4, factor=1.2, half_width=0.1, added_s=1e-3),)]),
        link=link(),
        link_in_node=draw.choice([None, link()]),
        link_between_racks=link() if racks else None,
        nodes_per_rack=4 if racks else None,
        cores=draw.choice([0, 0, 4]),
        emulated_network=draw.random() < 0.2,
        wiring=draw.choice([None, "mesh"]),
        network_adapters=draw.choice([None, 2]),
        contention=draw.choice([None, 1.5]),
        collective_overhead_s=draw.choice([None, 2e-5]),
        wake_s=draw.choice([0.0, 1e-5]),
        relative_uncertainty=draw.choice([None, 0.02]),
    )


def pairs(draw: random.Random) -> list[tuple[Workload, Machine]]:
    """Published workloads and machines, those of studies of this repository, and random ones."""
    googlenet = workload.read(FILES / "googlenet_k80.toml")
    resnet = workload.read(ROOT / "dpsim" / "validation" / "workloads" / "resnet50.toml")
    return [
        (googlenet, machine.read(FILES / "k80_10gbe.toml")),
        (googlenet, machine.read("10gbe")),
        (resnet, machine.read("nvlink3-8gpu+hdr-ib")),
        *studied("strategies"),
        *studied("example"),
        *studied("devices"),
        *((random_workload(draw), random_machine(draw)) for _ in range(20)),
    ]


@needs_browser
def test_random_settings_are_predicted_as_by_python(tmp_path: Path) -> None:
    draw = random.Random(31)
    worlds = pairs(draw)
    cases: list[dict[str, Any]] = []
    expected: list[tuple[Prediction, Memory, dict[str, Any]]] = []
    while len(cases) < SETTINGS:
        which = draw.randrange(len(worlds))
        case = random_case(draw, *worlds[which])
        if case is not None:
            cases.append({"world": which, "setting": case[0]})
            expected.append(case[1:])
    compared = {case["setting"]["strategy"]["text"] for case in cases}
    assert compared >= {"data-parallel", "zero1", "zero2", "zero3", "pipeline", "pipeline:parts=2", "tensor"}
    given = {"worlds": [world(*each, LOCAL_BATCHES) for each in worlds], "cases": cases}
    script = f"""
    {engine()}
    const {{worlds, cases}} = JSON.parse({json.dumps(codec.to_json(given, indent=None))}, revived);
    return JSON.stringify(cases.map(({{world, setting}}) => {{
      const of = worlds[world];
      const it = predict(of, setting);
      const one = predict(of, onOneDevice(setting));
      const seconds = [it.step_s, it.low_s, it.high_s, it.exposed_s, it.cost_s];
      const speedup = [it.samples_per_s / one.samples_per_s, ...speedupEnds(of, one, it)];
      const written = (value) => (value === Infinity ? "inf" : value);
      return {{seconds: seconds.map(written), buckets: it.buckets.length, extrapolated: it.extrapolated,
        memory: it.memory, speedup: speedup.map(written)}};
    }}), null, 0);"""
    answers = json.loads(evaluated(tmp_path, script))
    assert len(answers) == SETTINGS
    for asked, answer, (right, needed, best) in zip(cases, answers, expected, strict=True):
        step_s, low_s, high_s, *seconds = map(float, answer["seconds"])
        assert [answer["buckets"], answer["extrapolated"]] == [right.buckets, right.extrapolated], asked
        assert [step_s, low_s, high_s] == pytest.approx([right.step_s, right.low_s, right.high_s], rel=1e-6), asked
        beside = right.exposed_communication_s, right.communication_cost_s
        assert seconds == pytest.approx(beside, rel=1e-6, abs=1e-9 * right.step_s), asked
        assert answer["memory"] == needed.parts() | {"total": needed.total}, asked
        speedup = [best["speedup"], best["speedup_low"], best["speedup_high"]]
        assert [*map(float, answer["speedup"])] == pytest.approx(speedup, rel=1e-6), asked
