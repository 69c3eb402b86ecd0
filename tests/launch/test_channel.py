"""The control channel: ranks prove who they are before anything of theirs is read, and a stranger ends only himself."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpsim.errors import CommunicationError
from dpsim.launch import control_channel
from dpsim.launch.control_channel import VARIABLE, Listener, connect, signed, verified
from dpsim.launch.failure_report import JobState

REQUEST = {"argument": "é" * 100, "devices": 1}
listening = functools.partial(Listener, progress=lambda _: None, all_interfaces=False)


@pytest.fixture
def state() -> JobState:
    return JobState()


@pytest.fixture
def listener(state: JobState) -> Iterator[Listener]:
    """A listening channel that a thread serves, as the launcher does while a job runs."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            listener.handle_events(0.01)

    with contextlib.closing(listening(1, REQUEST, state)) as listener, ThreadPoolExecutor() as threads:
        served = threads.submit(serve)
        yield listener
        over.set()
        served.result()


def connected(listener: Listener) -> socket.socket:
    host, _, port = listener.environment[VARIABLE].split()[1].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=50)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def closed(connection: socket.socket) -> bool:
    """Return whether the launcher closes the connection within 50 s (the challenge may come first)."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


STRANGE = {
    "deep": b"[" * 200_000 + b"\n",
    "a secret that is not ASCII": '{"secret":"é"}\n'.encode(),
    "half a character": b'{"secret":"\\ud800"}\n',
    "two lines": b"a\nb\n",
    "no line end": b"x" * 100_000,
    "a byte": b"\0",
    "not UTF-8": b"\xff\xfe\n",
    "a signature of the wrong length": b"0 {}\n",
    "a signature of the right length": b"0" * 64 + b' {"rank": 0}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("name", sorted(STRANGE))
def test_whatever_a_stranger_says_he_is_sent_away_and_a_rank_is_served(
    name: str, listener: Listener, state: JobState
) -> None:
    for resets in (False, True):
        with connected(listener) as stranger:
            with contextlib.suppress(OSError):  # he may be sent away while he still speaks
                stranger.sendall(STRANGE[name])
                if resets:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    stranger.shutdown(socket.SHUT_WR)
            assert resets or closed(stranger)
    with contextlib.closing(connect(0, listener.environment)) as rank:
        assert rank.request == REQUEST
        rank.send("result", 7)
        until(lambda: state.result == [7])
    until(lambda: state.first_ended == 0)


def test_a_stranger_who_says_nothing_or_little_is_sent_away_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "HELLO_S", 0.2)
    with connected(listener) as silent, connected(listener) as slow:
        slow.sendall(b"a")
        assert closed(silent) and closed(slow)


def test_of_200_silent_strangers_the_oldest_are_sent_away_and_a_rank_comes_through(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(200):
            strangers.append(stack.enter_context(connected(listener)))
            assert strangers[-1].recv(1)  # of the challenge: no more connect than are accepted
        assert stack.enter_context(contextlib.closing(connect(0, listener.environment))).request == REQUEST
        assert all(closed(stranger) for stranger in strangers[:180])


def test_no_more_than_a_hello_is_kept_of_a_stranger(listener: Listener) -> None:
    with connected(listener) as stranger:
        stranger.sendall(b"x" * (control_channel.HELLO_BYTES - 1))
        time.sleep(0.1)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"x")
        assert closed(stranger)


def test_the_secret_never_travels_and_a_recorded_hello_is_worth_nothing() -> None:
    sent = signed("the secret", "rank", "a challenge", '{"rank": 0}')
    assert b"secret" not in sent
    assert verified("the secret", "rank", "a challenge", sent) == {"rank": 0}
    for secret, role, challenge in (
        ("the secret", "rank", "another"),
        ("the secret", "launcher", "a challenge"),
        ("a guess", "rank", "a challenge"),
    ):
        with pytest.raises(CommunicationError, match=f"no {role} of this job"):
            verified(secret, role, challenge, sent)


def test_a_rank_takes_no_request_from_a_launcher_that_does_not_know_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "_RETRY_FOR_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:

        def pretend() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as reader:
                connection.sendall(b"a challenge\n")
                hello = json.loads(reader.readline().partition(b" ")[2])
                connection.sendall(signed("a guess", "launcher", hello["challenge"], "{}"))

        threads.submit(pretend)
        with pytest.raises(CommunicationError, match="no launcher of this job"):
            connect(0, {VARIABLE: f"secret 127.0.0.1:{server.getsockname()[1]}"})


def test_an_unknown_process_cannot_be_taken_for_a_rank(
    listener: Listener, state: JobState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "_RETRY_FOR_S", 0.0)
    with pytest.raises(CommunicationError, match="rank 0 on"):
        connect(0, {VARIABLE: "wrong " + listener.environment[VARIABLE].split()[1]})
    assert not state.pids


def test_what_a_rank_said_as_it_was_killed_may_be_cut_off_and_what_others_say_then_is_no_cause(state: JobState) -> None:
    error = {"rank": 0, "time": 0.0, "consequence": False, "kind": "NotFiniteError", "given": "nan"}
    with contextlib.closing(listening(2, {}, state)) as listener:
        for line in ('{"result": {"losses": [0.1, 0.', '{"killed": 9}', json.dumps({"error": error})):
            listener.receive(1, line)
    assert (state.result, state.killed, state.errors) == ([], {1: 9}, [])
