"""Workload and machine files: the documented examples, the published ones, and damaged ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_files import EXPERIMENTS

from dpsim import codec
from dpsim import machine as machines
from dpsim import workload as workloads
from dpsim.errors import FileFormatError
from dpsim.machine import Machine
from dpsim.model import nulls, predict
from dpsim.plan import Plan
from dpsim.workload import Workload

# hclhkbu/B-Caffe @ fdb55951, scripts/gmwfbp.py (BSD-2-Clause): images/s of GoogleNet, batch 64 a node, by nodes
MEASURED_IMAGES_PER_S = {
    ("per-tensor", "thread"): {1: 163.36, 2: 299.32, 4: 599.28},  # WFBP
    ("mg-wfbp", "thread"): {1: 163.36, 2: 316.08, 4: 600.24},  # MG-WFBP
    ("one", "off"): {1: 163.36, 2: 250.28, 4: 461.36},  # SyncEASGD
}


def googlenet_on_k80() -> tuple[Workload, Machine]:
    return workloads.read(EXPERIMENTS / "machines" / "googlenet_k80.toml"), machines.read(
        EXPERIMENTS / "machines" / "k80_10gbe.toml"
    )


def test_the_examples_of_the_documentation_can_be_read_and_predicted(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```toml\n(.*?)```", (EXPERIMENTS / "machines" / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    paths = [tmp_path / "workload.toml", tmp_path / "machine.toml"]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block, encoding="utf-8")
        assert len([line for line in block.splitlines() if line]) <= 15
    workload, machine = workloads.read(paths[0]), machines.read(paths[1])
    predicted = predict(workload, machine, Plan(devices=2, global_batch=64))
    assert predicted.step_s > 0.037 and predicted.buckets == 2


def test_the_documentation_names_every_key() -> None:
    text = (EXPERIMENTS / "machines" / "README.md").read_text(encoding="utf-8")
    for kind in (Workload, Machine):
        for key in codec._known_keys(kind, set()):
            assert f"`{key}`" in text or f".{key}`" in text, key


def test_published_throughput_of_googlenet_on_k80_nodes() -> None:
    """Within 20 % everywhere and 10 % with overlap; where nothing overlaps, far better than perfect scaling."""
    workload, machine = googlenet_on_k80()
    for (rule, overlap), rates in MEASURED_IMAGES_PER_S.items():
        for nodes, measured in rates.items():
            plan = Plan(devices=nodes, global_batch=64 * nodes, fusion_rule=rule, overlap=overlap)  # type: ignore[arg-type]
            predicted = predict(workload, machine, plan)
            error = plan.global_batch / predicted.step_s / measured - 1
            assert predicted.extrapolated == (nodes > 1)
            assert abs(error) < (0.001 if nodes == 1 else 0.10 if overlap == "thread" else 0.20), (rule, nodes, error)
            if overlap == "off" and nodes > 1:
                null_s = nulls(workload, machine, plan)["perfect_scaling"][0]
                assert abs(error) < abs(64 * nodes / null_s / measured - 1) / 2


def small_files() -> list[Any]:
    layer = {
        "name": "a",
        "forward_s": [1.0, 2.0],
        "backward_s": [1.0, 2.0],
        "gradient_ready_s": [0.5, 1.0],
        "tensors": [{"name": "w", "shape": [2, 3], "dtype": "float32"}],
    }
    table = {"algorithm": "mpi", "devices": 2, "sizes_bytes": [4, 8], "time_s": [1.0, 2.0]}
    return [
        {"schema": workloads.SCHEMA, "name": "w", "local_batches": [1, 2], "layers": [layer], "update_s": 1.0},
        {
            "schema": machines.SCHEMA,
            "name": "m",
            "allreduce": [table],
            "memory_bytes": "inf",
            "overlap": [table | {"overlap": "poll", "compute_loss_s": [0.0, 0.0]}],
            "link": {"latency_s": 1.0, "bandwidth_bytes_per_s": 1.0},
            "compute_slowdown": [{"devices": 2, "factor": 1.5}],
        },
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, inner in items for place in places(inner, (*path, key))]


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["inf", "-inf", "float32", "mpi"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 1))
def test_a_changed_file_is_read_or_refused_as_a_file(tmp_path: Path, data: st.DataObject, kind: int) -> None:
    content = small_files()[kind]
    place = data.draw(st.sampled_from(places(content)[1:]))
    target = content
    for key in place[:-1]:
        target = target[key]
    action = data.draw(st.sampled_from(["replace", "delete", "add"]))
    if action == "replace":
        target[place[-1]] = data.draw(JUNK)
    elif action == "delete":
        del target[place[-1]]
    elif isinstance(target, dict):
        target[data.draw(st.text(max_size=8))] = data.draw(JUNK)
    else:
        target.append(data.draw(JUNK))
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    read_or_refused(path, kind)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 1))
def test_a_damaged_file_is_read_or_refused_as_a_file(tmp_path: Path, data: st.DataObject, kind: int) -> None:
    raw = bytearray(json.dumps(small_files()[kind]).encode())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "file.json"
    path.write_bytes(raw)
    read_or_refused(path, kind)


def read_or_refused(path: Path, kind: int) -> None:
    try:
        read = (workloads.read, machines.read)[kind](path)
    except FileFormatError as error:
        assert str(path) in str(error)
        return
    assert isinstance(read, (Workload, Machine)[kind])
    if isinstance(read, Workload):
        link = Machine(name="l", link=machines.Link(latency_s=0.0, bandwidth_bytes_per_s=1.0))
        assert predict(read, link, Plan(devices=2, global_batch=4)).step_s >= 0


def test_a_wrong_or_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot read the machine file"):
        machines.read(tmp_path / "nothing.toml")
    with pytest.raises(FileFormatError, match="is not a machine file"):
        machines.read(EXPERIMENTS / "machines" / "googlenet_k80.toml")
    misspelt = tmp_path / "m.toml"
    misspelt.write_text('schema = "dpsim.machine/1"\nname = "m"\n[link]\nlatency = 1\nbandwidth_bytes_per_s = 1\n')
    with pytest.raises(FileFormatError, match="did you mean 'latency_s'"):
        machines.read(misspelt)


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        (0, ("layers", 0, "tensors", 0, "shape"), [2**40, 2**40], "gradient bytes"),
        (0, ("layers", 0, "launch_s"), -1.0, "launch_s -1"),
        (0, ("layers", 0, "activation_bytes_per_sample"), "inf", "activation_bytes_per_sample inf"),
        (0, ("layers", 0, "batch_norm_channels"), -1, "batch_norm_channels -1"),
        (0, ("local_batches", 1), 10**400, "local_batches is"),
        (0, ("state_bytes",), -1, "-1 state_bytes"),
        (0, ("optimizer_slots",), -1, "-1 optimizer_slots"),
        (0, ("step_spread",), [1.1, 0.9], "step_spread"),
        (0, ("step_spread",), [0.0, 1.0], "step_spread"),
        (0, ("step_correlation",), 1.5, "step_correlation 1.5"),
        (0, ("step_correlation",), -0.1, "step_correlation -0.1"),
        (1, ("slow_devices",), [2.0, 0.5], "slow_devices is [2.0, 0.5]"),
        (1, ("slow_devices",), ["inf"], "slow_devices is [inf]"),
        (1, ("allreduce", 0, "devices"), 0, "for 0 devices"),
        (1, ("overlap", 0, "devices"), -2, "for -2 devices"),
        (1, ("compute_slowdown", 0, "devices"), 0, "for 0 devices"),
        (1, ("overlap", 0, "poll_s"), "inf", "poll_s inf"),
        (1, ("allreduce", 0, "sizes_bytes", 1), 10**400, "sizes_bytes"),
    ],
)
def test_a_number_that_nothing_can_have_is_refused(
    kind: int, place: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    content = target = small_files()[kind]
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(FileFormatError) as caught:
        (workloads.read, machines.read)[kind](path)
    assert message in str(caught.value)


def test_a_machine_file_with_two_speeds_is_read_as_its_times_at_full_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"algorithm": "mpi", "devices": 2, "sizes_bytes": [4], "time_s": [1.0], "slow_factor": 1.4}
    speed = {"devices": 2, "reference_s": 1e-3, "slow_reference_s": 1.4e-3, "slow_share": 0.3, "compute_factor": 1.4}
    plain = {
        "schema": machines.SCHEMA,
        "name": "m",
        "allreduce": [table],
        "overlap": [table | {"overlap": "thread", "compute_loss_s": [0.1]}],
        "speed": [speed | {"relative_uncertainty": 0.07}],
    }
    path = tmp_path / "m.json"
    path.write_text(json.dumps(plain))
    machine = machines.read(path)
    assert (machine.allreduce[0].time_s, machine.overlap[0].time_s) == ((1.0,), (1.0,))
    assert machine.relative_uncertainty == 0.07 and "slow_factor" not in codec.to_json(machine)
    said = capsys.readouterr().err
    assert "m.json has two speeds" in said and "calibrate again with dpsim calibrate" in said
    path.write_text(json.dumps(plain | {"speed": [speed | {"slow_share": 0.0}]}))
    assert machines.read(path).relative_uncertainty is None and capsys.readouterr().err == ""


@pytest.mark.parametrize("speeds", [3, "fast", [1], [{"slow_share": "much"}], {"devices": 2}])
def test_whatever_a_machine_file_says_of_speeds_ends_in_no_traceback(speeds: object, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    link = {"latency_s": 1.0, "bandwidth_bytes_per_s": 1.0}
    path.write_text(json.dumps({"schema": machines.SCHEMA, "name": "m", "link": link, "speed": speeds}))
    assert machines.read(path).name == "m"
    path.write_text(json.dumps({"schema": machines.SCHEMA, "name": "m", "allreduce": speeds, "speed": speeds}))
    with pytest.raises(FileFormatError):
        machines.read(path)
