"""Strangers at the port of a running job, while it trains: it must come to the same bits as an undisturbed one."""

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
    """What a stranger says."""
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
    said, how = _message(moments), moments.choice(("close", "reset", "shut down", "wait", "slowly"))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            if how == "slowly":
                for index in range(min(len(said), 20)):
                    connection.sendall(said[index : index + 1])
                    time.sleep(0.001)
            else:
                connection.sendall(said)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "shut down":
                connection.shutdown(socket.SHUT_WR)
            elif how == "wait":
                connection.settimeout(moments.uniform(0, 0.05))
                while connection.recv(4096):
                    pass
    except TimeoutError:
        return "it waited"
    except OSError:
        return "sent away"
    return "hung up"


class _Job:
    """A training command of this machine that a job's strangers look for."""

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
        """Where it listens, as anybody may read in /proc/net/tcp; None where it does not, or has ended."""
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(self._process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return int(connection.laddr.port)
        return None

    def runs(self) -> bool:
        return self._process.poll() is None

    def digest(self) -> str:
        """What it came to; else what it said last."""
        shown, said = self._process.communicate(timeout=120)
        if self._process.returncode:
            return f"exit code {self._process.returncode}: {said.strip()[-300:]}"
        return str(json.loads(shown)["summary"]["digest"])


def run(first: int, last: int, seed: int, folder: Path, add: Callable[[Outcome], None]) -> None:
    """Strangers ``first`` to ``last``, at as many jobs one after another as they take."""
    expected = _Job(folder).digest()
    while first < last:
        job, met = _Job(folder), list[Outcome]()
        while job.runs() and first + len(met) < last:
            number = first + len(met)
            if (port := job.port()) is not None:
                how = stranger(port, random.Random(f"{seed} {number}"))
                met.append(Outcome(case=str(number), became=how))
        digest = job.digest()
        for outcome in met:
            wrong = "" if digest == expected else f"the run came to {digest}"
            add(msgspec.structs.replace(outcome, wrong=wrong))
        first += len(met)
