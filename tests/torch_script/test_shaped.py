"""Scripts on shaped networks: each rank of a part is on a host of its own, whose links the kernel shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from script_profiles import four_layers

from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, replicas_of, script_experiment
from dpsim.harness.script.places import inputs_for
from dpsim.launch.job_python import OWN
from dpsim.launch.scratch import scratch
from dpsim.launch.shaped.hosts import shaped_hosts
from dpsim.network import Network
from dpsim.records.sweep import read_results
from dpsim.study.environment import environment
from dpsim.study.runners.job_ranks import JobRanks
from dpsim.study.runners.mpi_ranks import by_rank
from dpsim.study.runners.script_processes import Processes, shape, started
from dpsim.study.task import ScriptTask
from dpsim.torch.script.probe.in_turns.visit import Timed
from dpsim.torch.script.request import Part

Dpsim = Callable[..., tuple[int, str, str]]
NETWORK = "shaped:2x100mbit"
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]))
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
while True:
    optimizer.zero_grad()
    ddp(torch.randn(64, 128)).pow(2).mean().backward()
    optimizer.step()
"""
BYTES = 4 * 4 * (128 * 128 + 128)


@pytest.fixture(scope="module")
def hosts() -> None:
    """Skips where this machine can make no hosts."""
    try:
        with scratch("job") as folder, shaped_hosts((Network.parse("shaped:2x100mbit"),), folder):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


class FakeJob:
    """A job whose hosts do nothing but keep which networks were asked for."""

    def __init__(self) -> None:
        self.networks: list[str | None] = []

    def shape(self, network: Network | None) -> None:
        self.networks.append(network.token if network else None)

    def start(self, parts: list[int]) -> None: ...

    def accept(self) -> Any: ...

    def receive(self, connection: Any) -> Any: ...


class FakeProcesses(Processes):
    """Ranks whose allreduces take as long as over links of so many bytes a second."""

    def __init__(self, ranks: int, bytes_per_s: float) -> None:
        super().__init__()
        self.connections, self._bytes_per_s = [None] * ranks, bytes_per_s  # type: ignore[list-item]

    def time(self, timed: Timed) -> list[Any]:
        sent = 2 * (timed.devices - 1) / timed.devices * timed.size_bytes
        return [(timed.at_s - rank, timed.at_s + sent / self._bytes_per_s) for rank in range(timed.devices)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rate_is_shaped_where_unshaped_links_carry_three_times_as_much(ranks: int) -> None:
    network = Network.parse(f"shaped:{ranks}x1gbit")
    job = FakeJob()
    shape(network, job, FakeProcesses(ranks, 3.01 * 1.25e8))
    assert job.networks == [None, network.token]
    job = FakeJob()
    with pytest.raises(ConfigError, match="so that the cores would be timed"):
        shape(network, job, FakeProcesses(ranks, 2.99 * 1.25e8))
    assert job.networks == [None]
    shape(Network.parse("node"), job, FakeProcesses(ranks, 1.0))
    assert job.networks == [None], "a network that is not shaped is left as it is"


def test_ranks_of_a_job_of_mpi_are_in_the_order_of_their_hosts() -> None:
    """The first host has who gives the turns and the first rank of every part, the second host the second ranks."""
    experiment = completed(
        script_experiment(__file__, devices=(1, 2, 4), communication=("mpi",), networks=("shaped:4x100mbit",)),
        four_layers(),
    )
    task = ScriptTask(
        experiment=experiment, inputs=inputs_for(experiment, four_layers(), environment()), place=0, meeting=""
    )
    numbers = [part.number for part in by_rank(task.parts)]
    assert 1 + len(numbers) == task.ranks == sum(task.on_hosts)
    assert {part.number: part.ranks for part in task.parts} == {each: numbers.count(each) for each in set(numbers)}
    first = 0
    for host, count in enumerate(task.on_hosts):
        on_host = numbers[first : (first := first + count - (host == 0))]
        assert on_host == [part.number for part in task.parts if part.ranks > host]


def test_gloo_alone_communicates_on_shaped_networks_unless_another_way_is_named() -> None:
    def runtimes(*networks: str, **named: Any) -> tuple[Any, ...]:
        return script_experiment(__file__, networks=networks, **named).values("runtime")

    assert runtimes(NETWORK) == ("torch-ddp-gloo",)
    assert runtimes("node") == ("torch-ddp-gloo", "torch-ddp-mpi")
    assert runtimes(NETWORK, communication=("mpi",)) == ("torch-ddp-mpi",)
    assert runtimes(NETWORK, strategy="zero3") == ("torch-fsdp-gloo",)
    (case,) = script_experiment(__file__, networks=(NETWORK,), strategy="zero3:replicas=2", devices=(4,)).cases
    assert case["network"] == NETWORK
    assert replicas_of(script_experiment(__file__, strategy="zero3:replicas=2", devices=(4,))) == 2


@pytest.mark.torch
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("fully_shard", [False, True])
def test_ranks_send_over_the_links_of_hosts_of_their_own(fully_shard: bool, tmp_path: Path) -> None:
    network = Network.parse(NETWORK)
    part = Part(kind="collectives", number=0, ranks=2, counts=(2,), fully_shard=fully_shard)
    with JobRanks.started([part], tmp_path, OWN, network=NETWORK) as job:
        (processes,) = started([part], job)
        shape(network, job, processes)
        taken_s = []
        for _ in range(10):  # one of them that no other process of this machine holds up
            begun_s, ended_s = np.max(processes.time(Timed("burst", 2, 2**20, time.perf_counter() + 2e-3)), axis=0)
            taken_s.append(ended_s - begun_s)
        processes.end()
    least_s = 2**20 / network.rate_bytes_per_s
    assert 0.9 * least_s < min(taken_s) < 2 * least_s


@pytest.mark.torch
@pytest.mark.usefixtures("hosts")
def test_a_rate_that_gloo_does_not_reach_is_one_message(dpsim: Dpsim, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ("--network", "shaped:2x400gbit", "--budget", "1s", "--output", tmp_path / "report")
    code, _, err = dpsim("sweep", "--torch-script", script, *flags)
    assert code == 2 and "shaped:2x400gbit: unshaped, a link of these hosts carries" in err and "Traceback" not in err


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hosts")
def test_ddp_is_predicted_and_measured_on_a_shaped_network(dpsim: Dpsim, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "report"
    script.write_text(SCRIPT)
    flags = ("--network", NETWORK, "--devices", "1,2", "--fusion-threshold", "default")
    code, out, err = dpsim("sweep", "--torch-script", script, *flags, "--budget", "1s", "--output", folder)
    assert code == 0, err
    assert f"{NETWORK} (emulated), PyTorch DDP by gloo" in out
    points = read_results(folder / "results.json").points
    step_s = {point.setting.plan.devices: np.median(point.step_s) for point in points if not point.setting.repeat}
    assert {point.setting.network for point in points} == {NETWORK}
    assert step_s[2] - step_s[1] > 0.7 * BYTES / Network.parse(NETWORK).rate_bytes_per_s
