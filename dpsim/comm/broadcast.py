"""Broadcast over point-to-point messages, along a binomial tree from rank 0."""

from __future__ import annotations

from dpsim.comm.transport import Array, Transport, wait


def broadcast(t: Transport, data: Array) -> None:
    """Make a contiguous array equal to rank 0's on every rank; ceil(log2 n) rounds.

    Rank r receives from r without its highest bit, then sends to r + 2^k for the higher k.
    """
    if data.size == 0:
        return
    if t.rank:
        wait(t, [t.receive(data, t.rank ^ (1 << (t.rank.bit_length() - 1)))])
    reach = 1 << t.rank.bit_length()
    while t.rank + reach < t.size:
        wait(t, [t.send(data, t.rank + reach)])
        reach *= 2
