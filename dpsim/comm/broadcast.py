"""Broadcast over point-to-point messages, along a binomial tree from any rank."""

from __future__ import annotations

from dpsim.comm.transport import Array, CollectiveSteps, SteppedAllreduce, Transport, wait


def broadcast(t: Transport, data: Array, root: int = 0) -> None:
    """Make a contiguous array equal to that of the rank ``root`` on every rank; at most ceil(log2 n) rounds."""
    for pending in _steps(t, data, root):
        wait(t, pending)


def prepare_broadcast(t: Transport, data: Array, root: int) -> SteppedAllreduce:
    """Prepare the same, to be run again and again."""
    return SteppedAllreduce(t, lambda: _steps(t, data, root))


def _steps(t: Transport, data: Array, root: int) -> CollectiveSteps:
    """Yield the messages of each round of this rank.

    The rank r places behind the root receives from the one without the highest bit of r, then sends to r + 2^k for the
    higher k.
    """
    place = (t.rank - root) % t.size
    if data.size == 0:
        return
    if place:
        source = place ^ (1 << (place.bit_length() - 1))
        yield [t.receive(data, (source + root) % t.size)]
    reach = 1 << place.bit_length()
    while place + reach < t.size:
        yield [t.send(data, (place + reach + root) % t.size)]
        reach *= 2
