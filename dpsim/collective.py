"""``Collective``: a collective but for its size, which is what its cost is asked for."""

from __future__ import annotations

from typing import Literal

from dpsim.codec import Noun

CollectiveKind = Literal["allreduce", "reduce-scatter", "all-gather"]
"""What a collective brings about: every rank has the sum; rank r has shard r of the sum; every rank has all shards."""


class Collective(Noun, frozen=True):
    """A collective by ``algorithm`` on ``devices`` in ``layout`` (``2x4``; empty: flat) that sends ``wire_dtype``."""

    algorithm: str
    devices: int
    layout: str = ""
    wire_dtype: str = "float32"
    kind: CollectiveKind = "allreduce"
