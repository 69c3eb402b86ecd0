"""``dpsim profile --from``: a trace of PyTorch's profiler becomes a workload. Needs no torch.

``traces/gloo_rank0.json.gz`` is a real one. The format of GPU traces is PyTorch's documentation's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kineto_traces
import pytest
from kineto_traces import accumulate, device_step, event, gloo, host_step
from published_files import MACHINE

from dpsim import workload as workloads
from dpsim.errors import FileFormatError
from dpsim.lowering import lower
from dpsim.plan import Plan
from dpsim.torch.script.kineto import marks as kept_marks
from dpsim.torch.script.kineto import steps
from dpsim.torch.script.kineto.marks import Allreduce
from dpsim.torch.script.kineto.workload import read_trace
from dpsim.workload import Workload

Dpsim = Callable[..., tuple[int, str, str]]
MS = 1e-3
TRACE = Path(__file__).parent / "traces" / "gloo_rank0.json.gz"


def of(folder: Path, events: list[dict[str, Any]], **header: Any) -> Workload:
    return read_trace(kineto_traces.write(folder / "rank1.json", events, **header), 32)


def ready_s(workload: Workload) -> list[float]:
    seconds = []
    for layer in reversed(workload.layers):
        seconds.append((seconds[-1] if seconds else 0.0) + layer.backward_s[0])
    return seconds


def is_allreduce(fields: dict[str, Any]) -> bool:
    return "reduce" in fields["name"]


def test_a_step_without_a_forward_is_left_out(tmp_path: Path) -> None:
    silent = [e for e in host_step(1, 0) if "forward" not in e["name"]]
    assert "medians of 1 steps" in of(tmp_path, silent + host_step(2, 10_000)).source


def test_a_real_trace_of_two_ranks_over_gloo_has_the_buckets_that_ddp_made() -> None:
    workload = read_trace(TRACE, 32)
    assert workload.ddp is not None
    assert (workload.ddp.devices, workload.ddp.whole_buckets, workload.ddp.accumulate) == (2, False, 1)
    assert [tensor.shape for tensor in reversed(workload.tensors)] == [
        (10,),
        (10, 256),
        (256,),
        (256,),
        (256,),
        (256, 64),
    ]
    assert sum(workload.ddp.bucket_bytes) == workload.gradient_bytes == 4 * 19722
    plan = Plan(devices=2, global_batch=64, fusion_rule="ddp", fusion_threshold_bytes=workload.ddp.bucket_cap_bytes)
    assert tuple(lower(workload, plan).bucket_size_bytes.tolist()) == workload.ddp.bucket_bytes
    assert "rank 0 of 2 over gloo" in workload.source and len(workload.step_spread) >= 5
    assert workload.update_s > 0 and workload.input_s_per_sample > 0
    assert all(layer.backward_s[0] > 0 for layer in workload.layers) and workload.layers[0].forward_s[0] > 0


def test_gradients_with_shapes_become_layers_in_ddps_buckets(tmp_path: Path) -> None:
    workload = of(tmp_path, host_step(3, 100) + host_step(4, 10_100))
    assert [tensor.shape for tensor in reversed(workload.tensors)] == [(8, 2), (8,), (4, 8)]
    assert ready_s(workload) == pytest.approx([2.1 * MS, 3.75 * MS, 3.9 * MS])
    ddp = workload.ddp
    assert ddp is not None and (ddp.devices, ddp.accumulate, ddp.whole_buckets) == (2, 1, False)
    assert ddp.bucket_bytes == (96, 128) and ddp.bucket_cap_bytes == 96 and ddp.communication_hook == ""
    plan = Plan(devices=2, global_batch=64, fusion_rule="ddp", fusion_threshold_bytes=ddp.bucket_cap_bytes)
    assert tuple(lower(workload, plan).bucket_size_bytes.tolist()) == ddp.bucket_bytes
    assert "rank 1 of 2 over gloo" in workload.source and "cap is inferred" in workload.source


def test_all_parts_add_up_to_the_step_without_its_wait(tmp_path: Path) -> None:
    workload = of(tmp_path, host_step(3, 100))
    assert sum(layer.forward_s[0] for layer in workload.layers) == pytest.approx(2 * MS)
    assert workload.update_s == pytest.approx(0.9 * MS) and workload.input_s(32) == pytest.approx(1 * MS)
    layers_s = sum(layer.forward_s[0] + layer.backward_s[0] for layer in workload.layers)
    total_s = layers_s + workload.update_s + workload.overhead_s + workload.input_s(32)
    assert total_s == pytest.approx((10 - 0.6) * MS)
    assert workload.local_batches == (32,)


def test_without_shapes_every_bucket_is_a_tensor_that_nothing_divides(tmp_path: Path) -> None:
    workload = of(tmp_path, host_step(3, 100, shapes=False))
    assert [(t.name, t.shape) for t in reversed(workload.tensors)] == [("bucket 1", (24,)), ("bucket 2", (32,))]
    assert ready_s(workload) == pytest.approx([3.75 * MS, 3.9 * MS])
    assert workload.ddp is not None and workload.ddp.whole_buckets and workload.ddp.bucket_bytes == (96, 128)
    assert "whole bucket" in workload.source
    plan = Plan(devices=2, global_batch=64, fusion_rule="per-tensor")
    assert lower(workload, plan).bucket_size_bytes.tolist() == [96, 128]


def test_gradients_that_do_not_make_the_buckets_are_left_out(tmp_path: Path) -> None:
    events = host_step(3, 100) + accumulate(3300, 3400, [5])
    workload = of(tmp_path, events)
    assert workload.ddp is not None and workload.ddp.whole_buckets


def test_a_hook_that_sends_half_precision_is_named(tmp_path: Path) -> None:
    ddp = of(tmp_path, host_step(3, 100, dtype="c10::BFloat16")).ddp
    assert ddp is not None and ddp.communication_hook == "bf16" and ddp.bucket_bytes == (96, 128)


def test_times_of_a_gpu_are_the_devices_and_the_hosts_stand_beside_them(tmp_path: Path) -> None:
    workload = of(tmp_path, device_step(3, 0) + device_step(4, 10_000), backend="nccl", world_size=4)
    assert sum(layer.forward_s[0] for layer in workload.layers) == pytest.approx(2 * MS)
    assert ready_s(workload) == pytest.approx([3.9 * MS, 4 * MS])
    assert workload.update_s == pytest.approx(0.9 * MS) and workload.input_s_per_sample == 0
    assert workload.overhead_s == pytest.approx((10 - 0.8 - 2 - 4 - 0.9) * MS)
    launch = [(layer.launch_s, layer.launched_backward_s) for layer in workload.layers]
    assert launch == [pytest.approx((0.5 * MS, 0.25 * MS)), pytest.approx((0.0, 0.45 * MS))]
    assert workload.ddp is not None and workload.ddp.devices == 4


def test_several_steps_give_medians_and_their_spread(tmp_path: Path) -> None:
    scales = (1.0, 1.2, 0.9, 1.1, 1.0)
    events = [each for n, scale in enumerate(scales) for each in host_step(n, 20_000 * n, scale=scale)]
    workload = of(tmp_path, events)
    assert ready_s(workload)[-1] == pytest.approx(3.9 * MS)
    assert workload.step_spread == pytest.approx((0.9, 1.0, 1.0, 1.1, 1.2))
    assert workload.relative_uncertainty is not None and 0.02 < workload.relative_uncertainty < 0.1
    assert of(tmp_path, events[: 4 * len(host_step(0, 0))]).step_spread == ()


def test_steps_with_other_buckets_such_as_ddps_first_are_left_out(tmp_path: Path) -> None:
    first = [e for e in host_step(1, 0) if not is_allreduce(e)] + gloo(7100, 7180, 56, 7800)
    workload = of(tmp_path, first + host_step(2, 10_000) + host_step(3, 20_000))
    assert workload.ddp is not None and workload.ddp.bucket_bytes == (96, 128)
    assert "medians of 2 steps" in workload.source


def test_evaluation_and_other_collectives_do_not_count(tmp_path: Path) -> None:
    other = [
        event("DistributedDataParallel.forward", 9500, 9600, "user_annotation"),
        *gloo(9700, 9710, 1, 9800),
        event("autograd::engine::evaluate_function: SyncBatchNormBackward", 5600, 5700),
        *gloo(5610, 5620, 9, 5690),
        *gloo(7185, 7190, 3, 7295, "int"),
    ]
    assert of(tmp_path, host_step(3, 0) + other) == of(tmp_path, host_step(3, 0))


def test_micro_batches_before_the_last_are_counted(tmp_path: Path) -> None:
    silent = [e for e in host_step(3, 0, scale=0.1) if not is_allreduce(e) and "#" not in e["name"]]
    workload = of(tmp_path, [e | {"ts": e["ts"] + 50} for e in silent] + host_step(3, 0))
    assert workload.ddp is not None and workload.ddp.accumulate == 2
    assert sum(layer.forward_s[0] for layer in workload.layers) == pytest.approx((2 + 0.2) / 2 * MS)


@pytest.mark.parametrize(
    ("events", "given", "remedy"),
    [
        ([event("aten::mm", 0, 1)], "there is no allreduce among its 3 events, but no collective", "2 ranks"),
        (
            [event("c10d::_allgather_base_", 0, 1), event("c10d::reduce_scatter_", 2, 3)],
            "no allreduce among its 4 events, but 1 allgather_base, 1 reduce_scatter",
            "DistributedDataParallel",
        ),
        (
            [e for e in host_step(3, 0) if "Profiler" not in e["name"]],
            "no ProfilerStep#n among its",
            "a schedule=, and call profiler.step()",
        ),
        (
            [e for e in host_step(3, 0) if "evaluate" not in e["name"]],
            "no function of autograd's backward",
            "ProfilerActivity.CPU",
        ),
        (
            [e for e in host_step(3, 0) if "Parallel" not in e["name"]],
            "no DistributedDataParallel.forward",
            "ProfilerActivity.CPU",
        ),
        (
            [*host_step(3, 0)[:4], *gloo(1, 2, 3, 400), event("autograd::engine::evaluate_function: X", 1, 2)],
            "none of its 1 profiler steps",
            "around whole training steps",
        ),
        (
            [e | {"args": {}} for e in host_step(3, 0)],
            "the allreduces of ProfilerStep#3 have no sizes",
            "record_shapes=True",
        ),
        (host_step(3, 0, dtype="Float8_e4m3fn"), "has type 'float8_e4m3fn'", "hook"),
        (
            [e for at in (0, 10_000) for e in host_step(3, at) if "#3" not in e["name"]]
            + [event("ProfilerStep#3", 0, 20_000)],
            "ProfilerStep#3 has 2 backward passes that send gradients",
            "no_sync()",
        ),
        ([*host_step(3, 0), event("Optimizer.step#X", 0, 1) | {"dur": None}], "event 18 at byte", "record it again"),
        ([*host_step(3, 0), event("Optimizer.step#X", 0, 1) | {"ts": -1}], "ts of 'Optimizer.step#X' is -1", "record"),
    ],
    ids=[
        "no communication",
        "FSDP",
        "no steps",
        "no backward",
        "no forward",
        "no whole step",
        "no sizes",
        "fp8",
        "two backwards",
        "no duration",
        "negative time",
    ],
)
def test_a_trace_that_makes_no_workload_is_explained(
    events: list[dict[str, Any]], given: str, remedy: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    path, output = kineto_traces.write(tmp_path / "t.json", events), tmp_path / "w.json"
    code, out, err = dpsim("profile", "--from", path, "--local-batch", "8", "--output", output)
    assert (code, out, output.exists()) == (2, "", False)
    assert given in err and remedy in err and "t.json" in err and "Traceback" not in err


def test_a_trace_that_does_not_say_how_many_ranks_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="how many ranks"):
        of(tmp_path, host_step(3, 0), world_size=None)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("--from", "t.json"), "--from without --local-batch"),
        (("--from", "t.json", "--local-batch", "8,16"), "--from with --local-batch 8,16"),
        (("--from", "t.json", "--local-batch", "8", "--devices", "4"), "--devices with --from"),
        (("--from", "t.json", "--model", "cnn"), "--model with --from"),
        (("--from", "t.json", "--torch", "a:b"), "--torch and --from"),
        (("--from", "nowhere.json", "--local-batch", "8"), "cannot read the trace nowhere.json"),
        (("--from", ".", "--local-batch", "8"), "cannot read the trace"),
    ],
)
def test_what_does_not_belong_to_a_trace_is_refused(
    arguments: tuple[str, ...], given: str, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dpsim("profile", *arguments)
    assert (code, out) == (2, "") and given in err and list(tmp_path.iterdir()) == []


def test_the_printed_command_predicts_the_buckets_of_the_trace(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for shapes, rule in ((True, "ddp"), (False, "per-tensor")):
        trace = kineto_traces.write(tmp_path / "t.json.gz", host_step(3, 0, shapes=shapes))
        code, out, err = dpsim("profile", "--from", trace, "--local-batch", "8", "--output", "w.json")
        assert (code, err) == (0, "")
        words = out.split("predict it as DDP runs it: dpsim ")[1].replace("machine.json", str(MACHINE)).split()
        code, out, err = dpsim(*words, "--json")
        predicted = json.loads(out)
        assert code == 0 and predicted["points"][0]["buckets"] == 2, err
        assert predicted["points"][0]["fusion_rule"] == rule
        assert workloads.read(tmp_path / "w.json").ddp is not None
    _, out, _ = dpsim(*words, "--fusion-rule", "tarantella", "--json")
    assert any("no prediction can divide a bucket" in caution for caution in json.loads(out)["summary"]["cautions"])


def test_a_trace_of_annotations_without_kernels_is_refused_as_such(tmp_path: Path) -> None:
    on_device = ("kernel", "gpu_memcpy", "gpu_user_annotation")
    events = [each for each in device_step(3, 0) + device_step(4, 10_000) if each.get("cat") not in on_device]
    with pytest.raises(FileFormatError, match="it has annotations alone: 4 of collectives that GPUs did") as refused:
        of(tmp_path, events, backend="nccl", world_size=4)
    assert "ProfilerActivity.CUDA" in refused.value.remedy


def test_a_trace_with_its_events_twice_is_refused(tmp_path: Path) -> None:
    text = json.dumps(kineto_traces.trace(host_step(3, 0)))
    name = '"traceEvents":'
    events = text[text.index(name) :].rstrip("}") + "}"
    (tmp_path / "twice.json").write_text(text[:-1] + "," + events[:-1] + "}", encoding="utf-8")
    with pytest.raises(FileFormatError, match="traceEvents twice"):
        read_trace(tmp_path / "twice.json", 8)


def test_steps_that_overlap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="ProfilerStep#4 begins before ProfilerStep#3 has ended"):
        of(tmp_path, host_step(3, 0) + host_step(4, 5000))


def test_a_trace_of_which_too_much_would_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_marks, "_CHECKED_EVERY", 1)
    for limit, events in (("MOST_SPANS", host_step(3, 0)), ("MOST_KERNELS", device_step(3, 0))):
        with monkeypatch.context() as patched, pytest.raises(FileFormatError, match="of steps, layers") as refused:
            patched.setattr(kept_marks, limit, 2)
            of(tmp_path, events)
        assert "record fewer steps" in refused.value.remedy


def test_an_allreduce_done_by_the_backend_belongs_to_the_first_call_of_its_size() -> None:
    def part(start_s: float, elements: int | None, done_s: float | None = None) -> Allreduce:
        return Allreduce(start_s, start_s, "1/1", elements=elements, dtype="float32", ranks=2, done_s=done_s)

    calls = [part(1, 10), part(2, None), part(3, 10), part(4, 20)]
    steps._attach(
        calls, [part(1.5, 99, 7.0), part(3, 10, 8.0), part(5, 20, 9.0), part(6, 30, 10.0), part(7, None, 11.0)]
    )
    assert [call.done_s for call in calls] == [8.0, 9.0, 11.0, None]


def test_more_ranks_than_there_can_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="says that 1000000000000 ranks trained"):
        of(tmp_path, host_step(3, 0), world_size=10**12)
