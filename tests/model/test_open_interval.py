"""An interval that is wider than all numbers is open, and no error."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from dpsim import machine, workload
from dpsim.model import predict
from dpsim.plan import Plan
from dpsim.uncertainty import IntervalWidth

MACHINES = Path(__file__).parents[2] / "dpsim" / "experiments" / "machines"


def test_an_interval_without_bound_is_open() -> None:
    layers = workload.read(MACHINES / "googlenet_k80.toml")
    widths = (IntervalWidth(group="any", factor=1e6, studies=0),)
    known = msgspec.structs.replace(machine.read("10gbe"), interval_widths=widths)
    plan = Plan(devices=8, global_batch=512, fusion_rule="one", algorithm="ring")
    width = predict(layers, known, plan)
    assert width.step_s > 0 and width.low_s == 0 and width.high_s == math.inf
