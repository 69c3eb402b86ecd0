"""Many predictions: over ranges of devices, by the workers of an executor, and their picture."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from python_path import extended_path
from small_step import machine, workload

from dpsim.cli.readers import counts_or_layouts
from dpsim.errors import ConfigError
from dpsim.launch import child_process
from dpsim.launch.jobs import mpiexec_path
from dpsim.launch.workers import in_order
from dpsim.model import predict_points
from dpsim.report.charts import Lines
from dpsim.report.prediction_chart import scaling_chart
from dpsim.setting import Grid

MACHINES = Path(__file__).parents[2] / "experiments" / "machines"
points_module = importlib.import_module("dpsim.model.points")


@pytest.mark.parametrize("pool", [ProcessPoolExecutor, ThreadPoolExecutor])
def test_an_executor_predicts_the_same_points(pool: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_module, "in_order", functools.partial(in_order, chunk=2))
    grid = Grid.of(devices=[2, 4, 8], fusion_threshold_bytes=[0.0, 100.0, 1e9], local_batch=4)
    with pool(2) as executor:
        assert predict_points(workload(), machine(), grid, executor) == predict_points(workload(), machine(), grid)


def test_a_range_of_devices_doubles_and_ends_where_it_says() -> None:
    assert counts_or_layouts("8..100") == (8, 16, 32, 64, 100)
    assert counts_or_layouts("3..12,2x4,8..8") == (3, 6, 12, "2x4", 8)
    assert len(counts_or_layouts("1..100000")) == 18
    for wrong in ("8..", "..8", "8..4", "2x4..8", "0..4"):
        with pytest.raises(ConfigError, match=f"--devices .*{re.escape(wrong)}"):
            counts_or_layouts(wrong)


def test_the_picture_has_the_efficiency_with_its_band_and_shares_that_add_up() -> None:
    points, summary = predict_points(
        workload(), machine(), Grid.of(devices=[2, 4, 8, 16], fusion_threshold_bytes=[0.0, 1e9], local_batch=[2, 4])
    )
    efficiency, shares = scaling_chart(points, summary["best"], weak=True).panels
    assert isinstance(efficiency, Lines) and isinstance(shares, Lines)
    assert [series.name for series in efficiency.series] == ["batch 2", "batch 4"]
    for series, batch in zip(efficiency.series, (2, 4), strict=True):
        best = [each for each in summary["best"] if each["local_batch"] == batch]
        assert list(series.y) == [each["speedup"] / each["devices"] for each in best]
        assert all(low <= y <= high for low, y, high in zip(series.low, series.y, series.high, strict=True))
    sums = [sum(parts) for parts in zip(*(series.y for series in shares.series), strict=True)]
    assert sums == pytest.approx([1.0] * 4)


def test_a_picture_of_one_number_of_devices_is_refused() -> None:
    points, summary = predict_points(
        workload(), machine(), Grid.of(devices=2, fusion_threshold_bytes=0.0, local_batch=4)
    )
    with pytest.raises(ConfigError, match="two or more numbers of devices"):
        scaling_chart(points, summary["best"], weak=True)


def test_the_command_draws_the_picture(dpsim: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    files = ("--workload", MACHINES / "googlenet_k80.toml", "--machine", MACHINES / "k80_10gbe.toml")
    plot = tmp_path / "scaling.svg"
    code, out, _ = dpsim("predict", *files, "--devices", "8..100000", "--local-batch", "16", "--plot", plot)
    assert code == 0 and "\n100000 " in out and plot.read_text(encoding="utf-8").startswith("<?xml")
    code, _, err = dpsim("predict", *files, "--devices", "8", "--plot", tmp_path / "scaling.txt")
    assert code == 2 and "scaling.txt" in err


def _predicted(before: list[str], executor: str, **variables: str) -> bytes:
    """Return the points and the summary that a command line predicts, with words ``before`` those of dpsim."""
    files = [str(MACHINES / name) for name in ("googlenet_k80.toml", "k80_10gbe.toml")]
    command = [*before, "-m", "dpsim", "predict", "--workload", files[0], "--machine", files[1], "--local-batch", "16"]
    command += ["--devices", "8..64", "--fusion-threshold", ",".join(f"{n}KiB" for n in range(40)), "--json"]
    environment = os.environ | variables | {"PYTHONPATH": extended_path(Path(__file__).parents[2])}
    done = child_process.run([*command, "--executor", executor], env=environment, timeout_s=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return json.dumps([said["points"], said["summary"]]).encode()


def test_processes_and_ranks_predict_the_same_to_the_bit() -> None:
    mpiexec, python = mpiexec_path(), sys.executable
    assert mpiexec is not None
    pool = "mpi4py.futures:MPIPoolExecutor"
    here = _predicted([python], "1")
    assert here.count(b"predicted_step_s") >= 160
    assert _predicted([python], "2") == here
    assert _predicted([mpiexec, "-n", "3", python, "-m", "mpi4py.futures"], pool) == here
    assert _predicted([mpiexec, "-n", "1", python], pool, MPI4PY_FUTURES_MAX_WORKERS="2") == here


@pytest.mark.skipif(importlib.util.find_spec("executorlib") is None, reason="executorlib is not installed")
def test_executorlib_predicts_the_same_to_the_bit() -> None:
    assert _predicted([sys.executable], "executorlib:SingleNodeExecutor") == _predicted([sys.executable], "1")
