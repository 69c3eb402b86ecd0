"""``python -m dpsim.experiments.fixed_order`` times the fixed order of addition against the plain one, on real ranks.

Two-shot in shared memory, in place, each order in turn and in random order; every rank rewrites its partial sums
before each call, as backward does. ``plain`` adds rank after rank; ``tree`` is the fixed order with a leaf a rank;
``tree of V`` that of V leaves, where a rank whose leaves are no whole subtree has extra partial sums. Prints ratios of
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.shared import shared_memory
from dpsim.errors import DpsimError
from dpsim.kernels.allreduce.cpu import SharedGroup
from dpsim.kernels.allreduce.registry import find, floor_bytes
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots
from dpsim.launch.jobs import on_ranks
from dpsim.units import format_size, parse_size

PLAIN, TREE = "plain", "tree"


def orders(devices: int, leaves: int) -> dict[str, PartialSums]:
    """The orders that are compared, by name."""
    one_after_another: Tree = 0
    for rank in range(1, devices):
        one_after_another = (one_after_another, rank)
    return {
        PLAIN: PartialSums(tuple(range(devices)), one_after_another),
        TREE: slots(range(devices + 1)),
        f"tree of {leaves}": slots([rank * leaves // devices for rank in range(devices + 1)]),
    }


def measure(comm: MPI.Intracomm, argument: dict[str, Any], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The task: seconds of every order at every size, medians over the slowest rank's times."""
    kinds = orders(comm.size, argument["leaves"])
    most = max(len(order.owners) for order in kinds.values())
    two_shot = find("cpu", "two-shot")
    group = SharedGroup(
        comm.rank,
        comm.size,
        _shared(comm, SharedGroup.control_bytes(comm.size)),
        oversubscribed=comm.size > (os.cpu_count() or 1),
    )
    rows = []
    for size in argument["sizes"]:
        memory = _shared(comm, most * size)
        arrays = [memory[number * size : (number + 1) * size].view(np.float32) for number in range(most)]
        runs = {name: two_shot.make(group, arrays[: len(order.owners)], order).run for name, order in kinds.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        draw = np.random.default_rng(0)
        end_s = now() + argument["seconds"]
        rounds = 0
        while rounds < 6 or comm.bcast(now() < end_s):
            for name in draw.permutation(list(runs)):
                for number in kinds[name].of(comm.rank):
                    arrays[number].fill(1.0)
                comm.Barrier()
                start_s = now()
                runs[name]()
                samples[name].append(now() - start_s)
            rounds += 1
        slowest = {
            name: [max(row) for row in zip(*comm.allgather(times[1:]), strict=True)] for name, times in samples.items()
        }
        rows.append(
            {"size_bytes": size, "rounds": rounds - 1, "time_s": {n: statistics.median(t) for n, t in slowest.items()}}
        )
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
    options = parser.parse_args()
    argument = {
        "leaves": options.leaves,
        "sizes": [int(parse_size(text)) for text in options.sizes],
        "seconds": options.seconds,
    }
    results = {}
    for devices in options.devices:
        results[devices] = on_ranks("dpsim.experiments.fixed_order:measure", argument, devices=devices, pin=True)
    if options.json:
        print(json.dumps(results))
        return 0
    for devices, rows in results.items():
        kinds = orders(devices, options.leaves)
        two_shot = find("cpu", "two-shot")
        for name, order in kinds.items():
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
