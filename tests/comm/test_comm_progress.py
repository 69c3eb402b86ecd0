"""Progress beside computation: every bucket is reduced once and in order, whoever moves the messages on."""

from __future__ import annotations

import itertools
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from memory_transport import Mailbox, MemoryTransport, random_whole

from dpsim.comm.clock import SLEEP_LEAD_S
from dpsim.comm.progress import LOOK_S, Progress, progress
from dpsim.comm.transport import Array, CollectiveSteps, Enqueued, Request, SteppedAllreduce

OnRanks = Callable[..., Any]
Done = list[tuple[int, int, float, float]]
BUCKETS = [5, 0, 64, 1]


def communication_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dpsim-communication"]


@pytest.fixture
def pair() -> Iterator[Callable[[str], tuple[list[Progress], list[Done]]]]:
    """Two ranks in this process, which the test drives in turn; closed at the end."""
    opened: list[Progress] = []

    def open_two(overlap: str) -> tuple[list[Progress], list[Done]]:
        box = Mailbox(2, eager=True)
        done: list[Done] = [[], []]
        for rank in range(2):
            opened.append(progress(box.ranks[rank], "ring", overlap, lambda *what, r=rank: done[r].append(what)))
        return opened, done

    yield open_two
    for mechanism in opened:
        mechanism.close()


def reduced(two: list[Progress], done: list[Done], step: int, settle: Callable[[], None]) -> None:
    """One step of both ranks: submit everything, let it settle, finish, and look at what came out."""
    rows = [random_whole(2, elements, "float32", 100 * step + i) for i, elements in enumerate(BUCKETS)]
    data = [[row[rank].copy() for row in rows] for rank in range(2)]
    for done_of_rank in done:
        done_of_rank.clear()
    for rank in range(2):
        for bucket, mine in enumerate(data[rank]):
            two[rank].submit(bucket, two[rank].prepare(mine))
    settle()
    for mechanism in two:
        mechanism.finish()
    for rank in range(2):
        assert [(bucket, size) for bucket, size, _, _ in done[rank]] == [(i, 4 * n) for i, n in enumerate(BUCKETS)]
        for mine, row in zip(data[rank], rows, strict=True):
            np.testing.assert_array_equal(mine, row[0] + row[1])


def wait_for(happened: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until_s, "it never happened"
        time.sleep(0.001)


def test_polling_alone_reduces_all_buckets_step_after_step(pair: Callable[..., Any]) -> None:
    two, done = pair("poll")

    def poll_in_turn() -> None:
        for _ in range(50):
            for mechanism in two:
                mechanism.poll()
        assert [len(d) for d in done] == [len(BUCKETS)] * 2

    for step in range(5):
        reduced(two, done, step, poll_in_turn)


def test_a_poll_never_waits(pair: Callable[..., Any]) -> None:
    two, done = pair("poll")
    two[0].submit(0, two[0].prepare(np.ones(8, np.float32)))
    for _ in range(100):
        two[0].poll()
    assert done[0] == []
    two[1].submit(0, two[1].prepare(np.ones(8, np.float32)))
    for _ in range(50):
        two[0].poll()
        two[1].poll()
    assert [len(d) for d in done] == [1, 1]


def test_the_thread_reduces_all_buckets_while_the_computing_thread_does_something_else(
    pair: Callable[..., Any],
) -> None:
    two, done = pair("thread")
    for step in range(5):
        reduced(two, done, step, lambda: wait_for(lambda: [len(d) for d in done] == [len(BUCKETS)] * 2))


def test_the_computing_thread_finishes_what_the_communication_thread_has_not(pair: Callable[..., Any]) -> None:
    two, done = pair("thread")
    other = threading.Thread(target=two[1].finish)
    for step in range(20):
        data = [np.full(9, 1.0 + rank, np.float32) for rank in range(2)]
        for rank in range(2):
            done[rank].clear()
            two[rank].submit(0, two[rank].prepare(data[rank]))
        other = threading.Thread(target=two[1].finish)
        other.start()
        two[0].finish()
        other.join()
        assert [len(d) for d in done] == [1, 1], f"step {step}"
        assert all((mine == 3.0).all() for mine in data)


def test_inline_and_off_reduce_a_bucket_before_submit_returns() -> None:
    for overlap in ("inline", "off"):
        box, done = Mailbox(1, eager=True), []
        mechanism = progress(box.ranks[0], "ring", overlap, lambda *what, d=done: d.append(what))
        mechanism.submit(3, mechanism.prepare(np.ones(4, np.float32)))
        assert [what[:2] for what in done] == [(3, 16)]
        mechanism.finish()
        mechanism.close()
        assert len(done) == 1


def test_close_ends_the_communication_thread() -> None:
    before = len(communication_threads())
    mechanism = progress(Mailbox(1, eager=True).ranks[0], "ring", "thread", lambda *what: None)
    assert len(communication_threads()) == before + 1
    mechanism.submit(0, mechanism.prepare(np.ones(4, np.float32)))
    mechanism.finish()
    mechanism.close()
    assert len(communication_threads()) == before


class Broken(MemoryTransport):
    """Fails at the first receive."""

    def receive(self, data: Array, source: int) -> Request:
        raise ZeroDivisionError("the cable is cut")


@pytest.mark.parametrize("overlap", ["poll", "thread"])
def test_an_error_of_the_communication_reaches_the_computing_thread(overlap: str) -> None:
    before = len(communication_threads())
    mechanism = progress(Broken(Mailbox(2, eager=True), 0, 2), "ring", overlap, lambda *what: None)
    with pytest.raises(ZeroDivisionError, match="the cable is cut"):
        mechanism.submit(0, mechanism.prepare(np.ones(4, np.float32)))
        if overlap == "thread":
            wait_for(lambda: len(communication_threads()) == before)
        mechanism.finish()
    mechanism.close()
    assert len(communication_threads()) == before


class Left:
    """A message that has left and that MPI has not taken yet; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked, self.taken = 0, False

    def done(self) -> bool:
        self.asked += 1
        return self.taken

    def due_s(self) -> float | None:
        return None


def test_the_thread_sleeps_between_looks_at_a_message_that_only_mpi_can_finish() -> None:
    message = Left()
    transport = Mailbox(2, eager=True).ranks[0]
    transport.start_native_allreduce = lambda data: message  # type: ignore[method-assign]
    mechanism = progress(transport, "mpi", "thread", lambda *what: None)
    mechanism.submit(0, mechanism.prepare(np.ones(4, np.float32)))
    start_s = time.monotonic()
    wait_for(lambda: message.asked > 0)
    time.sleep(0.1)
    asked, waited_s = message.asked, time.monotonic() - start_s
    message.taken = True
    mechanism.finish()
    mechanism.close()
    assert asked < 1.2 * waited_s / (LOOK_S - SLEEP_LEAD_S)


class Due:
    """A message that is there at a known time."""

    def __init__(self, now: Callable[[], float], due_s: float) -> None:
        self._now, self._due_s = now, due_s

    def done(self) -> bool:
        return self._now() >= self._due_s

    def due_s(self) -> float | None:
        return self._due_s


@pytest.mark.parametrize("tenths", range(0, 60, 3))
def test_the_thread_never_sleeps_past_the_moment_a_message_is_due(tenths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves on by 1 us whenever it is read, wherever between two readings the message is due."""
    clock, sleeps = [0.0], []

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    def sleep_until(deadline_s: float) -> None:
        sleeps.append(deadline_s)
        clock[0] = max(clock[0], deadline_s)

    monkeypatch.setattr("dpsim.comm.progress.now", now)
    monkeypatch.setattr("dpsim.comm.progress.sleep_until", sleep_until)
    due_s = 200e-6 + tenths * 1e-7
    transport, done = Mailbox(2, eager=True).ranks[0], []
    transport.start_native_allreduce = lambda data: Due(now, due_s)  # type: ignore[method-assign]
    mechanism = progress(transport, "mpi", "thread", lambda *what: done.append(what))
    mechanism.submit(0, mechanism.prepare(np.ones(4, np.float32)))
    wait_for(lambda: len(done) == 1)
    mechanism.close()
    assert sleeps and max(sleeps) <= due_s


class Device(MemoryTransport):
    """Puts each allreduce into a queue of its own; with ``asks`` a message goes before the first one.

    With ``at_once`` each is done when it is started.
    """

    def __init__(self, *, queues: bool = True, asks: bool = False, at_once: bool = False) -> None:
        super().__init__(Mailbox(2, eager=True), 0, 2)
        self.answer, self.queues, self.asks, self.at_once = Left(), queues, asks, at_once
        self.enqueued: list[Left] = []
        self.complete: list[tuple[threading.Thread, int]] = []

    def prepare(self, data: Array, *others: Any, **options: Any) -> Any:
        def begin() -> CollectiveSteps:
            if self.asks and not self.answer.taken:
                yield [self.answer]
            self.enqueued.append(Left())
            self.enqueued[-1].taken = self.at_once
            yield Enqueued(self.enqueued[-1:]) if self.queues else self.enqueued[-1:]

        def complete() -> None:
            self.complete.append((threading.current_thread(), len(self.enqueued)))

        return SteppedAllreduce(self, begin, complete)


@pytest.mark.parametrize("overlap", ["poll", "thread"])
def test_a_device_has_all_buckets_in_its_queue_before_the_first_is_done(overlap: str) -> None:
    device, done = Device(), []
    mechanism = progress(device, "ring", overlap, lambda *what: done.append(what))
    for bucket in range(3):
        mechanism.submit(bucket, mechanism.prepare(np.ones(4, np.float32)))
    wait_for(lambda: len(device.enqueued) == 3)
    assert (done, mechanism.bucket) == ([], 0)
    for message in (device.enqueued[2], device.enqueued[0], device.enqueued[1]):
        message.taken = True
    mechanism.finish()
    mechanism.close()
    assert [what[:2] for what in done] == [(0, 16), (1, 16), (2, 16)]
    for (*_, end_s), (_, _, begin_s, _) in itertools.pairwise(done):
        assert end_s <= begin_s  # a queue does one after another
    assert mechanism.bucket == -1


@pytest.mark.parametrize("overlap", ["inline", "poll", "thread"])
def test_a_bucket_is_said_to_be_complete_by_the_computing_thread_before_it_is_started(overlap: str) -> None:
    device = Device(at_once=True)
    mechanism = progress(device, "ring", overlap, lambda *what: None)
    for bucket in range(3):
        mechanism.submit(bucket, mechanism.prepare(np.ones(4, np.float32)))
        thread, started = device.complete[bucket]
        assert thread is threading.current_thread() and started <= bucket and len(device.complete) == bucket + 1
    mechanism.finish()
    mechanism.close()
    assert len(device.enqueued) == 3


def test_what_is_in_no_queue_is_started_one_after_another() -> None:
    device = Device(queues=False)
    mechanism = progress(device, "ring", "poll", lambda *what: None)
    for bucket in range(3):
        mechanism.submit(bucket, mechanism.prepare(np.ones(4, np.float32)))
    for started in (1, 2, 3):
        assert (len(device.enqueued), mechanism.bucket) == (started, started - 1)
        device.enqueued[-1].taken = True
        mechanism.poll()
    mechanism.finish()


def test_nothing_overtakes_a_bucket_that_waits_for_a_message_before_it_is_enqueued() -> None:
    device = Device(asks=True)
    mechanism = progress(device, "ring", "poll", lambda *what: None)
    for bucket in range(3):
        mechanism.submit(bucket, mechanism.prepare(np.ones(4, np.float32)))
    mechanism.poll()
    assert device.enqueued == []
    device.answer.taken = True
    mechanism.poll()
    assert len(device.enqueued) == 3
    for message in device.enqueued:
        message.taken = True
    mechanism.finish()


class OnDevice(Device):
    """The same with gradients in the memory of a device."""

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.memory = types.SimpleNamespace(deferred=True)  # type: ignore[assignment]


@pytest.mark.parametrize("overlap", ["off", "inline", "poll", "thread"])
def test_the_host_waits_for_nothing_that_a_device_has_in_its_queue(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr("dpsim.comm.progress.sleep_until", sleeps.append)
    device, done = OnDevice(), []
    mechanism = progress(device, "ring", overlap, lambda *what: done.append(what))
    for step in range(2):
        for bucket in range(3):
            mechanism.submit(bucket, mechanism.prepare(np.ones(4, np.float32)))
            if overlap == "inline":
                assert mechanism.enqueue() is device.enqueued[-1]
        assert mechanism.enqueue() is device.enqueued[-1] and len(device.enqueued) == 3 * (step + 1)
        assert len(done) == 3 * step
        for message in device.enqueued:
            message.taken = True
        mechanism.finish()
        assert [what[0] for what in done] == [0, 1, 2] * (step + 1) and mechanism.enqueue() is None
    mechanism.close()
    assert sleeps == []


@pytest.mark.parametrize("overlap", ["off", "poll", "thread"])
def test_the_host_waits_for_what_ranks_that_share_a_device_reduce_in_stages(overlap: str) -> None:
    device, done = OnDevice(queues=False), []
    mechanism = progress(device, "ring", overlap, lambda *what: done.append(what))
    for bucket in range(2):
        mechanism.submit(bucket, mechanism.prepare(np.ones(4, np.float32)))
    waiting = threading.Thread(target=mechanism.enqueue)
    waiting.start()
    for number in range(2):
        wait_for(lambda number=number: len(device.enqueued) == number + 1)  # type: ignore[misc]
        assert waiting.is_alive() and len(done) == number
        device.enqueued[-1].taken = True
    waiting.join()
    mechanism.finish()
    mechanism.close()
    assert [what[0] for what in done] == [0, 1]


def test_buckets_are_reduced_in_order_exactly_once_between_processes(together: OnRanks) -> None:
    networks = ["node", "paced:50us,1gbit"]
    for actual in together(*(("ranks_comm:mechanisms", {"networks": networks}, devices) for devices in (1, 2, 3))):
        assert actual["wrong"] == []
        for case, counts in actual["finished_in_the_pause"].items():
            assert counts == [6] * len(counts), f"{case}: the pause ended before all buckets were reduced"
