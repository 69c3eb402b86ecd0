"""How well the emulated link keeps its latency and bandwidth, and the core time that waiting for it takes.

``python -m dpsim.experiments.pacer [NETWORK ...]`` starts two ranks and times ring allreduces on them, while they are
idle and during a backward. Such an allreduce is two messages, one after the other: a message takes half of its time.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.networks import transport
from dpsim.comm.progress import progress
from dpsim.comm.transport import Transport
from dpsim.experiments import command
from dpsim.launch.jobs import on_ranks
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.study.runners.load import ReplicaLoad

NETWORKS = ("paced:200us,200mbit", "paced:50us,1gbit")
MESSAGE_BYTES = (4, 16 * 1024, 256 * 1024)
CASES = (("inline", False), ("thread", False), ("poll", True), ("thread", True))
BACKWARD = ("mlp:64x20", "digits", 256)
"""Model, data set and local batch whose forward and backward run again and again during the messages."""
_IDLE_S = 50e-6


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """Return one row for each message size and case (overlap mechanism, whether a backward runs), on two ranks.

    A row has seconds a message: ``due_s`` by the link's latency and bandwidth; ``time_s``, the measured median;
    ``undisturbed_s``, the first decile, which other programs disturb least; ``earliest_s``, the least of measured -
    due; ``core_s``, the core time of the waiting thread (None under ``poll``, where no thread waits).
    """
    link = transport(comm, Network.parse(argument["network"]))
    sizes, repeats = argument["sizes_bytes"], argument["repeats"]
    return [_row(comm, link, size, overlap, loaded, repeats) for size in sizes for overlap, loaded in CASES]


def _row(
    comm: MPI.Intracomm, link: Transport, size_bytes: int, overlap: str, loaded: bool, repeats: int
) -> dict[str, Any]:
    ends: list[float] = []
    core: list[float] = []

    def finished(bucket: int, size: int, start_s: float, end_s: float) -> None:
        core.append(time.thread_time())
        ends.append(end_s)

    mechanism = progress(link, "ring", overlap, finished)
    load = ReplicaLoad(*BACKWARD)
    allreduce = mechanism.prepare(np.zeros(size_bytes // 2, np.float32))  # two chunks of ``size_bytes``, one a message
    starts: list[float] = []
    for number in range(repeats):
        comm.Barrier()
        if overlap == "inline":
            core.append(time.thread_time())
        starts.append(now())
        mechanism.submit(0, allreduce)
        while len(ends) == number:
            if loaded:
                load.run(1, mechanism.poll)
            else:
                time.sleep(_IDLE_S)
        mechanism.finish()
    mechanism.close()
    every_start, every_end = np.array(comm.allgather(starts)), np.array(comm.allgather(ends))
    due_s = link.network.latency_s + size_bytes / link.network.bandwidth_bytes_per_s
    time_s = (every_end.max(axis=0) - every_start.max(axis=0)) / 2
    waits = np.diff(core)[:: 2 if overlap == "inline" else 1]
    return {
        "size_bytes": size_bytes,
        "overlap": overlap,
        "beside": loaded,
        "due_s": due_s,
        "time_s": float(np.median(time_s)),
        "undisturbed_s": float(np.quantile(time_s, 0.1)),
        "earliest_s": float((every_end - every_start).min()) / 2 - due_s,
        "core_s": None if overlap == "poll" else float(statistics.median(waits)) / 2,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, times in microseconds."""
    lines = ["   bytes  waiting  beside      due us  measured us   error   core us a message"]
    for row in rows:
        core = "-" if row["core_s"] is None else f"{row['core_s'] * 1e6:.0f} ({row['core_s'] / row['time_s']:.0%})"
        lines.append(
            f"{row['size_bytes']:8d}  {row['overlap']:7s}  {'backward' if row['beside'] else 'idle':8s}"
            f"{row['due_s'] * 1e6:10.1f}{row['time_s'] * 1e6:13.1f}{row['time_s'] / row['due_s'] - 1:8.1%}{core:>20s}"
        )
    return "\n".join(lines)


def main() -> int:
    options = command.parser("pacer", __doc__)
    options.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK")
    networks = options.parse_args().networks

    def run() -> None:
        for network in networks:
            argument = {"network": network, "sizes_bytes": list(MESSAGE_BYTES), "repeats": 60}
            rows = on_ranks("dpsim.experiments.pacer:measure_on_ranks", argument, devices=2, pin=True)
            print(f"{network}, emulated\n{table(rows)}\n", flush=True)

    return command.ended("pacer", run)


if __name__ == "__main__":
    raise SystemExit(main())
