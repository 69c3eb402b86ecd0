"""Calibrates what PyTorch's gloo takes on this machine, by a script of dpsim's own in the job's environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpsim.harness.machines import merged
from dpsim.harness.script.experiment import script_experiment
from dpsim.harness.script.measure import ScriptStudy
from dpsim.launch.job_python import JobPython
from dpsim.launch.scratch import scratch
from dpsim.machine import NODE, Machine, Network
from dpsim.progress import Progress
from dpsim.strategy import DataParallel

_BYTES, _LONGEST_S = 30 * 2**20, 0.3
"""The gradients of the script, and what one of them after the other may take on a network: others are smaller."""
_DIVISORS = (1, 2, 4, 8, 16)
SCRIPT = Path(__file__).parents[2] / "torch" / "script" / "stand_in.py"


def calibrate_gloo(
    devices: Sequence[int],
    by: JobPython,
    progress: Progress,
    strategies: Sequence[str] = (DataParallel.name,),
    budget_s: float = 45.0,
    network: str = NODE,
) -> Machine:
    """Return this machine with the times of gloo's collectives between these numbers of ranks on a network.

    They are those that DDP starts, or with the strategy zero3 those of FSDP. Raises ``ConfigError``.
    """
    rate = Network.parse(network).rate_bytes_per_s
    divisor = next((each for each in _DIVISORS if _BYTES / each**2 < _LONGEST_S * rate), _DIVISORS[-1])
    machines: list[Machine] = []
    for strategy in strategies:
        for count in devices:
            experiment = script_experiment(
                str(SCRIPT),
                arguments=(str(divisor),),
                devices=(count,),
                caps_bytes=(None,) if strategy == DataParallel.name else (),
                communication=("gloo",),
                networks=(network,),
                strategy=strategy,
                budget_s=budget_s,
            )
            with scratch("gloo") as folder:
                predictions = ScriptStudy(experiment=experiment, by=by).predict(folder / "predictions", progress)
            machines += predictions.machines
    return msgspec.structs.replace(merged(machines) if len(machines) > 1 else machines[0], interval_widths=())
