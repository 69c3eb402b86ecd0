"""The models and the training in PyTorch: plain on one rank, DistributedDataParallel on several. Loads torch."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from dpsim.data import epoch_batches, load_dataset, shard
from dpsim.experiments.peers.result import from_torch, match, to_torch
from dpsim.experiments.peers.setting import CLASSES, OPTIMIZER, Change, Work
from dpsim.nn import build_model
from dpsim.replica import Array

_LOCAL_BUFFERS = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}
"""Running statistics stay each rank's own, as in dpsim. PyTorch 2.13 has given the argument another name."""


def build(work: Work) -> tuple[Any, dict[str, str]]:
    """Return the work's model with dpsim's initial weights, and dpsim's tensor name of each of its parameters."""
    network = build_model(work.token, work.shape, CLASSES)
    tensors = [tensor for layer in network.layers for tensor in layer.tensors]
    model = (
        resnet20(work.shape[-1])
        if work.kind == "resnet20"
        else mlp([tensors[0].shape[0], *(t.shape[1] for t in tensors if len(t.shape) == 2)])
    )
    ours = {tensor.name: tensor.shape for tensor in tensors}
    names = match(ours, {name: tuple(value.shape) for name, value in model.named_parameters()})
    values = network.initial_parameters(work.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(to_torch(values[names[name]])))
    return model, names


def mlp(widths: Sequence[int]) -> Any:
    """Return linear layers of these widths, the inputs' first, with a rectifier between them."""
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def resnet20(channels: int) -> Any:
    """Return ResNet-20 of He et al. (arXiv:1512.03385, section 4.2) for 32 x 32 pictures, with shortcuts of kind A."""
    layers: list[Any] = [*_conv_bn(channels, 16, 1), nn.ReLU(inplace=True)]
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(_Block(inputs, outputs, 2 if block == 0 and outputs != inputs else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def _conv_bn(inputs: int, outputs: int, stride: int) -> tuple[Any, Any]:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs)


class _Block(nn.Module):  # type: ignore[misc]
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); the shortcut has no weights.

    Where the channels double it takes every second pixel, and zeros for half of the new channels on either side.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first, second = _conv_bn(inputs, outputs, stride), _conv_bn(outputs, outputs, 1)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        self.stride, self.new = stride, (outputs - inputs) // 2

    def forward(self, x: Any) -> Any:
        short = x if self.stride == 1 else nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.new, self.new))
        return nn.functional.relu_(self.body(x) + short)


def join_group(comm: MPI.Intracomm, folder: Path) -> None:
    """Form gloo's group of all ranks, which DDP needs once a process, by way of a file in ``folder``."""
    torch.set_num_threads(1)
    if comm.size > 1:
        rendezvous = comm.bcast(str(folder / "gloo") if comm.rank == 0 else None)
        distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=comm.rank, world_size=comm.size)


class TorchTraining:
    """A model with its optimizer, batches and, on several ranks, DDP.

    Without communication (``no_sync``) its weights diverge from rank to rank.
    """

    def __init__(self, comm: MPI.Intracomm, work: Work, setting: Change, *, communicate: bool) -> None:
        channels_last = setting["memory_format"] == "channels-last"
        bare, self._names = build(work)
        if channels_last:
            bare = bare.to(memory_format=torch.channels_last)
        self._bare, self._model, self._work = bare, bare, work
        self._finish: Callable[[], object] = list
        self._scale = 1.0
        self._apart: Callable[[], Any] = contextlib.nullcontext
        if comm.size > 1:
            caps = {"gradient_as_bucket_view": setting["bucket_view"], "bucket_cap_mb": setting["bucket_cap_mb"]}
            self._model = DistributedDataParallel(bare, **caps, **_LOCAL_BUFFERS)
            if setting["allreduce"] != "gloo":
                self._scale = 1.0 / comm.size  # MPI adds; gloo's DDP divides by itself
                self._finish = _reduce_by_mpi(self._model, comm, setting["allreduce"])
            if not communicate:
                self._apart = self._model.no_sync
        self._optimizer = torch.optim.SGD(
            bare.parameters(),
            lr=OPTIMIZER.learning_rate,
            momentum=OPTIMIZER.momentum,
            weight_decay=OPTIMIZER.weight_decay,
            **{setting["optimizer"]: True},
        )
        self._loss = torch.nn.CrossEntropyLoss()
        self._batches = _batches(work, comm.rank, channels_last=channels_last)

    def step(self) -> Any:
        """Make one optimizer update; return the loss, summed over this rank's samples, still a tensor."""
        x, labels = next(self._batches)
        self._optimizer.zero_grad(set_to_none=True)
        with self._apart():
            loss = self._loss(self._model(x), labels)
            (loss * self._scale if self._scale != 1.0 else loss).backward()
        self._finish()
        self._optimizer.step()
        return loss.detach() * self._work.local_batch

    def gradients(self) -> dict[str, Array]:
        """Return the last step's gradients, means over the global batch, by dpsim's names and in its layout."""
        return {self._names[name]: from_torch(value.grad.numpy()) for name, value in self._bare.named_parameters()}

    def close(self) -> None: ...


def _batches(work: Work, rank: int, *, channels_last: bool) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's share of dpsim's own batches, epoch after epoch, as [b, C, H, W] in a memory format."""
    dataset = load_dataset(work.dataset, work.seed)
    pictures: NDArray[Any] = dataset.train_x
    if not channels_last:
        pictures = np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))
    low, high = shard(work.global_batch, work.devices, rank)
    for epoch in itertools.count():
        for indices in epoch_batches(len(pictures), work.global_batch, work.seed, epoch):
            mine = indices[low:high]
            x = torch.from_numpy(pictures[mine])
            yield x.permute(0, 3, 1, 2) if channels_last else x, torch.from_numpy(dataset.train_y[mine])


def _reduce_by_mpi(model: Any, comm: MPI.Intracomm, when: str) -> Callable[[], None]:
    """Have MPI add up DDP's buckets in place; returns what has to be called between backward and update."""
    requests: list[MPI.Request] = []
    kept: list[NDArray[Any]] = []

    def reduce(bucket: Any) -> Any:
        buffer = bucket.buffer()
        if when == "hook":
            comm.Allreduce(MPI.IN_PLACE, buffer.numpy())
        elif when == "started":
            requests.append(comm.Iallreduce(MPI.IN_PLACE, buffer.numpy()))
        else:
            kept.append(buffer.numpy())
        done = torch.futures.Future()
        done.set_result(buffer)
        return done

    def finish() -> None:
        MPI.Request.Waitall(requests)
        for data in kept:
            comm.Allreduce(MPI.IN_PLACE, data)
        requests.clear()
        kept.clear()

    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))  # DDP refuses annotations that it does not know
    return finish
