"""``Collective``: an allreduce but for its size, which is what its cost is asked for."""

from __future__ import annotations

from dpsim.codec import Noun


class Collective(Noun, frozen=True):
    """An allreduce by ``algorithm`` on ``devices`` in ``layout`` (``2x4``; empty: flat) that sends ``wire_dtype``."""

    algorithm: str
    devices: int
    layout: str = ""
    wire_dtype: str = "float32"
