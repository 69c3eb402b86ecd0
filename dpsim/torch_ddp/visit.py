"""What the ranks of a measurement of DDP and the one that gives the turns say to each other. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONTROL = "control"
"""The socket, in the folder of a measurement, on which turns are given."""

LOGGED = {
    "forward_compute_time": "forward",
    "backward_compute_time": "backward",
    "backward_comm_time": "communication",
    "backward_compute_comm_overlap_time": "overlap",
}
"""The times that DDP logs of a step, in nanoseconds, and what they are called here."""


@dataclass
class Visit:
    """What one rank did in a turn: when its steps began and the last one ended, and what DDP logged of each.

    ``waited_s`` is how long each step waited inside a communication hook, and ``ready_s`` when the hook got each of its
    buckets: seconds of computation from the start of backward. ``local_batches`` has the samples of each step, of its
    smallest forward, and ``bucket_bytes`` are DDP's buckets. A rank of dpsim's own runtime has neither logged times nor
    batches, and ``watched`` says how well it kept to emulated times.
    """

    moments_s: list[float] = field(default_factory=list)
    logged_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LOGGED.values()})
    waited_s: list[float] = field(default_factory=list)
    ready_s: list[list[float]] = field(default_factory=list)
    local_batches: list[int] = field(default_factory=list)
    bucket_bytes: tuple[int, ...] = ()
    ended: bool = False
    watched: Any = None
