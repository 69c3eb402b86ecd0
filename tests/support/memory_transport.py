"""A transport inside one process: every rank's messages in one mailbox, delivered in an order that a test chooses."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpsim.collective import CollectiveKind
from dpsim.comm.compression import Compression
from dpsim.comm.transport import Array, CollectiveSteps, Request, aligned_bytes
from dpsim.machine import Network
from dpsim.memory import HOST


class Mailbox:
    """Messages between the ranks of a group, in order for each pair.

    ``eager`` copies a message when it is sent. Otherwise its bytes are read when the receiver takes them, and the send
    is done only then: a buffer that is written before its send is done shows in the result.
    """

    def __init__(self, size: int, *, eager: bool, devices_a_node: int = 1) -> None:
        self.eager = eager
        self.sent: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        self.asked: dict[tuple[int, int], int] = defaultdict(int)
        self.lock = threading.Lock()
        self.ranks = [MemoryTransport(self, rank, size, devices_a_node) for rank in range(size)]


class _Message:
    def __init__(self, data: Array, eager: bool) -> None:
        self.data = data.copy() if eager else data
        self.taken = eager

    def done(self) -> bool:
        return self.taken

    def due_s(self) -> float | None:
        return None


class _Incoming:
    def __init__(self, mailbox: Mailbox, pair: tuple[int, int], number: int, into: Array) -> None:
        self._mailbox, self._pair, self._number, self._into = mailbox, pair, number, into
        self._arrived = False

    def done(self) -> bool:
        messages = self._mailbox.sent[self._pair]
        if not self._arrived and len(messages) > self._number:
            message = messages[self._number]
            assert message.data.nbytes == self._into.nbytes and message.data.dtype == self._into.dtype
            self._into[...] = message.data
            self._arrived = message.taken = True
        return self._arrived

    def due_s(self) -> float | None:
        return None


class MemoryTransport:
    """One rank's end of a mailbox; counts what it sends, and how much of that to other nodes of the layout."""

    def __init__(self, mailbox: Mailbox, rank: int, size: int, devices_a_node: int = 1) -> None:
        self.mailbox, self.rank, self.size, self.network = mailbox, rank, size, Network()
        self.devices_a_node = devices_a_node
        self.sent_bytes = self.sent_messages = self.across_bytes = self.across_messages = 0
        self.oversubscribed = False
        self.nap_s = 0.0
        self.memory = HOST

    def allocate(self, size_bytes: int) -> Any:
        return aligned_bytes(size_bytes)

    def prepare(
        self,
        data: Array,
        algorithm: str,
        compression: Compression | None,
        order: object = None,
        kind: CollectiveKind = "allreduce",
        replicas: int = 1,
    ) -> None:
        """Every rank's memory is its own."""

    def sums_between_layers(self, sums: object, most_elements: object) -> None:
        """Messages do it."""

    def prepare_round(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        return None

    def send(self, data: Array, to: int) -> Request:
        assert 0 <= to < self.size and to != self.rank and data.flags.c_contiguous
        self.sent_bytes += data.nbytes
        self.sent_messages += 1
        if to // self.devices_a_node != self.rank // self.devices_a_node:
            self.across_bytes += data.nbytes
            self.across_messages += 1
        message = _Message(data, self.mailbox.eager)
        self.mailbox.sent[self.rank, to].append(message)
        return message

    def receive(self, data: Array, source: int) -> Request:
        assert 0 <= source < self.size and source != self.rank and data.flags.c_contiguous
        with self.mailbox.lock:
            number = self.mailbox.asked[source, self.rank]
            self.mailbox.asked[source, self.rank] += 1
        return _Incoming(self.mailbox, (source, self.rank), number, data)

    def native_allreduce(self, data: Array) -> None:
        raise NotImplementedError

    def start_native_allreduce(self, data: Array) -> Request:
        raise NotImplementedError

    def close(self) -> None:
        pass


def run_together(begin: Callable[[int], CollectiveSteps], size: int, seed: int) -> list[int]:
    """Move all ranks' rounds on in a random order to their end; the number of rounds with messages, by rank.

    Raises ``AssertionError`` when every rank waits for ever.
    """
    draw = random.Random(seed)
    rounds = [begin(rank) for rank in range(size)]
    waiting: list[Sequence[Request]] = [[] for _ in range(size)]
    counts = [0] * size
    running = set(range(size))
    while running:
        moved = False
        order = sorted(running)
        draw.shuffle(order)
        for rank in order:
            before = len(waiting[rank])
            waiting[rank] = [message for message in waiting[rank] if not message.done()]
            moved = moved or len(waiting[rank]) < before
            if waiting[rank]:
                continue
            moved = True
            step = next(rounds[rank], None)
            if step is None:
                running.discard(rank)
            else:
                waiting[rank] = list(step)
                counts[rank] += bool(waiting[rank])
        assert moved, f"ranks {sorted(running)} wait for each other for ever"
    return counts


def random_whole(size: int, elements: int, dtype: str, seed: int) -> list[Array]:
    """One array a rank of whole numbers so small that their sums are exact in every order."""
    draw = np.random.default_rng(seed)
    return [draw.integers(-1000, 1000, elements).astype(dtype) for _ in range(size)]
