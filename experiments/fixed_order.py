"""``python -m dpsim.experiments.fixed_order`` times the fixed order of addition against the plain one, on real ranks.

Two-shot runs in shared memory, in place, with each summation order in turn; every rank rewrites its partial sums
before each call, as backward does. ``plain`` adds rank after rank. ``tree`` is the fixed order with one leaf a rank,
``tree of V`` that with V leaves, where a rank whose leaves are no whole subtree has extra partial sums. Prints ratios
of medians.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.shared import shared_memory
from dpsim.errors import DpsimError
from dpsim.harness.measurement.loop import StopRule, rounds
from dpsim.kernels.allreduce.cpu import SharedGroup
from dpsim.kernels.allreduce.registry import find, floor_bytes
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress
from dpsim.units import format_size, parse_size

PLAIN, TREE = "plain", "tree"
_LEAST_ROUNDS = 5


def orders(devices: int, leaves: int) -> dict[str, PartialSums]:
    """The summation orders to compare, by name."""
    one_after_another: Tree = 0
    for rank in range(1, devices):
        one_after_another = (one_after_another, rank)
    return {
        PLAIN: PartialSums(tuple(range(devices)), one_after_another),
        TREE: slots(range(devices + 1)),
        f"tree of {leaves}": slots([rank * leaves // devices for rank in range(devices + 1)]),
    }


def measure(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """The task: median seconds of every summation order at every size. A call takes as long as its slowest rank."""
    compared = orders(comm.size, argument["leaves"])
    slot_count = max(len(order.owners) for order in compared.values())
    two_shot = find("cpu", "two-shot")
    group = SharedGroup(
        comm.rank,
        comm.size,
        _shared(comm, SharedGroup.control_bytes(comm.size)),
        oversubscribed=comm.size > (os.cpu_count() or 1),
    )
    stop = StopRule(least_rounds=_LEAST_ROUNDS, most_s=argument["seconds"])
    rows = []
    for size in argument["sizes"]:
        memory = _shared(comm, slot_count * size)
        arrays = [memory[slot * size : (slot + 1) * size].view(np.float32) for slot in range(slot_count)]
        runs = {name: two_shot.make(group, arrays[: len(order.owners)], order).run for name, order in compared.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for current in rounds(stop, warm_up=1, comm=comm):
            for name in current.order(list(runs)):
                for slot in compared[name].of(comm.rank):
                    arrays[slot].fill(1.0)
                comm.Barrier()
                start_s = now()
                runs[name]()
                time_s = now() - start_s
                if current.counted:
                    samples[name].append(time_s)
        slowest = {name: np.max(comm.allgather(times), axis=0) for name, times in samples.items()}
        medians = {name: float(np.median(times)) for name, times in slowest.items()}
        rows.append({"size_bytes": size, "rounds": len(samples[PLAIN]), "time_s": medians})
        report(f"{comm.size} ranks, {format_size(size)}")
    return rows


def _shared(comm: MPI.Intracomm, size_bytes: int) -> Any:
    memory = shared_memory(comm, size_bytes, "dpsim-fixed-order")
    if memory is None:
        raise DpsimError(f"{format_size(size_bytes)} cannot be shared between the ranks")
    return np.frombuffer(memory, np.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.fixed_order", description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(parse_size(text)) for text in arguments.sizes]
    task = {"leaves": arguments.leaves, "sizes": sizes, "seconds": arguments.seconds}
    results = {}
    for devices in arguments.devices:
        results[devices] = on_ranks("dpsim.experiments.fixed_order:measure", task, devices=devices, pin=True)
    if arguments.json:
        print(json.dumps(results))
        return 0
    two_shot = find("cpu", "two-shot")
    for devices, rows in results.items():
        for name, order in orders(devices, arguments.leaves).items():
            moved = two_shot.bytes_moved(order, 1) / floor_bytes(devices, 1)
            print(f"{devices} ranks, {name}: {order.extra} extra partial sums, {moved:.3g} of the bound's bytes")
        for row in rows:
            times = row["time_s"]
            ratios = ", ".join(f"{name} {times[name] / times[PLAIN]:.3f}" for name in times if name != PLAIN)
            size = format_size(row["size_bytes"])
            print(f"  {size:>8}: plain {times[PLAIN] * 1e6:9.1f} us; over plain: {ratios} ({row['rounds']} rounds)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
