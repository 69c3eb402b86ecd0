"""Trains a module in a loop of one's own on MPI ranks, beside PyTorch's optimizer on the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from mpi4py import MPI

import dpsim.torch
from dpsim.optimizer import Sgd
from dpsim.progress import Progress


def trained(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> dict[str, float]:
    """The largest difference of parameters and losses after some steps on tokens [b, 4]."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Linear(6, 5), torch.nn.Conv1d(4, 5, 1))
    alone = copy.deepcopy(module)
    inputs = torch.randint(0, 9, (3, 4 * comm.size, 4))
    labels = torch.randint(0, 5, (3, 4 * comm.size, 5))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    own = slice(4 * comm.rank, 4 * comm.rank + 4)
    trainer = dpsim.torch.ModuleTrainer(
        module, (inputs[0, own], labels[0, own]), optimizer=Sgd(learning_rate=0.1, momentum=0.9), **argument
    )
    losses = []
    for x, targets in zip(inputs, labels, strict=True):
        mine = trainer.step(x[own], targets[own])
        loss = torch.nn.functional.cross_entropy(alone(x), targets, reduction="sum") / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(abs(comm.allreduce(mine) / comm.size - float(loss)))
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    parameters = max(float((a - b).detach().abs().max()) for a, b in pairs)
    trainer.close()
    return {"parameters": comm.allreduce(parameters, MPI.MAX), "losses": comm.allreduce(max(losses), MPI.MAX)}
