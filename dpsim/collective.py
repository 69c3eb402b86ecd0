"""``Collective``: a collective but for its size, which is what its cost is asked for."""

from __future__ import annotations

from typing import Literal

from dpsim.codec import Noun

CollectiveKind = Literal["allreduce", "reduce-scatter", "all-gather", "ordered-sum"]
"""What a collective brings about: every rank has the sum; rank r has shard r of the sum; every rank has all shards.

An ``ordered-sum`` is an allreduce of few numbers for which computation stops, such as those of global batch norm: every
rank sends its numbers to every other, and all add them in one order (``dpsim.comm.ordered_sum``).
"""


class Collective(Noun, frozen=True):
    """A collective by ``algorithm`` on ``devices`` in ``layout`` (``2x4``; empty: flat) that sends ``wire_dtype``."""

    algorithm: str
    devices: int
    layout: str = ""
    wire_dtype: str = "float32"
    kind: CollectiveKind = "allreduce"
