"""What the ranks are given that train a script under observation."""

from __future__ import annotations

from dpsim.codec import Noun


class ObserveTask(Noun, frozen=True):
    """A script and its arguments, the steps to observe, the network, and a bucket cap in place of the script's.

    ``meeting`` is a folder of theirs alone, in which they find each other.
    """

    script: str
    arguments: tuple[str, ...]
    steps: int
    meeting: str
    network: str = "node"
    bucket_cap_bytes: float | None = None
