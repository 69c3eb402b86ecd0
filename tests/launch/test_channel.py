"""The control channel: ranks prove who they are before anything of theirs is read, and a stranger ends only himself."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpsim.errors import CommunicationError
from dpsim.launch import authentication, control_channel, rank_channel
from dpsim.launch.failure_report import JobState

REQUEST = {"argument": "é" * 100, "devices": 1}


@pytest.fixture
def listener() -> Iterator[tuple[control_channel.Listener, JobState]]:
    """A listening channel that a thread serves, as the launcher does while a job runs."""
    seen, over = JobState(), threading.Event()
    listener = control_channel.Listener(1, REQUEST, seen, lambda _: None, all_interfaces=False)
    failures: list[BaseException] = []

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            listener.serve(selector)
            while not over.is_set():
                for key, _ in selector.select(0.01):
                    if not key.data.read(key.fd):
                        selector.unregister(key.fileobj)
                        key.data.end()
                listener.close_silent(selector)

    def kept() -> None:
        try:
            serve()
        except BaseException as error:  # handed to the test
            failures.append(error)

    thread = threading.Thread(target=kept)
    thread.start()
    yield listener, seen
    over.set()
    thread.join()
    listener.close()
    assert not failures


def connected(listener: control_channel.Listener) -> socket.socket:
    host, _, port = listener.environment[authentication.VARIABLE].split()[1].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


@contextlib.contextmanager
def rank_of(listener: control_channel.Listener) -> Iterator[rank_channel.LauncherConnection]:
    rank = rank_channel.connect(0, listener.environment)
    try:
        yield rank
    finally:
        rank._socket.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def closed(connection: socket.socket) -> bool:
    """Whether the launcher closes the connection within 5 s (the challenge may come first)."""
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
    name: str, listener: tuple[control_channel.Listener, JobState]
) -> None:
    serving, seen = listener
    for resets in (False, True):
        with connected(serving) as stranger:
            with contextlib.suppress(OSError):  # he may be sent away while he still speaks
                stranger.sendall(STRANGE[name])
                if resets:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    stranger.shutdown(socket.SHUT_WR)
            assert resets or closed(stranger)
    with rank_of(serving) as rank:
        assert rank.request == REQUEST
        rank.send("result", 7)
        until(lambda: seen.result == [7])


def test_a_stranger_who_says_nothing_or_little_is_sent_away_in_time(
    listener: tuple[control_channel.Listener, JobState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "HELLO_S", 0.2)
    serving, _ = listener
    with connected(serving) as silent, connected(serving) as slow:
        slow.sendall(b"a")
        assert closed(silent)
        assert closed(slow)


@pytest.mark.slow
def test_of_many_silent_strangers_the_oldest_are_sent_away_and_a_rank_comes_through(
    listener: tuple[control_channel.Listener, JobState],
) -> None:
    serving, _ = listener
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(serving)) for _ in range(100)]
        assert stack.enter_context(rank_of(serving)).request == REQUEST
        assert all(closed(stranger) for stranger in strangers[:80])


def test_no_more_than_a_hello_is_kept_of_a_stranger(listener: tuple[control_channel.Listener, JobState]) -> None:
    serving, _ = listener
    with connected(serving) as stranger:
        stranger.sendall(b"x" * (control_channel.HELLO_BYTES - 1))
        time.sleep(0.1)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"x")
        assert closed(stranger)


def test_the_secret_never_travels_and_a_recorded_hello_is_worth_nothing() -> None:
    secret, challenge = "the secret", authentication.challenge()
    sent = authentication.signed(secret, "rank", challenge, '{"rank": 0}')
    assert b"secret" not in sent
    assert authentication.verified(secret, "rank", challenge, sent) == b'{"rank": 0}'
    for role, other in (("rank", authentication.challenge()), ("launcher", challenge)):
        with pytest.raises(CommunicationError, match=f"no {role} of this job"):
            authentication.verified(secret, role, other, sent)  # type: ignore[arg-type]


def test_a_rank_takes_no_request_from_a_launcher_that_does_not_know_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "_RETRY_FOR_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as reader:
                connection.sendall(f"{authentication.challenge()}\n".encode())
                hello = json.loads(reader.readline().partition(b" ")[2])
                connection.sendall(authentication.signed("a guess", "launcher", hello["challenge"], "{}"))

        thread = threading.Thread(target=pretend)
        thread.start()
        environment = {authentication.VARIABLE: f"secret 127.0.0.1:{server.getsockname()[1]}"}
        with pytest.raises(CommunicationError, match="no launcher of this job"):
            rank_channel.connect(0, environment)
        thread.join()


def test_an_unknown_rank_process_cannot_be_taken_for_a_rank(
    listener: tuple[control_channel.Listener, JobState],
) -> None:
    serving, seen = listener
    environment: dict[str, Any] = {
        authentication.VARIABLE: "wrong " + serving.environment[authentication.VARIABLE].split()[1]
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_channel, "_RETRY_FOR_S", 0.0)
        with pytest.raises(CommunicationError, match="rank 0 on"):
            rank_channel.connect(0, environment)
    assert not seen.pids
