"""Prices a Schedule on a Machine: step times, timelines, memory, the nulls. Needs no MPI and runs on any laptop.

The module can be called: ``dpsim.predict(workload, machine, plan)`` also takes the paths of files.
"""

import sys
from pathlib import Path
from types import ModuleType

from dpsim import machine as _machine
from dpsim import workload as _workload
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.compare import choose_overlap, nulls, recommended
from dpsim.predict.cost import alpha_beta, collective_cost, compute_slowdown
from dpsim.predict.interval import LEVEL, interval, predict
from dpsim.predict.memory import Memory, memory
from dpsim.predict.points import predict_points
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
    "interval",
    "memory",
    "nulls",
    "predict",
    "predict_points",
    "price",
    "recommended",
    "scheduled",
    "step_times",
    "timeline",
]


class _Callable(ModuleType):
    def __call__(
        self, workload: _workload.Workload | Path | str, machine: Machine | Path | str, plan: Plan
    ) -> Prediction:
        """The predicted step of a plan; workload and machine may be files. Raises ``FileFormatError``."""
        trained = _workload.read(workload) if isinstance(workload, (Path, str)) else workload
        return predict(trained, _machine.read(machine) if isinstance(machine, (Path, str)) else machine, plan)


sys.modules[__name__].__class__ = _Callable
