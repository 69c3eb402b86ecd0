"""What machine files leave open: flags state it, and help and pages name the numbers that are assumed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from published_files import EXPERIMENTS, PREDICT
from small_step import machine, workload

from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Link, Machine
from dpsim.model.defaults import DEFAULTS, WIDTHS, with_defaults, with_stated
from dpsim.model.interval import predict, predict_with_interval, ratio_interval
from dpsim.plan import Plan
from dpsim.uncertainty import CONTENTION_ENDS, IntervalWidth

Dpsim = Callable[..., tuple[int, str, str]]
ASSUMED = {default.field: default.value for default in DEFAULTS}
DOUBTS = {default.field: default.doubt for default in DEFAULTS}
PAGES = EXPERIMENTS.parent / "docs" / "predict.md", EXPERIMENTS / "machines" / "README.md"


@pytest.mark.parametrize(
    ("field", "value", "in_file"),
    [
        ("compute_slowdown", 1.3, (ComputeSlowdown(devices=2, factor=1.1),)),
        ("fixed_share", 0.2, 0.0),
        ("contention", 1.5, 1.0),
        ("loss_growth", 0.03, 0.0),
        ("computation_taken", 0.4, 0.0),
        ("collective_overhead_s", 2e-5, 0.0),
    ],
)
def test_what_somebody_states_is_taken_once_and_not_assumed(field: str, value: float, in_file: Any) -> None:
    stated = with_stated(workload(), machine(), field, value)
    slowdowns = [(slowdown.devices, slowdown.factor) for slowdown in stated.compute_slowdown]
    assert slowdowns == [(2, 1.3)] if field == "compute_slowdown" else getattr(stated, field) == value
    filled = with_defaults(workload(), stated)
    assert set(filled.assumed) == (ASSUMED.keys() | {"interval_widths"}) - {field}
    assert getattr(filled, field) == getattr(stated, field)
    with pytest.raises(ConfigError, match=f"stated already, by {field} of the machine"):
        with_stated(workload(), machine(**{field: in_file}), field, value)


def test_intervals_that_the_machine_states_are_not_assumed() -> None:
    widths = (IntervalWidth(group="any", factor=2.0),)
    assert with_defaults(workload(), machine(interval_widths=widths)).interval_widths == widths
    assert with_defaults(workload(), machine()).interval_widths == WIDTHS


def test_a_flag_says_what_a_file_would_say(dpsim: Dpsim) -> None:
    at = (*PREDICT, "--devices", "4", "--local-batch", "16", "--set", "overlap=thread")
    plain, contended = (dpsim(*at, *flag)[1] for flag in ((), ("--assume", "contention=3")))
    assert "assumed to last 1.8 times as long as alone" in " ".join(plain.split())
    assert "an allreduce beside backward is assumed" not in " ".join(contended.split())


@pytest.mark.parametrize("threshold", [0.0, 2.0**12, math.inf])
def test_the_interval_reaches_what_an_assumed_contention_could_be(threshold: float) -> None:
    at = Plan(devices=8, global_batch=64, overlap="thread", algorithm="ring", fusion_threshold_bytes=threshold)
    link = Link(latency_s=0.1, bandwidth_bytes_per_s=200.0)
    assumed = with_defaults(workload(), Machine(name="m", link=link))
    alone, predicted = (
        predict_with_interval(workload(), assumed, each) for each in (at.on_one_device(global_batch=8), at)
    )
    low, high = ratio_interval(alone, predicted)
    for contention in reversed(CONTENTION_ENDS):
        stated = with_stated(workload(), msgspec.structs.replace(assumed, contention=None), "contention", contention)
        step_s = predict(workload(), stated, at).step_s
        assert predicted[0].low_s <= step_s <= predicted[0].high_s
        assert low <= alone[0].step_s / step_s <= high


def test_help_and_pages_name_the_numbers_that_are_assumed(dpsim: Dpsim) -> None:
    _, text, _ = dpsim("predict", "--help-all")
    numbers = re.findall(r"assumed:\s+([\d.]+)", re.sub(r"[\s│]+", " ", text))
    named = ("compute_slowdown", "loss_growth", "fixed_share", "contention", "computation_taken")
    assert numbers == [f"{ASSUMED[field]:g}" for field in named] + ["0"]
    prediction, machines = (Path(page).read_text(encoding="utf-8") for page in PAGES)
    for said in (
        f"computation takes {ASSUMED['compute_slowdown']:g} times as long",
        f"{ASSUMED['fixed_share'] * 100:g} % of the layer times",
        f"takes {ASSUMED['contention']:g} times as long as alone",
        f"adds {ASSUMED['loss_growth']:g} to the logarithm",
        f"takes {ASSUMED['computation_taken']:g} of its time alone",
    ):
        assert said in prediction
    contention = next(default for default in DEFAULTS if default.field == "contention")
    for said in (
        f"a factor of {ASSUMED['compute_slowdown']:g} on two devices is assumed",
        f"left out: {ASSUMED['fixed_share']:g} is assumed",
        f"{ASSUMED['loss_growth']:g} and {DOUBTS['loss_growth']:g} are assumed",
        f"{ASSUMED['computation_taken']:g} and {DOUBTS['computation_taken']:g}, unless",
        f"left out: {contention.value:g} and {contention.doubt:g} are assumed",
    ):
        assert said in machines
