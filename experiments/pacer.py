"""How well the emulated link keeps its latency and bandwidth, idle and beside a backward, and what its waiting costs.

``python -m dpsim.experiments.pacer [NETWORK ...]`` starts its own two ranks. What is timed is a ring allreduce on
them, which is two messages one after another, so a message's time is half of it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.networks import transport
from dpsim.comm.progress import progress
from dpsim.comm.transport import Transport
from dpsim.errors import DpsimError
from dpsim.harness.calibrate.load import ReplicaLoad
from dpsim.launch.jobs import on_ranks
from dpsim.machine import Network

NETWORKS = ("paced:200us,200mbit", "paced:50us,1gbit")
MESSAGE_BYTES = (4, 16 * 1024, 256 * 1024)
CASES = (("inline", False), ("thread", False), ("poll", True), ("thread", True))
BACKWARD = ("mlp:64x20", "digits", 256)
"""Model, data set and local batch of the passes that run beside the messages, again and again."""
_IDLE_S = 50e-6


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> list[Any]:
    """One row for each message size, mechanism, and whether a backward runs beside it, on two ranks of ``network``.

    A row has seconds a message: ``due_s``, what the link asks for; ``time_s``, the measured median;
    ``undisturbed_s``, that of the tenth that was disturbed least by other programs; ``earliest_s``, the least of
    measured - due; ``core_s``, the core time of the thread that waits (None under ``poll``, where
    the computing thread only passes by).
    """
    link = transport(comm, Network.parse(argument["network"]))
    rows = []
    for size_bytes in argument["sizes_bytes"]:
        for overlap, beside in CASES:
            rows.append(_row(comm, link, size_bytes, overlap, beside, argument["repeats"]))
    return rows


def _row(
    comm: MPI.Intracomm, link: Transport, size_bytes: int, overlap: str, beside: bool, repeats: int
) -> dict[str, Any]:
    ends: list[float] = []
    core: list[float] = []

    def finished(bucket: int, size: int, start_s: float, end_s: float) -> None:
        core.append(time.thread_time())
        ends.append(end_s)

    mechanism = progress(link, "ring", overlap, finished)
    load = ReplicaLoad(*BACKWARD)
    buffer = np.zeros(size_bytes // 2, np.float32)  # two chunks of ``size_bytes``, one a message
    starts: list[float] = []
    for number in range(repeats):
        comm.Barrier()
        if overlap == "inline":
            core.append(time.thread_time())
        starts.append(now())
        mechanism.submit(0, buffer)
        while len(ends) == number:
            if beside:
                load.run(1, mechanism.poll)
            else:
                time.sleep(_IDLE_S)
        mechanism.finish()
    mechanism.close()
    every_start, every_end = np.array(comm.allgather(starts)), np.array(comm.allgather(ends))
    due_s = link.network.latency_s + size_bytes / link.network.bandwidth_bytes_per_s
    took_s = (every_end.max(axis=0) - every_start.max(axis=0)) / 2
    waits = np.diff(core)[:: 2 if overlap == "inline" else 1]
    return {
        "size_bytes": size_bytes,
        "overlap": overlap,
        "beside": beside,
        "due_s": due_s,
        "time_s": float(np.median(took_s)),
        "undisturbed_s": float(np.quantile(took_s, 0.1)),
        "earliest_s": float((every_end - every_start).min()) / 2 - due_s,
        "core_s": None if overlap == "poll" else float(statistics.median(waits)) / 2,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, times in microseconds."""
    lines = ["   bytes  waiting  beside      due us  measured us   error   core us a message"]
    for row in rows:
        core = "-" if row["core_s"] is None else f"{row['core_s'] * 1e6:.0f} ({row['core_s'] / row['time_s']:.0%})"
        lines.append(
            f"{row['size_bytes']:8d}  {row['overlap']:7s}  {'backward' if row['beside'] else 'idle':8s}"
            f"{row['due_s'] * 1e6:10.1f}{row['time_s'] * 1e6:13.1f}{row['time_s'] / row['due_s'] - 1:8.1%}{core:>20s}"
        )
    return "\n".join(lines)


def main(networks: list[str]) -> int:
    """Measure and print one table a network."""
    try:
        for network in networks or NETWORKS:
            argument = {"network": network, "sizes_bytes": list(MESSAGE_BYTES), "repeats": 60}
            rows = on_ranks("dpsim.experiments.pacer:measure_on_ranks", argument, devices=2, pin=True)
            print(f"{network}, emulated\n{table(rows)}\n", flush=True)
    except DpsimError as error:
        print(f"pacer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
