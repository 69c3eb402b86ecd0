"""The processes of a script that take turns, behind their connections, and how they are started."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.launch.shaped.links import (
    CEILING_BYTES,
    CEILING_SAMPLES,
    CEILING_WARM_UPS,
    carried_bytes_per_s,
    check_ceiling,
)
from dpsim.network import Network
from dpsim.progress import Progress, no_progress
from dpsim.study.loop import LEAST_ROUNDS
from dpsim.study.measure import WARM_UP_ROUNDS
from dpsim.study.steps import COUNTED_STEPS, WARM_UP_STEPS
from dpsim.torch.script.probe.endings import ENDED_EARLY
from dpsim.torch.script.probe.in_turns.visit import Timed, Turn, Visit
from dpsim.torch.script.request import Part

LEAD_S = 2e-3
"""How long before they begin ranks are told to: so many ranks wake one after another."""
_AT_ONCE = 4
"""Processes that start at the same time, or a few more."""


class Job(Protocol):
    """The processes that take part, which connect once they are started."""

    def shape(self, network: Network | None) -> None:
        """Give the links of the ranks' hosts the rates of a shaped network, or none. Raises ``ConfigError``."""

    def start(self, parts: list[int]) -> None:
        """Start the ranks of parts, by their numbers."""

    def accept(self) -> Any:
        """Return the connection of the next rank."""

    def receive(self, connection: Any) -> Any:
        """Return what comes over a connection. Raises ``DpsimError`` where a rank has failed."""


class Processes:
    """The processes of one visit, behind their connections, in the order of their ranks."""

    def __init__(self, job: Job | None = None) -> None:
        self.connections: list[Connection[Turn, Visit]] = []
        self.ended = False
        self.first: list[Visit] = []
        """What each handed over before its first turn."""
        self._job = job

    def turn(self, turn: Turn) -> list[Visit]:
        """Let all take a turn at once; what each did. ``ended``: the script of one has come to its end."""
        visits = self._answers(turn, len(self.connections))
        self.ended = any(visit.ended for visit in visits)
        return visits

    def time(self, timed: Timed) -> list[Any]:
        """Return what the first ranks took for the collectives that they are asked for."""
        return [visit.taken for visit in self._answers(Turn(1, timed=timed), timed.devices)]

    def _answers(self, turn: Turn, ranks: int) -> list[Visit]:
        assert self._job is not None
        for connection in self.connections[:ranks]:
            connection.send(turn)
        return [self._job.receive(connection) for connection in self.connections[:ranks]]

    def end(self) -> None:
        """Give no more turns."""
        for connection in () if self.ended else self.connections:
            connection.send(Turn(0))


def started(parts: Sequence[Part], job: Job, report: Progress = no_progress) -> list[Processes]:
    """Start all parts, some at a time; return their processes, once they have built DDP and wait for their turns."""
    of_part = [part.ranks for part in parts]
    processes, begin_s = [Processes(job) for _ in of_part], now()
    waves, total = starting_together(of_part), sum(of_part)
    report(
        f"starting the script in {total} processes that take turns, about {_AT_ONCE} at a time: that takes as long as"
        f" {len(waves)} start{'s' * (len(waves) > 1)} of it until its first step"
    )
    begun = 0
    for wave in waves:
        ranks: dict[tuple[int, int], Any] = {}
        job.start(wave)
        for _ in range(sum(of_part[part] for part in wave)):
            connection = job.accept()
            ranks[job.receive(connection)] = connection
        for part, rank in sorted(ranks):
            processes[part].connections.append(ranks[part, rank])
            processes[part].first.append(job.receive(ranks[part, rank]))
            check_trains(processes[part].first[-1].ended, 0)
        begun += len(ranks)
        if begun < total and wave is waves[0]:
            spent_s = now() - begin_s
            report(
                f"{begun} of {total} processes have started in {spent_s:.2g} s: the others take about "
                f"{spent_s * (total - begun) / begun:.2g} s more"
            )
    return processes


def shape(network: Network, job: Job, processes: Processes) -> None:
    """Join the hosts of a job by a network, once ``processes`` have timed allreduces over links that nothing shapes.

    A network that is not shaped is left as it is. Raises ``ConfigError`` for rates that are too near to theirs.
    """
    if not network.shaped:
        return
    job.shape(None)
    ranks, taken_s = len(processes.connections), []
    for _ in range(CEILING_WARM_UPS + CEILING_SAMPLES):
        begun_s, ended_s = np.max(processes.time(Timed("burst", ranks, CEILING_BYTES, now() + LEAD_S)), axis=0)
        taken_s.append(float(ended_s - begun_s))
    check_ceiling(network, carried_bytes_per_s(ranks, taken_s))
    job.shape(network)


def starting_together(of_part: Sequence[int]) -> list[list[int]]:
    """Return the parts that start at the same time: as few as have ``_AT_ONCE`` processes, by the ranks of each.

    What the first ones need tells how long the others will take.
    """
    waves: list[list[int]] = []
    processes = _AT_ONCE
    for part, ranks in enumerate(of_part):
        if processes >= _AT_ONCE:
            waves.append([])
            processes = 0
        waves[-1].append(part)
        processes += ranks
    return waves


def check_trains(ended: bool, rounds_done: int) -> None:
    if ended:
        raise ConfigError(
            f"{ENDED_EARLY} {rounds_done} rounds of {WARM_UP_STEPS + COUNTED_STEPS} training steps",
            allowed=f"at least {WARM_UP_ROUNDS + LEAST_ROUNDS} rounds: dpsim ends the script itself",
            remedy="let it train longer, or on more data",
        )
