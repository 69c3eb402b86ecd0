"""A script that is profiled in turns: which visits count, and what their rows describe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from dpsim import codec
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.places import inputs_for
from dpsim.harness.sweep.experiment import predict_beforehand, predict_from
from dpsim.launch.failure_report import JobFailed
from dpsim.launch.job_python import OWN
from dpsim.records.sweep import Experiment
from dpsim.study.calibration import LOSS_S, TIME_S
from dpsim.study.environment import environment
from dpsim.study.inputs import Inputs
from dpsim.study.profile import STEP_S, ProfileConfig, computed_s, profiled_slowdowns, script_workload
from dpsim.study.rows import CalibratedCollective, ProfiledBatch, Rows
from dpsim.study.runners.job_ranks import JobRanks
from dpsim.study.runners.script import Profiler
from dpsim.study.runners.script_processes import Processes
from dpsim.torch.script.probe.in_turns.visit import Turn, Visit
from dpsim.torch.script.recorded import workload_of
from dpsim.torch.script.request import Part, ScriptRequest
from dpsim.torch.script.script_record import ScriptRecord, recorded_of
from dpsim.workload import Layer, Tensor, Workload

ALONE_S = 10e-3
ALONE, TOGETHER = (ProfiledBatch(devices=devices, local_batch=8) for devices in (1, 2))
CONFIG = ProfileConfig(local_batches=(8,), concurrent=((2, 8),), pause_s=((2, 4e-3),))


def workload(step_s: float, local_batch: int = 8) -> Workload:
    layer = Layer(
        name="0",
        kind="module",
        forward_s=(step_s / 2,),
        backward_s=(step_s / 2,),
        tensors=(Tensor(name="w", shape=(64, 64)),),
    )
    ddp = DdpSettings(torch="2.13.0", devices=2)
    return Workload(name="script", source="test", local_batches=(local_batch,), layers=(layer,), ddp=ddp)


REQUEST = ScriptRequest(script="train.py", devices=2)


class ProfilerOfWorkloads(Profiler):
    """One whose processes hand over workloads in place of the records from which these are computed."""

    def _workload(self, record: Any) -> Workload:
        of_record: Workload = record
        return of_record


class Answers(Processes):
    """Processes that answer what they were told to, and keep their turns."""

    def __init__(self, *visits: Iterable[Workload | None]) -> None:
        super().__init__()
        self._left, self.turns = list(visits), list[Turn]()

    def turn(self, turn: Turn) -> list[Visit]:
        self.turns.append(turn)
        profiled: list[Any] = list(self._left.pop(0))
        self.ended = None in profiled
        return [Visit(profiled=each, ended=each is None) for each in profiled]


def profiled(
    alone: Answers, together: Answers, rows: Rows, config: ProfileConfig = CONFIG, visits: int = 3
) -> Profiler:
    first, *_ = profilers = [
        ProfilerOfWorkloads(config, workload(1.0), case, processes, rows, REQUEST)
        for case, processes in ((ALONE, alone), (TOGETHER, together))
    ]
    for number in range(visits):
        assert all(profiler.visit(number, counted=True) for profiler in profilers)
    return first


def test_the_slowest_of_several_counts_and_several_alone_wait_as_for_an_allreduce() -> None:
    alone = Answers(*[[workload(ALONE_S)]] * 3)
    together = Answers(*[[workload(ALONE_S * of) for of in pair] for pair in ((1.1, 1.3), (1.2, 1.0), (2.0, 1.1))])
    rows = Rows()
    profiled(alone, together, rows).check()
    assert rows.values(TOGETHER, STEP_S) == pytest.approx([1.3 * ALONE_S, 1.2 * ALONE_S, 2.0 * ALONE_S])
    (slowdown,) = profiled_slowdowns(CONFIG, rows)
    assert slowdown.devices == 2 and slowdown.factor == pytest.approx(1.3) and slowdown.half_width > 0
    assert {turn.pause_s for turn in alone.turns} == {0.0} and {turn.pause_s for turn in together.turns} == {4e-3}


def test_visits_of_short_batches_and_after_the_end_of_the_script_are_left_out() -> None:
    alone = Answers([workload(ALONE_S)], [workload(ALONE_S, 3)], [workload(ALONE_S)], [None])
    together = Answers(*[[workload(ALONE_S)] * 2] * 3, [workload(ALONE_S), workload(ALONE_S, 3)], [None] * 2)
    rows = Rows()
    profiler = profiled(alone, together, rows, visits=6)
    assert len(rows.values(ALONE, STEP_S)) == 2 and len(rows.values(TOGETHER, STEP_S)) == 3
    with pytest.raises(ConfigError, match="was profiled 2 times, in turns of 8 training steps of 8 samples"):
        profiler.check()


def test_a_workload_has_the_median_of_the_visits_and_the_layers_of_the_first_profile() -> None:
    rows, seconds = Rows(), (1e-3, 3e-3, 2e-3)
    several = [[workload(2 * each)] * 2 for each in seconds]
    profiled(Answers(*[[workload(each)] for each in seconds]), Answers(*several), rows)
    of_rows = script_workload(CONFIG, workload(1.0), rows, 0)
    assert computed_s(of_rows) == pytest.approx(2e-3) and of_rows.layers[0].tensors == workload(1.0).layers[0].tensors
    assert of_rows.relative_uncertainty is not None and of_rows.relative_uncertainty > 0
    other = replace(workload(1e-3), layers=(replace(workload(1e-3).layers[0], name="1"),))
    with pytest.raises(ConfigError, match="sends its gradients in other buckets"):
        profiled(Answers([other]), Answers([other] * 2), Rows(), visits=1)


def test_times_that_are_given_stay_and_only_the_steps_of_one_and_several_are_compared() -> None:
    rows, config = Rows(), replace(CONFIG, times_given=True)
    profiled(Answers(*[[workload(1e-3)]] * 3), Answers(*[[workload(2e-3)] * 2] * 3), rows, config)
    assert script_workload(config, workload(1.0), rows, 0) == workload(1.0)
    assert profiled_slowdowns(config, rows)[0].factor == pytest.approx(2.0)


def inputs_of(experiment: Experiment, step_s: float, late_s: float) -> Inputs:
    """Rows of two places, from before the first sample and from beside the samples."""
    inputs, rows = inputs_for(experiment, workload(1.0, 4), environment()), Rows()
    for seconds in (step_s, late_s):
        for place in range(len(inputs.profiles)):
            cases = {n: ProfiledBatch(devices=n, local_batch=4, profile=place) for n in (1, 2)}
            for n, case in cases.items():
                answers = Answers(*[[workload(seconds, 4)] * n] * 6)
                profiler = ProfilerOfWorkloads(inputs.profiles[place], workload(1.0, 4), case, answers, rows, REQUEST)
                for number in range(6):
                    profiler.visit(number, counted=True)
            for subject in inputs.calibrations[place].collectives(place):
                _calibrated(subject, rows)
        if seconds is step_s:
            rows.measuring_begins()
    return replace(inputs, rows=rows.series())


def _calibrated(subject: CalibratedCollective, rows: Rows) -> None:
    for visit in range(6):
        for size in (4, 16384):
            rows.add(subject, TIME_S, visit, [1e-4], size)
            if subject.overlap:
                rows.add(subject, LOSS_S, visit, [1e-5], size)


def test_both_predictions_follow_from_the_rows_of_each_place_and_from_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    config = script_experiment(script=str(script), caps_bytes=(0.0, math.inf), networks=("node", "paced:1ms,100mbit"))
    experiment = completed(config, workload(1.0, 4))
    inputs = inputs_of(experiment, ALONE_S, 2 * ALONE_S)
    beforehand = predict_beforehand(experiment, inputs)
    blind = predict_from(beforehand, inputs, same_minutes=True)
    places = {point.setting.where: point.workload for point in blind.points}
    assert list(places) == ["node (torch-ddp-gloo)", "node (torch-ddp-mpi)", "paced:1ms,100mbit (torch-ddp-mpi)"]
    for predictions, step_s in ((beforehand, ALONE_S), (blind, 2 * ALONE_S)):
        assert [computed_s(each) for each in predictions.workloads] == pytest.approx([step_s])
        for point in predictions.points:
            machine = predictions.machines[point.machine]
            assert machine.network == point.setting.network and point.step_s >= step_s
            assert machine.calibrated_on.endswith(point.setting.runtime) and machine.source == "dpsim measure"
    assert [point.setting for point in blind.points] == [point.setting for point in beforehand.points]


SCRIPT = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(8, 8))
for _ in range({steps}):
    ddp(torch.randn(4, 8)).sum().backward()
"""


def profile(ranks: int) -> Part:
    return Part(kind="profile", number=0, ranks=ranks, script="train.py", devices=2)


def in_turns(folder: Path, text: str, turns: list[tuple[int, float]], part: Part) -> list[Any]:
    """What the ranks of a part have recorded in each turn, and how long it took; ends where the script does."""
    script = folder / "train.py"
    script.write_text(text)
    seen: list[Any] = []
    with JobRanks.started([replace(part, script=str(script))], folder, OWN) as job:
        processes = Processes(job)
        job.start([0])
        processes.connections += [job.accept() for _ in range(part.ranks)]
        for connection in processes.connections:
            assert job.receive(connection)[0] == 0
            assert job.receive(connection).profiled is None, "it waits at the first step"
        for steps, pause_s in turns:
            begin_s = time.monotonic()
            visits = processes.turn(Turn(steps, pause_s))
            seen.append((time.monotonic() - begin_s, [each.profiled for each in visits]))
            if processes.ended:
                return [*seen, "ended"]
        processes.end()
    return seen


@pytest.mark.torch
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_resident_processes_are_profiled_in_turns_and_their_pauses_count_for_nothing(
    devices: int, tmp_path: Path
) -> None:
    seen = in_turns(tmp_path, SCRIPT.format(steps=100_000), [(6, 0.0), (6, 0.25), (3, 0.0)], profile(devices))
    assert seen[1][0] > 6 * 0.25
    for _, records in seen:
        assert len(records) == devices
        for record in records:
            of = workload_of(recorded_of(codec.convert(record, ScriptRecord), REQUEST))
            assert of.local_batches == (4,) and of.ddp is not None and of.ddp.devices == 2 and len(of.layers) == 1
            assert sum(of.layers[0].forward_s + of.layers[0].backward_s) < 0.25


@pytest.mark.torch
def test_a_script_that_comes_to_its_end_between_turns_says_so(tmp_path: Path) -> None:
    seen = in_turns(tmp_path, SCRIPT.format(steps=12), [(6, 0.0)] * 3, profile(2))
    assert len(seen) == 3 and seen[-1] == "ended" and all(each is not None for each in seen[0][1])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ends", "error", "said"),
    [
        ("raise ValueError('only this one')", ConfigError, "only this one"),
        ("os.kill(os.getpid(), 9)", JobFailed, "rank 1 of 2 was killed by SIGKILL"),
        ("os._exit(5)", JobFailed, "rank 1 of 2 ended with exit code 5"),
        ("os._exit(0)", ConfigError, "train.py ended its process before enough was measured"),
    ],
)
def test_where_one_of_several_scripts_fails_the_others_are_ended(
    ends: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    text = (
        "import os, time\n"
        f"with open({str(tmp_path / 'pids')!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
        f"if os.environ['RANK'] == '1':\n    {ends}\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(error, match=said):
        in_turns(tmp_path, text, [(6, 0.0)], Part(kind="train", number=0, ranks=2, script="train.py"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids and not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
