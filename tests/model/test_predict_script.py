"""``dpsim predict`` of a workload that was recorded from a script with DDP, in Python and as a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dpsim
from dpsim import codec, jit
from dpsim.ddp_settings import DdpSettings, ShardedUnit
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, ComputeSlowdown, Link, Machine
from dpsim.model import predict_points
from dpsim.setting import Grid
from dpsim.units import format_duration, format_size
from dpsim.workload import Layer, Tensor, Workload

Dpsim = Callable[..., tuple[int, str, str]]
NCCL = Machine(
    name="8 x GPU",
    allreduce=(AllreduceCost(algorithm="nccl", devices=8, sizes_bytes=(1024, 2**26), time_s=(5e-5, 4e-2)),),
    link=Link(latency_s=1e-5, bandwidth_bytes_per_s=3e9, fitted_to="nccl on 8"),
)


def _workload(source: str = "", **told: Any) -> Workload:
    layers = tuple(
        Layer(
            name=f"layer{i}",
            forward_s=(0.002, 0.004),
            backward_s=(0.004, 0.008),
            tensors=(Tensor(name=f"w{i}", shape=(1024, 512)),),
        )
        for i in range(6)
    )
    ddp = DdpSettings(torch="2.13.0", devices=8, **told) if told else None
    return Workload(name="mine", local_batches=(16, 32), layers=layers, update_s=0.001, source=source, ddp=ddp)


def test_what_the_script_told_ddp_is_predicted_and_a_flag_overrides_it() -> None:
    told = _workload(bucket_cap_bytes=2**22, accumulate=4, communication_hook="fp16_compress_hook")
    link = Machine(name="link", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    (point,), summary = predict_points(told, link, Grid.of(devices=8))
    assert (point["fusion_rule"], point["fusion_threshold_bytes"], point["accumulate"]) == ("ddp", 2**22, 4)
    assert (summary["wire_dtype"], point["global_batch"]) == ("float16", 8 * 4 * 32)
    assert "4 MiB" in summary["from_script"] and "4 micro-batches" in summary["from_script"]
    options: dict[str, Any] = {"accumulate": 1, "wire_dtype": "float32", "algorithm": "ring"}
    (point,), summary = predict_points(
        told, link, Grid.of(devices=8, fusion_threshold_bytes=0.0, fusion_rule="tarantella", **options)
    )
    assert (point["fusion_rule"], point["fusion_threshold_bytes"], point["accumulate"]) == ("tarantella", 0.0, 1)
    assert (summary["wire_dtype"], summary["from_script"]) == ("float32", "")


def test_a_script_that_reduces_in_each_micro_batch_is_told_what_deferring_saves_and_needs() -> None:
    link = Machine(name="link", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    units = tuple(ShardedUnit(name=f"layer{i}", size_bytes=4 * 1024 * 512, reshard=True) for i in range(6))
    for how, told in (("no_sync", {}), ("set_requires_gradient_sync", {"units": units})):
        of_script: dict[str, Any] = {"bucket_cap_bytes": 2**22, "accumulate": 4, "gradients": "released", **told}
        each, deferred = (_workload(deferred=value, **of_script) for value in (False, True))
        grid = Grid.of(devices=8, overlap="off")
        ((now,), summary), ((then,), other) = (predict_points(one, link, grid) for one in (each, deferred))
        assert now["predicted_step_s"] > then["predicted_step_s"]
        saved, step = (
            format_duration(seconds)
            for seconds in (now["predicted_step_s"] - then["predicted_step_s"], now["predicted_step_s"])
        )
        size = format_size(each.gradient_bytes - each.gradient_bytes // 8) if told else ""
        needs = f"needs {size} more" if told else "needs no more memory"
        sentence = f"deferring ({how}) would save {saved} of {step} on 8 devices and {needs}"
        assert [caution for caution in summary["cautions"] if sentence in caution], (sentence, summary["cautions"])
        assert not [caution for caution in other["cautions"] if "deferring" in caution]


def test_a_script_that_reduces_in_every_second_micro_batch_is_priced_so() -> None:
    link = Machine(name="link", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    ways: tuple[dict[str, Any], ...] = ({"deferred": False}, {"deferred": False, "reduces": (1, 3)}, {})
    each, second, last = (
        predict_points(_workload(accumulate=4, **way), link, Grid.of(devices=8, overlap="off")) for way in ways
    )
    step_s = [points[0]["predicted_step_s"] for points, _ in (each, second, last)]
    assert step_s[0] - step_s[1] == pytest.approx(2 * (step_s[1] - step_s[2]))
    assert "4 micro-batches a step, 2 of which reduce gradients" in second[1]["from_script"]
    assert any("4 micro-batches reduce 2 times; deferring (no_sync)" in each for each in second[1]["cautions"])


def test_a_flag_that_ddp_had_read_before_is_named() -> None:
    ddp = _workload(late_flag=True).ddp
    assert ddp is not None and "without effect in that backward" in ddp.unpriced()[0]


@pytest.mark.parametrize(
    ("torch", "rule", "buckets"), [("2.3.1+cu121", "ddp-2.3", 4), ("2.4.0", "ddp", 3), ("", "ddp", 3)]
)
def test_the_version_of_pytorch_decides_about_the_first_bucket(torch: str, rule: str, buckets: int) -> None:
    """Six tensors of 2 MiB under a cap of 4 MiB: before 2.4 the first one alone fills the first bucket."""
    told = _workload(bucket_cap_bytes=2**22)
    assert told.ddp is not None
    told = msgspec.structs.replace(told, ddp=msgspec.structs.replace(told.ddp, torch=torch))
    (point,), summary = predict_points(told, NCCL, Grid.of(devices=8))
    assert (point["fusion_rule"], point["fusion_threshold_bytes"], point["buckets"]) == (rule, 2**22, buckets)
    assert f"rule {rule}, buckets of 4 MiB" in summary["from_script"]


@pytest.mark.parametrize(("hook", "noted"), [("powerSGD_hook", True), ("allreduce_hook", False)])
def test_a_hook_that_has_no_price_is_noted(hook: str, noted: bool) -> None:
    _, summary = predict_points(_workload(communication_hook=hook), NCCL, Grid.of(devices=8))
    assert any(hook in caution for caution in summary["cautions"]) == noted


@pytest.mark.parametrize("settings", [{}, {"accumulate": 4}, *({"strategy": f"zero{stage}"} for stage in (1, 2, 3))])
def test_each_allreduce_of_the_scripts_own_makes_the_step_longer_by_all_it_takes(settings: dict[str, Any]) -> None:
    """Four of 1 MiB around a ring of 8: 2 * 7 messages of 128 KiB each. ZeRO's agreement is then an allreduce too."""
    link = Machine(name="link", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8))
    plain, summing = _workload(accumulate=1), _workload(own_collectives=4, own_allreduce_bytes=(2**20,) * 4)
    options: dict[str, Any] = {"algorithm": "ring", "local_batch": 16} | settings
    (before,), _ = predict_points(plain, link, Grid.of(devices=8, **options))
    (point,), summary = predict_points(summing, link, Grid.of(devices=8, **options))
    longer_s = 4 * 14 * (1e-3 + 2**17 / 1e8) + 7e-3 * ("strategy" in settings)
    for name in ("predicted_step_s", "predicted_exposed_communication_s"):
        assert point[name] - before[name] == pytest.approx(longer_s, rel=1e-5)
    said = "asks for 4 allreduces (4 MiB in all) of its own in each step; nothing hides them, and they take 129 ms"
    assert any(said in caution for caution in summary["cautions"]), summary["cautions"]
    alone = [
        predict_points(each, link, Grid.of(devices=1, local_batch=16))[0][0]["predicted_step_s"]
        for each in (plain, summing)
    ]
    assert alone[0] == alone[1]


def test_a_pipeline_says_that_it_leaves_the_scripts_own_allreduces_out() -> None:
    link = Machine(name="link", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8))
    layers = tuple(msgspec.structs.replace(layer, output_bytes_per_sample=8) for layer in _workload().layers)
    told = msgspec.structs.replace(_workload(own_collectives=1, own_allreduce_bytes=(4,)), layers=layers)
    _, summary = predict_points(told, link, Grid.of(devices=8, strategy="pipeline", algorithm="ring", accumulate=2))
    said = "asks for an allreduce (4 B) of its own in each step; they are no part of the prediction for pipeline"
    assert any(said in caution for caution in summary["cautions"]), summary["cautions"]


@pytest.mark.parametrize(("source", "noted"), [("dpsim profile --torch-script: steps on cpu, as", True), ("", False)])
def test_layer_times_of_a_processor_are_not_claimed_for_gpus(source: str, noted: bool) -> None:
    _, summary = predict_points(_workload(source), NCCL, Grid.of(devices=8))
    assert any("layer times are of a CPU" in caution for caution in summary["cautions"]) == noted


@pytest.mark.parametrize("told", [{}, {"bucket_cap_bytes": 2**20}, {"accumulate": 2}, {"whole_buckets": True}])
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), {}),
        (("--global-batch", "256"), {"global_batch": 256}),
        (("--fusion-threshold", "1MiB"), {"threshold": 2.0**20}),
        (("--fusion-rule", "horovod", "--set", "overlap=off"), {"fusion_rule": "horovod", "overlap": "off"}),
    ],
)
def test_python_and_the_command_give_the_same_number(
    told: dict[str, Any], flags: tuple[str, ...], settings: dict[str, Any], tmp_path: Path, dpsim: Dpsim
) -> None:
    files = str(tmp_path / "w.json"), str(tmp_path / "m.json")
    codec.write(Path(files[0]), _workload(**told))
    codec.write(Path(files[1]), NCCL)
    code, output, _ = dpsim(
        "predict", "--workload", files[0], "--machine", files[1], "--devices", "8", "--json", *flags
    )
    assert code == 0
    (point,) = json.loads(output)["points"]
    assert _predict(*files, devices=8, **settings) == point["predicted_step_s"]


def test_the_table_claims_only_the_collectives_of_the_machine(tmp_path: Path, dpsim: Dpsim) -> None:
    files = str(tmp_path / "w.json"), str(tmp_path / "m.json")
    codec.write(Path(files[0]), _workload())
    codec.write(Path(files[1]), NCCL)
    _, output, _ = dpsim("predict", "--workload", files[0], "--machine", files[1], "--devices", "8")
    assert output.startswith("mine, with the collectives of 8 x GPU")


def _predict(*files: str, **settings: Any) -> float:
    return float(dpsim.predict(*files, **settings).step_s)


def test_several_nodes_are_not_priced_by_what_one_node_was_calibrated_on() -> None:
    table = AllreduceCost(algorithm="auto", devices=2, sizes_bytes=(1024, 2**20), time_s=(1e-5, 1e-3))
    fitted = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10, fitted_to="auto on 2")
    one = Machine(name="one node", allreduce=(table,), link=fitted, cores=2)
    with pytest.raises(ConfigError, match="calibrated on one"):
        predict_points(_workload(), one, Grid.of(devices="16x2"))
    _, summary = predict_points(_workload(), one, Grid.of(devices=32))
    assert any("docs/cluster.md" in caution for caution in summary["cautions"])
    given = Machine(name="link", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9), cores=2)
    assert predict_points(_workload(), given, Grid.of(devices="16x2"))[0]


def test_devices_that_speed_each_other_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="100 times as fast"):
        ComputeSlowdown(devices=2, factor=0.01)


@pytest.mark.parametrize(
    ("time_s", "noted"), [((0.0, 0.0), True), ((1e-2, 1e-3), True), ((1.1e-4, 1e-4), False), ((1e-5, 1e-3), False)]
)
def test_allreduce_times_that_cannot_be_right_are_noted(time_s: tuple[float, float], noted: bool) -> None:
    table = AllreduceCost(algorithm="ring", devices=2, sizes_bytes=(1024, 2**20), time_s=time_s)
    _, summary = predict_points(
        _workload(), Machine(name="odd", allreduce=(table,)), Grid.of(devices=2, algorithm="ring")
    )
    assert any("ring on 2 devices cannot be right" in caution for caution in summary["cautions"]) == noted


def test_a_log_that_is_given_as_a_machine_is_to_be_calibrated_from(dpsim: Dpsim, tmp_path: Path) -> None:
    codec.write_text(tmp_path / "w.json", codec.to_json(_workload()))
    (tmp_path / "nccl.txt").write_text("# nThread 1 nGpus 8\n", encoding="utf-8")
    files = ("--workload", str(tmp_path / "w.json"), "--machine", str(tmp_path / "nccl.txt"))
    code, _, err = dpsim("predict", *files, "--devices", "8")
    assert (code, "dpsim calibrate --from" in err) == (2, True), err


def test_predict_says_why_it_compiles_again(dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("w.json", _workload()), ("m.json", NCCL)):
        codec.write(tmp_path / name, value)
    files = ("--workload", str(tmp_path / "w.json"), "--machine", str(tmp_path / "m.json"))
    monkeypatch.setattr(jit, "keeps", lambda: False)
    code, _, err = dpsim("predict", *files, "--devices", "8")
    assert (code, "NUMBA_CACHE_DIR=FOLDER" in err) == (0, True), err
    monkeypatch.undo()
    assert dpsim("predict", *files, "--devices", "8")[::2] == (0, "")
