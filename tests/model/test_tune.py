"""Tuning: which caps are compared, what a gain and its interval are, which devices pay, and the lines to paste."""

from __future__ import annotations

from typing import Any

import pytest
from small_training import machine, workload

from dpsim.errors import ConfigError
from dpsim.frameworks import FRAMEWORKS
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model import scheduled
from dpsim.model.ranking import Tuned, Tuning, tune
from dpsim.report import tuning as report
from dpsim.setting import Grid

KIB = 1024


def tuned(link: Machine, devices: int = 4, **settings: Any) -> Tuned:
    return tune(
        workload(), link, Grid.of(devices=devices, fusion_rule="ddp", algorithm="ring", overlap="thread", **settings)
    ).tuned[0]


def test_every_list_of_buckets_is_compared_once_and_the_fastest_cap_is_first() -> None:
    found = tuned(machine(latency_s=1e-5))
    buckets = [tuple(scheduled(workload(), machine(), each.plan).bucket_size_bytes.tolist()) for each in found.caps]
    assert len({*buckets}) == len(buckets) >= 3
    assert {len(each) for each in buckets} == {1, 2, 4}, "one of all tensors, pairs, and one a tensor"
    speeds = [each.images_per_s for each in found.caps]
    assert speeds == sorted(speeds, reverse=True)
    assert sum(each is found.default for each in found.caps) == 1 and found.default.gain == (1.0, 1.0, 1.0)
    for each in found.caps:
        assert each.gain.value == pytest.approx(each.images_per_s / found.default.images_per_s)
        assert each.gain.low <= each.gain.value <= each.gain.high


def test_a_gain_within_its_interval_is_not_advised() -> None:
    slow = tuned(machine(latency_s=1e-5, bandwidth=2e7))
    assert slow.default.predicted[0].buckets == 1, "all of it is exposed"
    assert slow.advised is slow.caps[0] and slow.advised.gain.low > 1 and slow.undecided is None
    fast = tuned(machine(latency_s=1e-6, bandwidth=1e11))
    assert fast.advised is fast.default and fast.caps[0].gain.low <= 1
    assert fast.undecided == "model" or fast.caps[0] is fast.default


def test_what_is_uncertain_about_all_settings_alike_does_not_widen_a_gain() -> None:
    link = machine(latency_s=1e-5, bandwidth=1e9)
    sure, unsure = (
        tune(
            workload(relative_uncertainty=error),
            link,
            Grid.of(devices=4, fusion_rule="ddp", algorithm="ring", overlap="thread"),
        ).tuned[0]
        for error in (0.01, 0.2)
    )
    steps = [each.default.predicted[0] for each in (sure, unsure)]
    widths = [(step.high_s or 0.0) / (step.low_s or 1.0) - 1 for step in steps]
    gains = [each.caps[-1].gain.high / each.caps[-1].gain.low - 1 for each in (sure, unsure)]
    assert widths[1] > widths[0] + 0.2 and gains[1] < gains[0] + 0.05


def test_batches_and_accumulations_keep_the_samples_of_a_micro_batch() -> None:
    found = tuned(machine(bandwidth=1e8), local_batch=(4, 8))
    assert found.default.plan.local_batch == 4
    assert {each.plan.local_batch for each in found.batches} == {4, 8}
    assert {each.plan.accumulate for each in found.accumulations} == {1, 2, 4, 8}
    assert {each.plan.local_batch for each in found.accumulations} == {4}
    assert found.accumulations[0].plan.accumulate == 8, "the fewest allreduces a sample"
    best = found.batches[0]
    assert best.plan.global_batch == 8 * 4 and best.gain.value > 1
    assert found.together.images_per_s >= max(found.caps[0].images_per_s, best.images_per_s)


def test_a_batch_that_does_not_fit_is_left_out() -> None:
    small = tuned(machine(memory_bytes=800 * KIB), local_batch=(4, 4096))
    assert {each.plan.local_batch for each in small.batches} == {4}
    assert small.together.plan.local_batch == 4


def growth(tuning: Tuning) -> list[tuple[int, bool]]:
    return [(each.more.devices, each.pays) for each in tuning.growth]


def linked(latency_s: float) -> Machine:
    return Machine(name="m", link=Link(latency_s=latency_s, bandwidth_bytes_per_s=1e9))


def test_devices_are_compared_with_the_most_before_them_that_pay_in_table_and_sentence_alike() -> None:
    """Twice as many nodes train twice as much, and still less than the devices of one node alone would add."""
    tables = tuple(
        AllreduceCost(algorithm="nccl", devices=n, layout=layout, sizes_bytes=(1, 2**20), time_s=(time_s, 2 * time_s))
        for n, layout, time_s in ((8, "1x8", 1e-7), (16, "2x8", 3e-3), (32, "4x8", 3e-3))
    )
    tuning = tune(
        workload(), Machine(name="m", allreduce=tables), Grid.of(devices=["1x8", "2x8", "4x8"], fusion_rule="ddp")
    )
    assert growth(tuning) == [(8, True), (16, False), (32, False)]
    assert [each.fewer.devices for each in tuning.growth] == [1, 8, 8]
    (first, *_) = report.sentences(tuning)
    assert first.startswith("Beyond 8 devices more stop paying: 16 train")
    assert [each["fewer_layout"] for each in report.growth_records(tuning)] == ["1", "1x8", "1x8"]


def test_devices_pay_until_the_network_takes_what_they_add() -> None:
    fast = tune(workload(), linked(1e-7), Grid.of(devices=[2, 4, 8], fusion_rule="ddp"))
    assert growth(fast) == [(2, True), (4, True), (8, True)] and fast.first_not_paying is None
    assert fast.advised.default.plan.devices == 8
    slow = tune(workload(), linked(1.0), Grid.of(devices=[2, 4], fusion_rule="ddp"))
    assert growth(slow)[0] == (2, False)
    assert slow.advised.default.plan.devices == 2
    strong = tune(workload(), linked(1e-3), Grid.of(devices=[2, 4, 8, 16], fusion_rule="ddp", global_batch=16))
    assert {each.default.plan.global_batch for each in strong.tuned} == {16}
    assert strong.first_not_paying is not None
    assert all(len(each.batches) == len(each.accumulations) == 1 for each in strong.tuned)


@pytest.mark.parametrize(
    ("devices", "rule", "said"),
    [([1], "ddp", "on which nothing is communicated"), ([2], "per-tensor", "no bucket cap to tune")],
)
def test_what_cannot_be_tuned_is_said(devices: list[int], rule: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tune(workload(), machine(), Grid.of(devices=devices, fusion_rule=rule))


def test_each_framework_has_its_line_in_its_own_unit() -> None:
    lines = {name: framework.line(4 * 2**20, 4) for name, framework in FRAMEWORKS.items()}
    assert lines == {
        "ddp": "DistributedDataParallel(model, bucket_cap_mb=4)",
        "horovod": "HOROVOD_FUSION_THRESHOLD=4194304",
        "tarantella": "tarantella --fusion-threshold=4096 -- train.py",
        "deepspeed": '"zero_optimization": {"reduce_bucket_size": 1048576}',
    }
    assert FRAMEWORKS["ddp"].line(32 * KIB, 4).endswith("bucket_cap_mb=0.03125)")


def test_the_answer_is_one_sentence_and_the_line_of_the_advised_cap() -> None:
    found = tuned(machine(latency_s=1e-5, bandwidth=2e7))
    sentence, line = report.answer(found, FRAMEWORKS["ddp"], workload())
    assert sentence.startswith("Set DDP's bucket cap to ") and sentence.count(". ") == 0 and sentence.endswith(".")
    assert line == report.paste(found.advised.plan, FRAMEWORKS["ddp"], workload())
    leave = tuned(machine(latency_s=1e-6, bandwidth=1e11))
    assert report.answer(leave, FRAMEWORKS["ddp"], workload()) == (
        "No bucket cap is certainly better than DDP's default on 4 devices: leave it.",
        "",
    )
