"""Strangers connect to the port of a job while it trains: it must end in the same bits as an undisturbed job."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from dpsim.experiments.stress.hostile.tally import Outcome
from dpsim.launch import scratch

_ROOT = str(Path(str(importlib.resources.files("dpsim"))).resolve().parent)
_TRAIN = (
    "train",
    "--model",
    "mlp:6",
    "--dataset",
    "synthetic:4x4x1,classes=3,train=64,test=16",
    "--devices",
    "2",
    "--global-batch",
    "16",
    "--steps",
    "2000",
    "--reproducible",
    "--json",
)


def _message(moments: random.Random) -> bytes:
    """What a stranger sends."""
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
    """One connection, and how it ended."""
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


class _Job:
    """A training command on this machine, to whose port strangers connect."""

    def __init__(self, folder: Path) -> None:
        variables = {**os.environ, **scratch.environment(folder), "PYTHONPATH": _ROOT}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dpsim", *_TRAIN],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,
            text=True,
        )

    def port(self) -> int | None:
        """The port it listens on, which anybody can read in /proc/net/tcp; None if there is none."""
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(self._process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return int(connection.laddr.port)
        return None

    def runs(self) -> bool:
        return self._process.poll() is None

    def digest(self) -> str:
        """The digest it ended with, or else the end of its messages."""
        output, message = self._process.communicate(timeout=120)
        if self._process.returncode:
            return f"exit code {self._process.returncode}: {message.strip()[-300:]}"
        return str(json.loads(output)["summary"]["digest"])


def run(first: int, last: int, seed: int, folder: Path, add: Callable[[Outcome], None]) -> None:
    """Strangers ``first`` to ``last``, who connect to one job after another."""
    expected = _Job(folder).digest()
    while first < last:
        job, outcomes = _Job(folder), list[Outcome]()
        while job.runs() and first + len(outcomes) < last:
            number = first + len(outcomes)
            if (port := job.port()) is not None:
                ending = stranger(port, random.Random(f"{seed} {number}"))
                outcomes.append(Outcome(case=str(number), became=ending))
        digest = job.digest()
        for outcome in outcomes:
            wrong = "" if digest == expected else f"the run ended in {digest}"
            add(msgspec.structs.replace(outcome, wrong=wrong))
        first += len(outcomes)
