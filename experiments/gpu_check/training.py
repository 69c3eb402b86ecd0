"""A figure of training on one GPU, beside PyTorch's eager mode where it is installed.

A figure is two lists of samples, taken in turns: dpsim's own, and what it is compared with (``record.TARGETS`` says
how). ``python -m ...gpu_check.training FILE NAME`` appends the one of this name to FILE, or prints why it is left out.
A process takes one figure: what a figure does to the GPU, to its libraries or to their settings spoils no other.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.cuda.available import open_device, simulating
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.comm.cuda.transport import CudaTransport
from dpsim.data import load_dataset
from dpsim.dtypes import ComputeDtype
from dpsim.experiments.gpu_check import record as r
from dpsim.experiments.gpu_check.journal import keep
from dpsim.experiments.gpu_check.layers import check_layers
from dpsim.experiments.gpu_check.probes import why_no_pytorch
from dpsim.machine import Network
from dpsim.nn import build_model, network
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.processor import layers_by_kernels
from dpsim.replica import Array, Replica
from dpsim.runtime.arena import Arena
from dpsim.runtime.recorder import seconds_per_event, timeline
from dpsim.runtime.trainer import Trainer
from dpsim.study.loop import StopRule, in_turns

CLASSES = 10
MLP_SHAPE = (28, 28, 1)
_RATE, _MOMENTUM = 0.01, 0.9
_MARKS = 1000
"""So many marks are asked for in the stream that computes, to know what the host takes for one."""


Inputs = tuple[str, tuple[int, int, int], int]
"""Model token, shape of a sample, batch."""
MakePeer = Callable[[str, tuple[int, int, int], int, ComputeDtype], Any]
"""Makes a ``TorchModel``, or what stands for it."""
Steps = Callable[[int], object]
"""Trains so many steps, and waits for the GPU."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What is trained, in how many rounds of how many steps."""

    mlp: Inputs = ("mlp:4096,4096,4096,4096", MLP_SHAPE, 1024)
    bfloat16_mlp: Inputs = ("mlp:8192,8192,8192,8192", MLP_SHAPE, 1024)
    reproducible: Inputs = ("mlp:4096,4096,4096,4096", MLP_SHAPE, 2048)
    pictures: Inputs = ("resnet20", (32, 32, 3), 512)
    rounds: int = 7
    counted: int = 5


_TOY_MLP: Inputs = ("mlp:4,4", MLP_SHAPE, 8)
TOY = Effort(
    mlp=_TOY_MLP,
    bfloat16_mlp=_TOY_MLP,
    reproducible=("mlp:4,4", MLP_SHAPE, 16),
    pictures=("cnn:2", (4, 4, 1), 4),
    rounds=2,
    counted=1,
)


@contextlib.contextmanager
def _training(token: str, shape: tuple[int, int, int], batch: int, **plan: Any) -> Iterator[Trainer]:
    """Hold a trainer on this process's GPU, where this project's kernels of its layers have been held against NumPy."""
    height, width, channels = shape
    dataset = load_dataset(f"synthetic:{height}x{width}x{channels},classes={CLASSES},train={2 * batch},test={CLASSES}")
    optimizer = Sgd(learning_rate=_RATE, momentum=_MOMENTUM)
    asked = Plan(devices=1, global_batch=batch, optimizer=optimizer, **plan)
    replica = build_model(token, dataset.input_shape, dataset.classes)
    if layers_by_kernels():
        check_layers(replica, batch, lambda: DeviceMemory(open_device(0)))
    if token.startswith("mlp:"):
        replica.initial_parameters = functools.partial(_initial, replica)  # type: ignore[method-assign]
    trainer = Trainer(replica, dataset, asked, MPI.COMM_SELF, Network(), backend="cuda")
    try:
        yield trainer
    finally:
        trainer.close()


def _initial(replica: Replica, seed: int) -> dict[str, Array]:
    """Draw initial values of the same distribution in a tenth of the time; no figure depends on them."""
    random = np.random.Generator(np.random.SFC64(seed))
    values = {}
    for tensor in (tensor for layer in replica.layers for tensor in layer.tensors):
        value = np.zeros(tensor.shape, np.float32)
        if value.ndim > 1:
            random.standard_normal(dtype=np.float32, out=value)
            value *= np.float32(math.sqrt(2 / len(value)))
        values[tensor.name] = value
    return values


def _steps(trainer: Trainer) -> Steps:
    def steps(count: int) -> None:
        for _ in range(count):
            trainer.step()
        _settle(trainer)

    return steps


def _settle(trainer: Trainer) -> None:
    assert isinstance(trainer.transport, CudaTransport)
    trainer.transport.device.settle()


def _timed(name: str, effort: Effort, setting: str, own: Steps, other: Steps, own_too_s: float = 0.0) -> r.Training:
    """Return seconds of a step of both in turns, a sample a round; each of dpsim's own took ``own_too_s`` besides."""

    def visit(steps: Steps) -> float:
        begin_s = time.perf_counter()
        steps(effort.counted)
        return (time.perf_counter() - begin_s) / effort.counted

    stop = StopRule(least_rounds=effort.rounds, most_rounds=effort.rounds)
    step_s = in_turns({"own": lambda: visit(own), "other": lambda: visit(other)}, stop)
    own_s = r.kept(sample + own_too_s for sample in step_s["own"])
    return r.Training(name=name, setting=setting, unit="s", own=own_s, other=r.kept(step_s["other"]))


def _against(
    name: str, effort: Effort, peer: MakePeer, inputs: Inputs, compute_dtype: ComputeDtype = "float32"
) -> r.Training:
    """Time steps of both on the same shapes."""
    with (
        contextlib.closing(peer(*inputs, compute_dtype)) as other,
        _training(*inputs, compute_dtype=compute_dtype) as trainer,
    ):
        setting = _setting(inputs) + (f", {compute_dtype}" if compute_dtype != "float32" else "")
        return _timed(name, effort, setting, _steps(trainer), other.steps)


def _setting(inputs: Inputs) -> str:
    return f"{inputs[0]}, global batch {inputs[2]}"


def _reproducible(effort: Effort, peer: MakePeer) -> r.Training:
    """Time steps with 8 leaves, and without."""
    inputs = effort.reproducible
    with _training(*inputs, leaves=8, batch_norm="leaf") as leaves, _training(*inputs) as plain:
        return _timed(r.REPRODUCIBLE, effort, f"{_setting(inputs)}, 8 leaves", _steps(leaves), _steps(plain))


def _timelines(effort: Effort, peer: MakePeer) -> r.Training:
    """Time steps of which each has a Timeline, made after the last one as a study does, and steps alone.

    What recording their events cost is added, since steps alone record them too.
    """
    with _training(*effort.pictures) as trainer:
        marks = trainer.step().marks.settle()
        begin_s = now()
        for _ in range(_MARKS):
            trainer.transport.memory.mark()
        recording_s = marks.events * (seconds_per_event() + (now() - begin_s) / _MARKS)
        _settle(trainer)

        def recorded(count: int) -> None:
            for step in [trainer.step().marks for _ in range(count)]:
                timeline([[step]], trainer.runner.program.names, emulated_network=False)
            _settle(trainer)

        setting = f"{_setting(effort.pictures)}, {marks.events} events a step"
        return _timed(r.TIMELINES, effort, setting, recorded, _steps(trainer), recording_s)


def _state_bytes(effort: Effort, peer: MakePeer) -> r.Training:
    """Return what the memory of parameters, gradients and optimizer takes of the GPU, and the sum of their bytes."""
    with _training(*effort.mlp) as trainer:
        assert isinstance(trainer.transport, CudaTransport)
        device, arena = trainer.transport.device, trainer.runner.arena
        device.settle()
        before = device.free_bytes()
        another = Arena(trainer.schedule, arena.parameters.dtype, arena.memory.zeros, memory=arena.memory)
        taken = before - device.free_bytes()
        arrays = 2 + len(another.optimizer_state)
    elements = sum(tensor.elements for layer in trainer.replica.layers for tensor in layer.tensors)
    expected = elements * arena.parameters.itemsize * arrays
    return _bytes(r.STATE_BYTES, f"{effort.mlp[0]}, SGD with momentum", taken, expected)


def _activation_bytes(effort: Effort, peer: MakePeer) -> r.Training:
    """Return what a step of both takes beside parameters, gradients and optimizer."""
    with contextlib.closing(peer(*effort.pictures, "float32")) as other:
        other_bytes = other.activation_bytes()
    with _training(*effort.pictures) as trainer:
        # where CuPy takes arrays of layers from, and the results of expressions; the simulator has none
        pool: Any = getattr(trainer.transport.memory.xp, "get_default_memory_pool", lambda: None)()
        if pool is not None:
            pool.free_all_blocks()
        _steps(trainer)(2)
        assert isinstance(trainer.replica, network.Network)
        own_bytes, ops = trainer.replica.work_bytes, trainer.replica.ops
        if pool is not None and ops.results is not None:
            own_bytes = pool.total_bytes() + ops.work_bytes - ops.results.size_bytes
    return _bytes(r.ACTIVATION_BYTES, _setting(effort.pictures), own_bytes, other_bytes)


def _bytes(name: str, setting: str, own: int, other: int) -> r.Training:
    return r.Training(name=name, setting=setting, unit="bytes", own=(float(own),), other=(float(other),))


def no_pytorch() -> str:
    """Say why nothing can be measured beside PyTorch's eager mode, which is loaded."""
    if reason := why_no_pytorch(simulated=simulating()):
        return reason
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else "PyTorch here has no CUDA"


class TorchModel:
    """A training on random samples in PyTorch's eager mode, in float32 without TF32.

    ``token`` is dpsim's name of the model, ``shape`` [H, W, C]; ``where`` is cuda or cpu. With ``compute_dtype``
    bfloat16 forward and loss run under ``torch.autocast``; parameters stay float32.
    """

    def __init__(
        self, token: str, shape: tuple[int, int, int], batch: int, compute_dtype: str, where: str = "cuda"
    ) -> None:
        import torch

        from dpsim.experiments.peers.torch_training import mlp, resnet20

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        height, width, channels = shape
        kind, _, hidden = token.partition(":")
        if kind == "mlp":
            model = mlp([height * width * channels, *map(int, hidden.split(",")), CLASSES])
        else:
            model = resnet20(channels)
        self._torch, self._where, self._rounds = torch, where, compute_dtype == "bfloat16"
        self._model = model.to(where)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
        self._loss = torch.nn.CrossEntropyLoss()
        self._x = torch.randn(batch, channels, height, width)
        self._labels = torch.randint(0, CLASSES, (batch,))

    def steps(self, count: int) -> None:
        """Train ``count`` steps and wait for the GPU."""
        for _ in range(count):
            x, labels = self._x.to(self._where), self._labels.to(self._where)
            self._optimizer.zero_grad(set_to_none=False)  # gradients stay allocated, as dpsim's do
            with self._torch.autocast(self._where, self._torch.bfloat16, enabled=self._rounds):
                loss = self._loss(self._model(x), labels)
            loss.backward()
            self._optimizer.step()
        if self._where == "cuda":
            self._torch.cuda.synchronize()

    def activation_bytes(self) -> int:
        """Return the most memory that a step takes beyond parameters, gradients and optimizer."""
        self.steps(2)  # now gradients and the optimizer's state are allocated
        if self._where != "cuda":
            return 0
        before = self._torch.cuda.memory_allocated()
        self._torch.cuda.reset_peak_memory_stats()
        self.steps(1)
        return int(self._torch.cuda.max_memory_allocated() - before)

    def close(self) -> None:
        """Give its memory back."""
        del self._model, self._optimizer
        if self._where == "cuda":
            self._torch.cuda.empty_cache()


FIGURES: dict[str, Callable[[Effort, MakePeer], r.Training]] = {
    r.MLP_SPEED: lambda effort, peer: _against(r.MLP_SPEED, effort, peer, effort.mlp),
    r.PICTURE_SPEED: lambda effort, peer: _against(r.PICTURE_SPEED, effort, peer, effort.pictures),
    r.REPRODUCIBLE: _reproducible,
    r.TIMELINES: _timelines,
    r.STATE_BYTES: _state_bytes,
    r.ACTIVATION_BYTES: _activation_bytes,
    r.BFLOAT16_SPEED: lambda effort, peer: _against(r.BFLOAT16_SPEED, effort, peer, effort.bfloat16_mlp, "bfloat16"),
}


def measure(name: str, peer: MakePeer | None = None) -> r.Training:
    """Take the figure of this name. ``peer`` replaces PyTorch."""
    return FIGURES[name](TOY if simulating() else Effort(), peer or TorchModel)


def main(path: Path, name: str) -> None:
    """Append a figure to the file ``path``, or print why this machine cannot have it."""
    if missing := no_pytorch() if name in r.BESIDE_PYTORCH else "":
        print(missing)
        return
    try:
        keep(path, [measure(name)])
    except MemoryError as error:  # CuPy's too
        print(f"too little memory: {' '.join(str(error).split())[:200]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
