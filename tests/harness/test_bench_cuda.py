"""``dpsim bench allreduce --backend cuda`` in numba's CUDA simulator: record, points and report; wrong sums."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim.errors import ConfigError
from dpsim.records import bench
from dpsim.records.bench import AllreduceBench
from dpsim.study.runners.allreduce import systems
from dpsim.study.runners.allreduce.algorithms import bench_algorithms
from dpsim.study.runners.allreduce.turns import MEMCPY, SCALING

Dpsim = Callable[..., tuple[int, str, str]]
Python = Callable[..., subprocess.CompletedProcess[str]]
WAYS = [(in_place, cached) for in_place in (False, True) for cached in (False, True)]
needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed: pip install numba-cuda"
)


@pytest.mark.slow
@needs_numba_cuda
def test_every_version_runs_in_the_simulator_and_everything_says_so(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(systems, "gpu_count", lambda: 2)
    monkeypatch.setattr(systems, "nccl_missing", lambda: "none here")
    folder = tmp_path / "report"
    flags = "--backend cuda --devices 2 --min 66B --max 66B --dtype bfloat16 --budget 10ms --json"
    code, out, err = dpsim("bench", "allreduce", *flags.split(), "--output", folder)
    assert code == 0, err
    messages = json.loads(out)
    assert messages["summary"]["wrong"] == 0 and messages["summary"]["simulated"] is True
    given = {(p["dtype"], p["devices"], p["count"], p["wrong"], p["simulated"]) for p in messages["points"]}
    assert given == {("bfloat16", 2, 33, 0, True)}
    actual = {(p["system"], p["algorithm"], p["in_place"], p["cached"]) for p in messages["points"]}
    within = {("dpsim", name, *way) for name in bench_algorithms("cuda") for way in WAYS}
    between = {(bench.BETWEEN, name, True, cached) for name in bench_algorithms("cuda") for cached in (False, True)}
    assert actual == within | between
    assert all(p["time_s"] > 0 and p["fraction_of_bound"] is None for p in messages["points"])
    assert [size["default"] for size in messages["summary"]["sizes"]] == ["two-shot"]
    kept = bench.read(folder / bench.RECORD)
    assert [system.simulated for system in kept.systems] == [True, True]
    assert kept.systems[0].library.startswith("numba's CUDA simulator")
    for reference in (SCALING, MEMCPY):
        assert {series.cached for series in kept.series if series.algorithm == reference} == {False, True}
    assert [(series.algorithm, series.cached) for series in kept.series if series.repeat] == [("two-shot", False)]
    text = (folder / "report.md").read_text()
    assert "on 2 devices, numba's CUDA simulator" in text and "times mean nothing" in text
    assert "(simulator)" in (folder / "bandwidth.svg").read_text()


WRONG = """
import json
from mpi4py import MPI
from dpsim.comm.cuda.simulator import SimulatedDevice
from dpsim.errors import ConfigError
from dpsim.study.runners.allreduce import cuda, logical
sound = logical.Lane.sample
def spoilt(lane, source, target, timed):
    found = sound(lane, source, target, timed)
    if target.nbytes and spoil:
        target[0] ^= 1
    return found

def logical_devices(ranks, dtype):
    argument = {"ranks": ranks, "dtype": dtype, "algorithms": ["ring", "two-shot"]}
    return cuda.LogicalDevices(MPI.COMM_SELF, argument)

logical.Lane.sample = spoilt
told = {}
for dtype in ("float16", "float32", "float64"):
    alone = logical_devices(3, dtype)
    spoil = False
    right = alone.prepare(256, 1)["variants"]
    spoil = True
    told[dtype] = [right, alone.prepare(256, 1)["variants"], alone.visit(256, 2, [1, 2, 1], [1, 2, 1])]
SimulatedDevice.free_bytes = lambda device: 1000
try:
    logical_devices(2, "float32").prepare(256, 1)
except ConfigError as error:
    told["refused"] = str(error)
print(json.dumps(told))
"""


@needs_numba_cuda
def test_a_wrong_bit_is_counted_in_the_check_and_while_timing_and_what_does_not_fit_is_refused(python: Python) -> None:
    done = python("-c", WRONG, env={"NUMBA_ENABLE_CUDASIM": "1"})
    assert done.returncode == 0, done.stderr
    messages: dict[str, Any] = json.loads(done.stdout)
    refused = messages.pop("refused")
    assert "arrays of 256 B on 2 logical devices take 2.25 KiB" in refused and "1000 B" in refused
    for right, spoilt, visit in messages.values():
        variants = [(variant["algorithm"], variant["in_place"], variant["repeat"]) for variant in right]
        of_each = [(name, in_place, 0) for name in ("ring", "two-shot") for in_place in (True, False)]
        assert variants == [(SCALING, True, 0), (MEMCPY, False, 0), *of_each, ("two-shot", True, 1)]
        assert [way["wrong"] for way in right] == [0] * 7
        assert [way["wrong"] for way in spoilt] == [1] * 7
        assert visit["wrong"] == [1] * 7
        assert [len(times) for times in visit["fresh"]] == [1] * 7  # in the simulator one call of each
        assert [len(times) for times in visit["cached"]] == [1, 1, 1, 1, 1, 1, 0]


def test_the_simulator_takes_tiny_arrays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    with pytest.raises(ConfigError, match="every thread in Python"):
        systems.systems(AllreduceBench(backend="cuda"))
    with pytest.raises(ConfigError, match=r"nccl cannot run: 2 devices on a machine with 1 GPU"):
        systems.systems(AllreduceBench(backend="cuda", max_bytes=64, peers=("nccl",)))
    (own,) = systems.systems(AllreduceBench(backend="cuda", max_bytes=64))
    assert (own.system.kind, own.processes) == ("dpsim", 1)
