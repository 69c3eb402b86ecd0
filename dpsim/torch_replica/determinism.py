"""Whether PyTorch gives a leaf the same bits whenever it is computed on a device."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import torch

from dpsim.memory import Memory
from dpsim.nn.network import NoEvents
from dpsim.replica import Batch, Replica
from dpsim.torch_replica.state import unchanged


def fix_algorithms() -> None:
    """Let PyTorch use algorithms alone that add in a fixed order, in float32, for the rest of this process.

    Operations that have none then raise an error with their name.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def leaf_difference(replica: Replica, batch: Batch, memory: Memory) -> str | None:
    """What differs if the leaves of a batch, each a step of its own, are computed again in another order."""
    initial = replica.initial_parameters(batch.seed)
    gradients = {name: memory.xp.zeros(value.shape, value.dtype) for name, value in initial.items()}
    replica.bind({name: memory.xp.asarray(value) for name, value in initial.items()}, gradients)
    leaves = [_part(batch, low, high) for low, high in itertools.pairwise(batch.leaves)]
    digests: list[dict[str, str]] = [{} for _ in leaves]
    with unchanged(replica.state()):
        for number in [*range(len(leaves)), *reversed(range(len(leaves)))]:
            sums = replica.forward_backward(leaves[number], NoEvents())
            values = memory.fetch(list(gradients.values()))
            names = ("the loss", *(f"the gradient of {name}" for name in gradients))
            for name, value in zip(names, [np.array(sums.fetch().loss), *values], strict=True):
                digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
                if digests[number].setdefault(name, digest) != digest:
                    return name
    return None


def _part(batch: Batch, low: int, high: int) -> Batch:
    x, labels = batch.x[low:high], batch.labels[low:high]
    return replace(batch, x=x, labels=labels, leaves=(0, high - low), first_sample=batch.first_sample + low)
