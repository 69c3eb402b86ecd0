"""Prices a Schedule on a Machine: step times, timelines, memory, the nulls. Needs no MPI and runs on any laptop.

The module can be called: ``dpsim.predict(workload, machine, devices=8)`` also takes the paths of files.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dpsim import machine as _machine
from dpsim import workload as _workload
from dpsim.collective import parse_devices
from dpsim.errors import ConfigError
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.compare import choose_overlap, nulls, recommended
from dpsim.predict.cost import alpha_beta, collective_cost, compute_slowdown
from dpsim.predict.defaults import for_prediction
from dpsim.predict.interval import interval, predict
from dpsim.predict.memory import Memory, memory
from dpsim.predict.points import predict_on_machines, predict_one, predict_points
from dpsim.predict.residuals import LEVEL
from dpsim.predict.step import Prediction, PricedStep, price, scheduled, step_times, timeline

__all__ = [
    "LEVEL",
    "Memory",
    "Prediction",
    "PricedStep",
    "alpha_beta",
    "choose_overlap",
    "collective_cost",
    "compute_slowdown",
    "for_prediction",
    "interval",
    "memory",
    "nulls",
    "predict",
    "predict_on_machines",
    "predict_one",
    "predict_points",
    "price",
    "recommended",
    "scheduled",
    "step_times",
    "timeline",
]


class _Callable(ModuleType):
    def __call__(
        self,
        workload: _workload.Workload | Path | str,
        machine: Machine | Path | str,
        plan: Plan | None = None,
        *,
        devices: int | str | None = None,
        threshold: float | None = None,
        **settings: Any,
    ) -> Prediction:
        """Predict one step; workload and machine may be files.

        With ``devices`` (8, or a layout: "2x4"), ``threshold`` in bytes and the other ``settings`` that
        ``predict_points`` takes, the defaults are those of ``dpsim predict``. A ``plan`` is predicted as it is written.
        Raises ``ConfigError`` and ``FileFormatError``.
        """
        trained = _workload.read(workload) if isinstance(workload, (Path, str)) else workload
        known = _machine.read(machine) if isinstance(machine, (Path, str)) else machine
        if isinstance(machine, (Path, str)):
            known = for_prediction(trained, known, [plan.devices if plan else parse_devices(devices or 1)[0]])
        if plan is None and devices is not None:
            thresholds = [] if threshold is None else [threshold]
            return predict_one(trained, known, devices, thresholds, **settings)
        if plan is None or devices is not None or threshold is not None or settings:
            raise ConfigError(
                "neither a plan nor devices" if plan is None else "a plan and other settings",
                allowed="a dpsim.Plan alone, or devices=8 and other settings",
                remedy='write it like dpsim.predict("w.json", "m.json", devices=8, global_batch=64)',
            )
        return predict(trained, known, plan)


sys.modules[__name__].__class__ = _Callable
