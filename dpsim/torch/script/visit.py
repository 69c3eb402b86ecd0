"""What the processes of a script and the one that gives the turns say to each other. Loads no torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NamedTuple

from dpsim.workload import Workload

CONTROL = "control"
"""The socket, in the folder of a measurement, on which turns are given."""

LOGGED = {
    "forward_compute_time": "forward",
    "backward_compute_time": "backward",
    "backward_comm_time": "communication",
    "backward_compute_comm_overlap_time": "overlap",
}
"""The times that DDP logs of a step, in nanoseconds, and what they are called here."""


class Turn(NamedTuple):
    """So many steps to take, waiting ``pause_s`` in each as for an allreduce; none: it is enough."""

    steps: int
    pause_s: float = 0.0


@dataclass
class Visit:
    """What one process did in a turn: when its steps began and the last one ended, and what DDP logged of each.

    ``waited_s`` is how long each step waited inside a communication hook, and ``ready_s`` when the hook got each of its
    buckets: seconds of computation from the start of backward. ``local_batches`` has the samples of each step, of its
    smallest forward, and ``bucket_bytes`` are DDP's buckets. A rank of dpsim's own runtime has neither logged times nor
    batches, and ``watched`` says how well it kept to emulated times. A process of a profile has its workload in this
    visit alone (``profiled``), and one of a calibration its ``rows``.
    """

    moments_s: list[float] = field(default_factory=list)
    logged_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LOGGED.values()})
    waited_s: list[float] = field(default_factory=list)
    ready_s: list[list[float]] = field(default_factory=list)
    local_batches: list[int] = field(default_factory=list)
    bucket_bytes: tuple[int, ...] = ()
    ended: bool = False
    watched: Any = None
    profiled: Workload | None = None
    rows: tuple[Any, ...] = ()


class Turns:
    """The turns of one process, asked for in the folder of a study; ``number`` counts what is visited there."""

    def __init__(self, folder: str, number: int) -> None:
        self._control = Client(str(Path(folder) / CONTROL), "AF_UNIX")
        self._control.send(number)

    def take(self, visit: Visit) -> Turn:
        """Hand over what was done, and wait asleep for the next turn."""
        self._control.send(visit)
        turn: Turn = self._control.recv()
        return turn

    def ended(self) -> None:
        """Say that the script has come to its end by itself."""
        with contextlib.suppress(EOFError, OSError):
            self.take(Visit(ended=True))

    def close(self) -> None:
        """Ask for no more."""
        self._control.close()
