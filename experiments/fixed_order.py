"""``python -m dpsim.experiments.fixed_order`` times the fixed order of addition against the plain one, on real ranks.

Two-shot runs in shared memory, in place, with each summation order in turn; every rank rewrites its partial sums
before each call, as backward does. ``plain`` adds rank after rank. ``tree`` is the fixed order with one leaf a rank,
``tree of V`` that with V leaves, where a rank whose leaves are no whole subtree has extra partial sums. Prints ratios
of medians with their 95 % intervals.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.shared import shared_memory
from dpsim.errors import DpsimError
from dpsim.experiments import command
from dpsim.experiments.cases import ratio_lines
from dpsim.kernels.allreduce.cpu import SharedGroup
from dpsim.kernels.allreduce.registry import find, floor_bytes
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress
from dpsim.study.loop import StopRule, in_turns
from dpsim.units import format_size, parse_size

PLAIN, TREE = "plain", "tree"
_LEAST_ROUNDS = 5


def orders(devices: int, leaves: int) -> dict[str, PartialSums]:
    """Return the summation orders to compare, by name."""
    one_after_another: Tree = 0
    for rank in range(1, devices):
        one_after_another = (one_after_another, rank)
    return {
        PLAIN: PartialSums(tuple(range(devices)), one_after_another),
        TREE: slots(range(devices + 1)),
        f"tree of {leaves}": slots([rank * leaves // devices for rank in range(devices + 1)]),
    }


def measure(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Time every summation order at every size: seconds of each round. A call takes as long as its slowest rank."""
    compared = orders(comm.size, argument["leaves"])
    slot_count = max(len(order.owners) for order in compared.values())
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

        def visit(order: PartialSums, run: Callable[[], object], arrays: list[Any] = arrays) -> float:
            for slot in order.of(comm.rank):
                arrays[slot].fill(1.0)
            comm.Barrier()
            start_s = now()
            run()
            return now() - start_s

        visits = {}
        for name, order in compared.items():
            run = find("cpu", "two-shot").make(group, arrays[: len(order.owners)], order).run
            visits[name] = lambda order=order, run=run: visit(order, run)
        samples = in_turns(visits, stop, comm=comm)
        slowest = {name: np.max(comm.allgather(times), axis=0).tolist() for name, times in samples.items()}
        rows.append({"size_bytes": size, "rounds": len(samples[PLAIN]), "samples_s": slowest})
        report(f"{comm.size} ranks, {format_size(size)}")
    return rows


def _shared(comm: MPI.Intracomm, size_bytes: int) -> Any:
    memory = shared_memory(comm, size_bytes, "dpsim-fixed-order")
    if memory is None:
        raise DpsimError(f"{format_size(size_bytes)} cannot be shared between the ranks")
    return np.frombuffer(memory, np.uint8)


def main() -> int:
    options = command.parser("fixed_order", __doc__)
    options.add_argument("--devices", type=int, nargs="+", default=[3, 4])
    options.add_argument("--leaves", type=int, default=8)
    options.add_argument("--sizes", nargs="+", default=["64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB"])
    options.add_argument("--seconds", type=float, default=2.0, help="for each size")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()

    def run() -> None:
        sizes = [int(parse_size(text)) for text in given.sizes]
        task = {"leaves": given.leaves, "sizes": sizes, "seconds": given.seconds}
        results = {
            n: on_ranks("dpsim.experiments.fixed_order:measure", task, devices=n, pin=True) for n in given.devices
        }
        if given.json:
            for row in (row for rows in results.values() for row in rows):
                row["time_s"] = {name: float(np.median(times)) for name, times in row.pop("samples_s").items()}
            print(json.dumps(results))
            return
        for devices, rows in results.items():
            for name, order in orders(devices, given.leaves).items():
                moved = find("cpu", "two-shot").bytes_moved(order, 1) / floor_bytes(devices, 1)
                print(f"{devices} ranks, {name}: {order.extra} extra partial sums, {moved:.3g} of the bound's bytes")
            for row in rows:
                print(f"{format_size(row['size_bytes'])}, {row['rounds']} rounds, over {PLAIN}")
                print("\n".join(ratio_lines(row["samples_s"], PLAIN, {})))

    return command.ended("fixed_order", run)


if __name__ == "__main__":
    raise SystemExit(main())
