"""A sweep as a job array on a real Slurm, of this one machine: tasks are killed and meet their limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dpsim.experiments.one_node_slurm import one_node_slurm, unusable
from dpsim.harness.sweep.check import check
from dpsim.harness.sweep.sweep import read_swept

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unusable()), reason=unusable() or "Slurm is there"),
]
RINGS = """\
schema = "dpsim.experiment/2"
name = "rings"
budget_s = 6
interval = 0.000001
base = {model = "mlp:64x8", devices = 2, overlap = "off", global_batch = 128}
axes = {network = ["node", "paced:50us,1gbit", "paced:1ms,200mbit"], algorithm = ["ring", "halving-doubling"]}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Mapping[str, str]]:
    with one_node_slurm() as environment:
        yield environment


def ran(environment: Mapping[str, str], *command: str | Path) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def test_killed_tasks_and_one_at_its_limit_end_in_the_report_of_a_sweep_in_one_job(
    tmp_path: Path, slurm: Mapping[str, str]
) -> None:
    file, folder = tmp_path / "rings.toml", tmp_path / "rings"
    file.write_text(RINGS)
    sweep = (sys.executable, "-m", "dpsim", "sweep", file, "--output")
    array = (*sweep, folder, "--array", "slurm:time=00:10:00,at-once=1")
    shown = ran(slurm, *array)
    assert "3 of 3 tasks, and the report" in shown
    job = shown.split()[3]

    until((folder / "tasks" / "0" / "samples.json").exists)
    ran(slurm, "scancel", "--signal=KILL", "--full", f"{job}_0")
    until((folder / "tasks" / "1" / "predictions.json").exists)
    ran(slurm, "scancel", f"{job}_1")
    until((folder / "tasks" / "2" / "samples.json").exists)
    # What Slurm sends before the time limit. It may answer that a job is in transition, and sends it all the same.
    subprocess.run(("scancel", "--signal=USR1", "--batch", f"{job}_2"), env=slurm, check=False)
    until(lambda: "Restarts=1" in ran(slurm, "scontrol", "show", "job", f"{job}_2"))
    until(lambda: not ran(slurm, "squeue", "-h"))
    said = (folder / "tasks" / "last.out").read_text()
    assert "2 of 3 tasks of" in said and "task 0: " in said and "task 1: " in said and "Traceback" not in said
    assert "continuing an interrupted sweep" in (folder / "tasks" / "2.out").read_text()
    assert not (folder / "results.json").exists()

    finished = (folder / "tasks" / "2" / "samples.json").read_bytes()
    assert "2 of 3 tasks, and the report" in ran(slurm, *array)
    until(lambda: not ran(slurm, "squeue", "-h"))
    said = (folder / "tasks" / "last.out").read_text()
    assert (folder / "results.json").exists(), said
    assert (folder / "tasks" / "2" / "samples.json").read_bytes() == finished
    assert "continuing an interrupted sweep" in (folder / "tasks" / "0.out").read_text()
    assert check(folder).damage == "" and "holds this experiment already" not in said

    ran(os.environ, *sweep, tmp_path / "alone")
    by_array, alone = read_swept(folder).comparison, read_swept(tmp_path / "alone").comparison
    assert [each.setting for each in by_array.points] == [each.setting for each in alone.points]
    assert [each.name for each in by_array.groups] == [each.name for each in alone.groups]
    assert by_array.chosen_overlap == alone.chosen_overlap and by_array.not_measured == ()
    pages = [(each / "report.md").read_text().splitlines() for each in (folder, tmp_path / "alone")]
    heads = [[line for line in page if line.startswith("| algorithm")] for page in pages]
    assert heads[0] == heads[1] != []
