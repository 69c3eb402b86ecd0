"""What the processes of a script and the one that gives the turns say to each other. Loads no torch.

Processes of one machine, which may run another Python each, so that only plain values and what is defined here go over
the socket.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from typing import Any, NamedTuple

CONTROL = "control"
"""The socket, in the folder of a measurement, on which turns are given."""
PARTS = "parts.json"
"""The file, in the folder of a measurement, of what is to be visited: the fields of a ``Part`` of each."""
FAILED = "failed-{}-{}.json"
"""The file that tells why a rank of a part has failed: what ``dpsim.launch.failure_report.describe`` returns."""
NAMESPACES = "DPSIM_NAMESPACES"
"""The variable with the files of the network namespaces of hosts, one for each rank of a part; without it none."""
STARTER = -1
"""What the process that starts the ranks calls itself in place of a part."""

LOGGED = {
    "forward_compute_time": "forward",
    "backward_compute_time": "backward",
    "backward_comm_time": "communication",
    "backward_compute_comm_overlap_time": "overlap",
}
"""The times that DDP logs of a step, in nanoseconds, and what they are called here."""


class Timed(NamedTuple):
    """Collectives to time on the first ``devices`` ranks, which begin at ``at_s`` on the clock of the machine.

    ``what`` is ``burst`` (``at_once`` allreduces), ``stream`` (as many behind a backward), ``broadcasts`` (likewise),
    ``load`` (``units`` of a computation by itself), ``beside`` (as many allreduces beside it) or ``sharded`` (steps of
    ``units`` that ``fully_shard`` shards). Numbers are gathered as ``gather_dtype`` and added up as ``reduce_dtype``;
    ``size_bytes`` is that of an allreduce, or of a unit in float32.
    """

    what: str
    devices: int
    size_bytes: int
    at_s: float
    at_once: int = 1
    units: int = 1
    gather_dtype: str = "float32"
    reduce_dtype: str = "float32"


class Turn(NamedTuple):
    """So many steps to take, waiting ``pause_s`` in each as for an allreduce; none: it is enough.

    A rank of a calibration is asked for what is ``timed`` in place of steps.
    """

    steps: int
    pause_s: float = 0.0
    timed: Timed | None = None


@dataclass
class Visit:
    """What one process did in a turn: when its steps began and the last one ended, and what DDP logged of each.

    ``waited_s`` is how long each step waited inside a communication hook, and ``ready_s`` when the hook got each of its
    buckets: seconds of computation from the start of backward. ``local_batches`` has the samples of each step, of its
    smallest forward, and ``bucket_bytes`` are DDP's buckets. A rank of dpsim's own runtime has neither logged times nor
    batches, and ``watched`` says how well it kept to emulated times. A process of a profile has what it recorded in
    this visit alone (``profiled``: the fields of a ``dpsim.torch.script.script_record.ScriptRecord``), and one of a
    calibration what it timed (``taken``).
    """

    moments_s: list[float] = field(default_factory=list)
    logged_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LOGGED.values()})
    waited_s: list[float] = field(default_factory=list)
    ready_s: list[list[float]] = field(default_factory=list)
    local_batches: list[int] = field(default_factory=list)
    bucket_bytes: tuple[int, ...] = ()
    ended: bool = False
    watched: Any = None
    profiled: dict[str, Any] | None = None
    taken: Any = None


class Turns:
    """The turns of one rank of the ``number``-th part that is visited, asked for in the folder of a study."""

    def __init__(self, folder: str, number: int, rank: int) -> None:
        self._control = Client(os.path.join(folder, CONTROL), "AF_UNIX")
        self._control.send((number, rank))

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
