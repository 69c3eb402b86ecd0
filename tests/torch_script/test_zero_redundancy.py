"""The broadcasts of ``zero1:gather=broadcast`` are those that PyTorch's ``ZeroRedundancyOptimizer`` asks gloo for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpsim.lowering import lower
from dpsim.plan import Plan
from dpsim.schedule import BROADCAST_EVENT
from dpsim.workload import Layer, Tensor, Workload

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parent / "scripts" / "zero_redundancy.py"


def workload() -> Workload:
    """The layers of the script's model."""
    layers = [
        Layer(
            name=f"linear{number}",
            forward_s=(1e-4,),
            backward_s=(2e-4,),
            tensors=(
                Tensor(name=f"{number}.weight", shape=(outputs, inputs)),
                Tensor(name=f"{number}.bias", shape=(outputs,)),
            ),
        )
        for number, (inputs, outputs) in enumerate([(30, 16), (16, 9), (9, 3)])
    ]
    return Workload(name="script", local_batches=(8,), layers=tuple(layers))


@pytest.mark.parametrize("devices", [2, 3])
def test_tensors_owners_order_and_bytes_are_those_of_gloo(devices: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(devices), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(devices)
    ]
    of_ranks = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    schedule = lower(workload(), Plan(devices=devices, global_batch=8 * devices, strategy="zero1:gather=broadcast"))
    sent = np.flatnonzero(schedule.kind == BROADCAST_EVENT)
    expected = [
        [schedule.owners[tensor], size, True]
        for tensor, size in zip(schedule.broadcast_tensors, schedule.size_bytes[sent].tolist(), strict=True)
    ]
    assert of_ranks == [expected] * devices
