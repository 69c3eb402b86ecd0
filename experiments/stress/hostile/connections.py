"""Strangers connect to the port of a job while it trains: it must end in the same bits as an undisturbed job."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from dpsim.experiments.stress.running import Run
from dpsim.experiments.stress.tally import Outcome

_TRAIN = (
    "dpsim train --model mlp:6 --dataset synthetic:4x4x1,classes=3,train=64,test=16 --devices 2 --global-batch 16"
    " --steps 2000 --reproducible --json"
)
_DIGEST = re.compile(r'"digest": "(\w+)"')


def _message(moments: random.Random) -> bytes:
    return moments.choice(
        (
            b"",
            b"\n",
            b"[" * 200_000 + b"\n",
            b'{"secret": "\\ud800"}\n',
            '{"secret": "é"}\n'.encode(),
            b"a\nb\n",
            b"0" * 64 + b' {"rank": 0}\n',
            b"f" * 63,
            b"GET / HTTP/1.1\r\n\r\n",
            b"x" * 5_000_000,
            b'{"result": {}}\n',
            moments.randbytes(moments.randint(1, 4000)),
            b"\0" * 1024,
            b"9" * 5000 + b"\n",
        )
    )


def stranger(port: int, moments: random.Random) -> str:
    """Make one connection; how it ended."""
    message, ending = _message(moments), moments.choice(("close", "reset", "shut down", "wait", "slowly"))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            if ending == "slowly":
                for index in range(min(len(message), 20)):
                    connection.sendall(message[index : index + 1])
                    time.sleep(0.001)
            else:
                connection.sendall(message)
            if ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif ending == "shut down":
                connection.shutdown(socket.SHUT_WR)
            elif ending == "wait":
                connection.settimeout(moments.uniform(0, 0.05))
                while connection.recv(4096):
                    pass
    except TimeoutError:
        return "it waited"
    except OSError:
        return "sent away"
    return "hung up"


def _port(run: Run) -> int | None:
    """Return the port that a job listens on, which anybody can read in /proc/net/tcp; None if there is none."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.Process(run.process.pid).net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
    return None


def _started(folder: Path) -> Run:
    run = Run(folder)
    run.start(_TRAIN.split())
    return run


def _digest(run: Run) -> str:
    """Return the digest that a job ends with, or else the end of its messages."""
    code = run.process.wait(120)
    return f"exit code {code}: {run.text().strip()[-300:]}" if code else _DIGEST.findall(run.text())[-1]


def run(first: int, last: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """Let strangers ``first`` to ``last`` connect to one job after another."""
    expected = _digest(_started(folder / "undisturbed"))
    while first < last:
        job, outcomes = _started(folder / f"from {first}"), list[Outcome]()
        while job.process.poll() is None and first + len(outcomes) < last:
            number = first + len(outcomes)
            if (port := _port(job)) is not None:
                ending = stranger(port, random.Random(f"{seed} {number}"))
                outcomes.append(Outcome(case=str(number), became=ending))
        digest = _digest(job)
        for outcome in outcomes:
            wrong = "" if digest == expected else f"the run ended in {digest}"
            yield msgspec.structs.replace(outcome, wrong=wrong)
        first += len(outcomes)
