"""Training on several ranks inside one process: a thread a rank, and messages in a mailbox."""

from __future__ import annotations

import hashlib
import itertools
import operator
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from memory_transport import Mailbox, MemoryTransport

from dpsim.data import Dataset, epoch_batches
from dpsim.kernels.allreduce.tree import fold
from dpsim.lowering import lower
from dpsim.plan import Plan
from dpsim.replica import Batch, Replica
from dpsim.runtime.describe import describe
from dpsim.runtime.micro_batches import own_leaves, plan_partial_sums
from dpsim.runtime.step import StepRunner

Trained = dict[str, Any]
"""SHA-256 of each tensor by name (``parameters/NAME``, ``optimizer/SLOT/NAME``, ``state/NAME``), and ``losses``."""


def train(build: Callable[[], Replica], dataset: Dataset, plan: Plan, steps: int, seed: int = 0) -> Trained:
    """What training comes to, after every rank was found to have the same bits."""
    gradients, exact = (Mailbox(plan.devices, eager=True) for _ in range(2))
    for end in (*gradients.ranks, *exact.ranks):
        end.oversubscribed = True
    errors: list[BaseException] = []

    def wait_a_little() -> None:
        time.sleep(1e-4)
        if errors:
            raise AssertionError("another rank failed")

    def rank(*ends: MemoryTransport) -> tuple[Trained, list[tuple[float, ...]]]:
        try:
            return _rank(build(), dataset, plan, steps, seed, *ends)
        except BaseException as error:
            errors.append(error)
            raise

    with ThreadPoolExecutor(plan.devices) as pool, patch("os.sched_yield", wait_a_little):
        running = [pool.submit(rank, *ends) for ends in zip(gradients.ranks, exact.ranks, strict=True)]
    if errors:
        raise errors[0]
    ranks = [one.result() for one in running]
    assert plan.batch_norm == "local" or all(digests == ranks[0][0] for digests, _ in ranks)
    losses = []
    for of_step in zip(*(slot_losses for _, slot_losses in ranks), strict=True):
        of_slots = list(itertools.chain.from_iterable(of_step))
        losses.append(fold(plan_partial_sums(plan).tree, of_slots.__getitem__, operator.add))
    return ranks[0][0] | {"losses": losses}


def _rank(
    replica: Replica,
    dataset: Dataset,
    plan: Plan,
    steps: int,
    seed: int,
    transport: MemoryTransport,
    exact: MemoryTransport,
) -> tuple[Trained, list[tuple[float, ...]]]:
    runner = StepRunner(replica, lower(describe(replica, "model"), plan), transport, exact=exact)
    runner.warm_up()
    runner.initialise(seed)
    losses = []
    epochs = (epoch_batches(len(dataset.train_y), plan.global_batch, seed, epoch) for epoch in itertools.count())
    for step, indices in zip(range(steps), itertools.chain.from_iterable(epochs), strict=False):
        edges = own_leaves(plan, transport.rank, len(indices), plan.accumulate)
        x, labels = dataset.train_batch(indices[edges[0] : edges[-1]])
        leaves = tuple(edge - edges[0] for edge in edges)
        share = Batch(x=x, labels=labels, leaves=leaves, seed=seed, step=step, first_sample=edges[0])
        losses.append(runner.run(share, len(indices)).sums.slot_losses)
    runner.close()
    arena = runner.arena
    tensors = {f"parameters/{name}": value for name, value in runner.parameters.items()}
    for slot, flat in arena.optimizer_state.items():
        tensors |= {f"optimizer/{slot}/{name}": value for name, value in arena.views(flat).items()}
    tensors |= {f"state/{name}": value for name, value in replica.state().items()}
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in tensors.items()}, losses
