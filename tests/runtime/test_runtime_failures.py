"""A loss that is not finite names the step and the place, and ends every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim.errors import NotFiniteError
from dpsim.launch.jobs import mpiexec_path

HERE = Path(__file__).parents[1] / "support"
OnRanks = Callable[..., Any]


def spoilt(overlap: str, **more: Any) -> dict[str, Any]:
    plan = {"global_batch": 8, "fusion_rule": "per-tensor", "overlap": overlap}
    dataset = "synthetic:4x4x1,classes=3,train=64,test=8"
    return {"model": "mlp:6,5", "dataset": dataset, "spoil": True, "plan": plan} | more


@pytest.mark.parametrize("overlap", ["off", "inline", "poll", "thread"])
def test_nan_in_one_ranks_data_names_the_step_and_the_input(overlap: str, on_ranks: OnRanks) -> None:
    with pytest.raises(NotFiniteError, match=r"the loss is nan in step 3; .* the input batch") as caught:
        on_ranks("ranks_runtime:not_finite", spoilt(overlap), devices=3)
    assert "--learning-rate" in caught.value.remedy


def test_divergence_names_the_step_and_the_layer(on_ranks: OnRanks) -> None:
    argument = spoilt("off", spoil=False)
    argument["plan"]["optimizer"] = {"kind": "sgd", "learning_rate": 1e30}
    with pytest.raises(NotFiniteError, match=r"in step \d; .* layer 'dense\d'"):
        on_ranks("ranks_runtime:not_finite", argument, devices=2)


PROGRAM = """
import json, sys
from dpsim.launch.jobs import on_ranks
on_ranks("ranks_runtime:not_finite", json.loads(sys.argv[1]), devices=3)
"""


@pytest.mark.parametrize("overlap", ["off", "thread"])
def test_all_ranks_of_a_job_end_with_exit_code_2_and_leave_nothing_behind(overlap: str, tmp_path: Path) -> None:
    mpiexec = mpiexec_path()
    assert mpiexec is not None
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    mark = str(tmp_path)  # by which the ranks' processes can be told
    command = [mpiexec, "-n", "3", sys.executable, "-c", PROGRAM, json.dumps(spoilt(overlap)), mark]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert ended.returncode == 2, ended.stderr
    assert "in step 3" in ended.stderr and "the input batch" in ended.stderr
    assert "Traceback" not in ended.stderr
    end_s = time.monotonic() + 10
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in command_line(path)]:
        assert time.monotonic() < end_s, f"still there: {left}"
        time.sleep(0.05)


def command_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
