"""What the conditions of shaped networks do to messages, and what is left of runs that are killed at any time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shaped_networks import devices, skip_without_shaped_hosts

from dpsim.experiments.stress import kills

OnRanks = Callable[..., Any]
SHAPED = "train --network shaped"


@pytest.fixture(autouse=True)
def shaped() -> None:
    skip_without_shaped_hosts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "conditions"),
    [
        ("shaped:2x40mbit", {"slow-host=50%": 2.0, "background=50%": 2.0, "rate=20mbit": 2.0, "rate=80mbit": 0.5}),
        ("shaped:4x40mbit", {"oversubscribed=4": 2.0, "oversubscribed=2": 1.0, "slow-host=25%": 4.0}),
    ],
)
def test_an_allreduce_takes_as_long_as_the_slowest_link_of_its_ring_and_as_before_without_the_condition(
    network: str, conditions: dict[str, float], on_ranks: OnRanks
) -> None:
    """Half of four hosts share an uplink of 2 * 40 / 4 Mbit/s, over which the ring sends one flow each way."""
    changed = [f"{network}+{condition}" for condition in conditions]
    tokens = [token for each in changed for token in (network, each)] + [network]
    hosts = int(network[len("shaped:")])
    taken_s = on_ranks("ranks_shaped:ring_s", {"networks": tokens, "samples": 4}, devices=hosts, networks=tokens)
    line_s = 2 * (hosts - 1) / hosts * 2**20 * 8 / 40e6
    assert all(0.95 < time_s / line_s < 1.25 for time_s in taken_s[::2]), [time_s / line_s for time_s in taken_s]
    for condition, factor, time_s in zip(conditions, conditions.values(), taken_s[1::2], strict=True):
        assert 0.9 * factor < time_s / line_s < 1.3 * factor, (condition, time_s / line_s)


@pytest.mark.slow
def test_two_runs_at_a_time_do_not_meet(tmp_path: Path) -> None:
    line = ["-m", "dpsim", "train", "--model", "mlp:6", "--steps", "40", "--devices", "2"]
    command = [sys.executable, *line, "--network", "shaped:2x20mbit", "--set", "leaves=8"]
    runs = [subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) for _ in range(3)]
    said = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    assert len({text.partition("digest of the parameters ")[2] for text, _ in said}) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", kills.COMMANDS[SHAPED].kinds)
def test_of_a_run_of_which_a_process_is_killed_nothing_is_left_and_it_says_why(kind: str, tmp_path: Path) -> None:
    before = devices()
    for number, after_s in enumerate((0.0, 4.0)):
        attack = kills.Attack(command=SHAPED, kind=kind, number=signal.SIGKILL, after_s=after_s)
        assert kills.outcome(attack, tmp_path, str(number)).wrong == ""
    assert devices() == before
