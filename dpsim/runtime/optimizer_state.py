"""Optimizer state brought together from the ranks' shards, and handed out to them: for checkpoints and digests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from dpsim.replica import Array
from dpsim.runtime.arena import Arena

Tensors = dict[str, dict[str, Array]]
"""The tensors of each of the optimizer's slots, by slot and name."""


def gathered(arena: Arena, comm: MPI.Intracomm, root: int | None = None) -> Tensors:
    """The whole optimizer state as host arrays, on every rank or on ``root`` (elsewhere empty).

    Collective where it is sharded. Where it is not, it shares the arena's memory if that is the host's.
    """
    if not arena.sharded:
        return {slot: arena.on_host(flat) for slot, flat in arena.optimizer_state.items()}
    whole: Tensors = {}
    for slot, own in arena.optimizer_state.items():
        parts = comm.allgather(own) if root is None else comm.gather(own, root)
        if parts is not None:
            flat = np.zeros_like(arena.parameters)
            for rank, part in enumerate(parts):
                for shard in arena.shards_of(rank):
                    flat[shard.elements] = part[shard.state]
            whole[slot] = arena.views(flat)
    return whole


def distribute(arena: Arena, comm: MPI.Intracomm, whole: Mapping[str, Mapping[str, Array]] | None) -> None:
    """Set every rank's optimizer state to its part of rank 0's ``whole`` one (None elsewhere). Collective.

    Tensors of ``whole`` are by slot and name.
    """
    for slot, own in arena.optimizer_state.items():
        parts = None
        if whole is not None:
            flat = np.zeros(arena.parameters.shape, arena.parameters.dtype)
            for name, view in arena.views(flat).items():
                view[...] = whole[slot][name]
            parts = [_packed(arena, rank, flat) for rank in range(comm.size)] if arena.sharded else [flat]
        if arena.sharded:
            own[...] = comm.scatter(parts)
            continue
        host = parts[0] if parts is not None else np.empty(own.shape, own.dtype)
        comm.Bcast(host)
        arena.memory.write(own, host)


def _packed(arena: Arena, rank: int, flat: Array) -> Array:
    """A rank's part of a flat array, as it lies in its optimizer state."""
    shards = arena.shards_of(rank)
    packed = np.zeros(shards[-1].state.stop if shards else 0, flat.dtype)
    for shard in shards:
        packed[shard.state] = flat[shard.elements]
    return packed
