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
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from dpsim.backend import layers_by_kernels
from dpsim.comm.clock import now
from dpsim.comm.cuda.available import open_device, simulating
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.comm.cuda.transport import CudaTransport
from dpsim.compute_dtype import ComputeDtype
from dpsim.data import load_dataset
from dpsim.experiments.gpu_check import record as r
from dpsim.experiments.gpu_check.journal import keep
from dpsim.experiments.gpu_check.layers import check_layers
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.replica import Array, Replica, SizedReplica
from dpsim.runtime.arena import Arena
from dpsim.runtime.recorder import seconds_per_event, timeline
from dpsim.runtime.trainer import Trainer

CLASSES = 10
MLP_SHAPE = (28, 28, 1)
_RATE, _MOMENTUM = 0.01, 0.9
_MARKS = 1000


class NoPeer(Exception):
    """Why a figure cannot be taken beside PyTorch here."""


class Peer(Protocol):
    """The same training by another library. It is made with (model token, shape of a sample, batch, compute dtype)."""

    def steps(self, count: int) -> None:
        """Train ``count`` steps and wait for the GPU."""

    def activation_bytes(self) -> int:
        """The most memory that a step takes beyond parameters, gradients and optimizer."""

    def close(self) -> None:
        """Give its memory back."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What is trained, in how many rounds of how many steps."""

    mlp: str = "mlp:4096,4096,4096,4096"
    bfloat16_mlp: str = "mlp:8192,8192,8192,8192"
    pictures: str = "resnet20"
    picture_shape: tuple[int, int, int] = (32, 32, 3)
    mlp_batch: int = 1024
    picture_batch: int = 512
    reproducible_batch: int = 2048
    rounds: int = 7
    counted: int = 5


TOY = Effort(
    mlp="mlp:4,4",
    bfloat16_mlp="mlp:4,4",
    pictures="cnn:2",
    picture_shape=(4, 4, 1),
    mlp_batch=8,
    picture_batch=4,
    reproducible_batch=16,
    rounds=2,
    counted=1,
)


def measure(name: str, peer: Callable[..., Peer] | None = None) -> r.Training:
    """The figure of this name. ``peer`` stands in for PyTorch. Raises ``NoPeer`` where PyTorch is missing."""
    effort, other = TOY if simulating() else Effort(), peer or _torch_model
    mlp = (effort.mlp, MLP_SHAPE, effort.mlp_batch)
    bfloat16_mlp = (effort.bfloat16_mlp, MLP_SHAPE, effort.mlp_batch)
    pictures = (effort.pictures, effort.picture_shape, effort.picture_batch)
    figures: dict[str, Callable[[], r.Training]] = {
        r.MLP_SPEED: lambda: _against(r.MLP_SPEED, effort, other, *mlp),
        r.PICTURE_SPEED: lambda: _against(r.PICTURE_SPEED, effort, other, *pictures),
        r.REPRODUCIBLE: lambda: _reproducible(effort),
        r.TIMELINES: lambda: _timelines(effort),
        r.STATE_BYTES: lambda: _state_bytes(effort),
        r.ACTIVATION_BYTES: lambda: _activation_bytes(other, *pictures),
        r.BFLOAT16_SPEED: lambda: _against(r.BFLOAT16_SPEED, effort, other, *bfloat16_mlp, compute_dtype="bfloat16"),
    }
    return figures[name]()


@contextlib.contextmanager
def _training(token: str, shape: tuple[int, int, int], batch: int, **plan: Any) -> Iterator[Trainer]:
    """A trainer on this process's GPU, where this project's kernels of its layers have been held against NumPy."""
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
    """Initial values of the same distribution that take a tenth of the time to draw; no figure depends on them."""
    random = np.random.Generator(np.random.SFC64(seed))
    values = {}
    for tensor in (tensor for layer in replica.layers for tensor in layer.tensors):
        value = np.zeros(tensor.shape, np.float32)
        if value.ndim > 1:
            random.standard_normal(dtype=np.float32, out=value)
            value *= np.float32(math.sqrt(2 / len(value)))
        values[tensor.name] = value
    return values


def _steps(trainer: Trainer) -> Callable[[int], None]:
    def steps(count: int) -> None:
        for _ in range(count):
            trainer.step()
        _settle(trainer)

    return steps


def _settle(trainer: Trainer) -> None:
    assert isinstance(trainer.transport, CudaTransport)
    trainer.transport.device.settle()


def in_turns(
    effort: Effort, own: Callable[[int], object], other: Callable[[int], object]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a step of both, a sample a round, of which the first does not count; the first one changes."""
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(effort.rounds + 1):
        for which in (number % 2, 1 - number % 2):
            begin_s = time.perf_counter()
            (own, other)[which](effort.counted)
            if number:
                samples[which].append((time.perf_counter() - begin_s) / effort.counted)
    return r.kept(samples[0]), r.kept(samples[1])


def _against(
    name: str,
    effort: Effort,
    peer: Callable[..., Peer],
    token: str,
    shape: tuple[int, int, int],
    batch: int,
    compute_dtype: ComputeDtype = "float32",
) -> r.Training:
    """Steps of both on the same shapes."""
    with (
        contextlib.closing(peer(token, shape, batch, compute_dtype)) as other,
        _training(token, shape, batch, compute_dtype=compute_dtype) as trainer,
    ):
        own_s, other_s = in_turns(effort, _steps(trainer), other.steps)
    setting = f"{token}, global batch {batch}" + (f", {compute_dtype}" if compute_dtype != "float32" else "")
    return r.Training(name=name, setting=setting, unit="s", own=own_s, other=other_s)


def _reproducible(effort: Effort) -> r.Training:
    """Steps with 8 leaves, and without."""
    batch, token = effort.reproducible_batch, effort.mlp
    with (
        _training(token, MLP_SHAPE, batch, leaves=8, batch_norm="leaf") as leaves,
        _training(token, MLP_SHAPE, batch) as plain,
    ):
        own_s, other_s = in_turns(effort, _steps(leaves), _steps(plain))
    setting = f"{token}, global batch {batch}, 8 leaves"
    return r.Training(name=r.REPRODUCIBLE, setting=setting, unit="s", own=own_s, other=other_s)


def _timelines(effort: Effort) -> r.Training:
    """Steps whose Timelines are made, and what recording their events cost added; and steps alone."""
    token, batch = effort.pictures, effort.picture_batch
    with _training(token, effort.picture_shape, batch) as trainer:
        marks = trainer.step().marks.settle()
        recording_s = marks.events * (seconds_per_event() + _seconds_per_mark(trainer))

        def recorded(count: int) -> None:
            for _ in range(count):
                step = trainer.step().marks
                timeline([[step]], trainer.runner.program.names, emulated_network=False)
            _settle(trainer)

        own_s, other_s = in_turns(effort, recorded, _steps(trainer))
    own = r.kept(sample + recording_s for sample in own_s)
    setting = f"{token}, global batch {batch}, {marks.events} events a step"
    return r.Training(name=r.TIMELINES, setting=setting, unit="s", own=own, other=other_s)


def _seconds_per_mark(trainer: Trainer) -> float:
    """What the host takes to ask for a mark in the stream that computes."""
    memory = trainer.transport.memory
    begin_s = now()
    for _ in range(_MARKS):
        memory.mark()
    taken_s = now() - begin_s
    _settle(trainer)
    return taken_s / _MARKS


def _state_bytes(effort: Effort) -> r.Training:
    """What the memory of parameters, gradients and optimizer takes of the GPU, and the sum of their bytes."""
    with _training(effort.mlp, MLP_SHAPE, effort.mlp_batch) as trainer:
        assert isinstance(trainer.transport, CudaTransport)
        device, arena = trainer.transport.device, trainer.runner.arena
        device.settle()
        before = device.free_bytes()
        another = Arena(trainer.schedule, arena.parameters.dtype, arena.memory.zeros, memory=arena.memory)
        taken = before - device.free_bytes()
        arrays = 2 + len(another.optimizer_state)
    elements = sum(tensor.elements for layer in trainer.replica.layers for tensor in layer.tensors)
    other = elements * arena.parameters.itemsize * arrays
    return r.Training(
        name=r.STATE_BYTES,
        setting=f"{effort.mlp}, SGD with momentum",
        unit="bytes",
        own=(float(taken),),
        other=(float(other),),
    )


def _activation_bytes(peer: Callable[..., Peer], token: str, shape: tuple[int, int, int], batch: int) -> r.Training:
    """What a step of both takes beside parameters, gradients and optimizer."""
    with contextlib.closing(peer(token, shape, batch, "float32")) as other:
        other_bytes = other.activation_bytes()
    with _training(token, shape, batch) as trainer:
        pool = _pool(trainer)
        if pool is not None:
            pool.free_all_blocks()
        _steps(trainer)(2)
        assert isinstance(trainer.replica, SizedReplica)
        own = trainer.replica.work_bytes + (pool.total_bytes() if pool is not None else 0)
    setting = f"{token}, global batch {batch}"
    return r.Training(
        name=r.ACTIVATION_BYTES, setting=setting, unit="bytes", own=(float(own),), other=(float(other_bytes),)
    )


def _pool(trainer: Trainer) -> Any:
    """Where CuPy takes the results of expressions from; None in the simulator."""
    make = getattr(trainer.transport.memory.xp, "get_default_memory_pool", None)
    return make() if make is not None else None


def _torch_model(token: str, shape: tuple[int, int, int], batch: int, compute_dtype: ComputeDtype) -> Peer:
    """PyTorch's eager mode. Raises ``NoPeer`` where PyTorch cannot be imported, or not for CUDA."""
    if simulating():
        raise NoPeer("PyTorch is not compared with the simulator")
    try:
        import torch
    except ImportError as error:
        raise NoPeer(f"PyTorch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise NoPeer("PyTorch here has no CUDA")
    from dpsim.experiments.gpu_check.torch_model import TorchModel

    return TorchModel(token, shape, batch, "cuda", compute_dtype)


def main(path: Path, name: str) -> None:
    """Append a figure to the file ``path``, or print why this machine cannot have it."""
    try:
        keep(path, [measure(name)])
    except NoPeer as missing:
        print(missing)
    except MemoryError as error:  # CuPy's too
        print(f"too little memory: {' '.join(str(error).split())[:200]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
