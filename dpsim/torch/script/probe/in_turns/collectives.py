"""Times the allreduces that DDP starts, by gloo or through a hook: with nothing else running, and beside backward.
And the collectives that FSDP waits for, by gloo.

A rank times what it is asked for, and hands over when it began and ended on the clock of the machine; what follows from
the times of all ranks is computed by who asks. Loads torch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from time import perf_counter as now
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dpsim.comm.clock import sleep_until
from dpsim.torch.script.probe.fsdp import check_gradients
from dpsim.torch.script.probe.in_turns.visit import Timed, Turns, Visit
from dpsim.torch.script.probe.waited import WaitedCollectives

STREAMS = 3
"""Streams, or steps, that are timed each time, after some that do not count."""
_SETTLING = 5
_WIDTH, _LAYERS, _BATCH = 512, 6, 64


class GlooReduction:
    """gloo's own allreduce (sum) on a process group. DDP divides the gradients as it copies them into the bucket."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def reduce(self, tensor: Any) -> Any:
        """Start to reduce a flat tensor; a future of it. Every rank starts the same ones in the same order."""
        return self.group.allreduce([tensor]).get_future()

    def broadcast(self, tensor: Any) -> Any:
        """Start to broadcast rank 0's tensor, likewise."""
        return self.group.broadcast([tensor]).get_future()


class Load:
    """Forward and backward of a small PyTorch model, repeated; ``poll`` is called after every layer of both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        self._x = torch.randn(_BATCH, _WIDTH)
        self._poll: Callable[[], object] = _nothing
        for layer in self._layers:
            layer.weight.register_post_accumulate_grad_hook(lambda _: self._poll())
        self.run(5)
        self.unit_s = self.run(10) / 10

    def run(self, units: int, poll: Callable[[], object] | None = None) -> float:
        """Return the seconds that so many passes take."""
        self._poll = poll or _nothing
        start_s = now()
        for _ in range(units):
            activations = self._x
            for layer in self._layers:
                layer.zero_grad(set_to_none=True)
                activations = torch.relu(layer(activations))
                self._poll()
            activations.sum().backward()
        return now() - start_s


def _nothing() -> None:
    pass


class Queue:
    """Allreduces that are under way beside a load, as they end one after another.

    Their ends are seen by ``poll``, which the load calls often: a callback would take the interpreter's lock on a
    thread that reduces, as nothing does while DDP trains.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        """When each began to take its turn, and ended."""
        self._under_way: list[Any] = []
        self._last_s = now()

    def submit(self, future: Any) -> None:
        """Await a future too."""
        self._under_way.append(future)

    def poll(self) -> None:
        """Note which have ended."""
        for future in [each for each in self._under_way if each.done()]:
            self._ended(future)

    def finish(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._under_way[0].wait()
            self._ended(self._under_way[0])

    def _ended(self, future: Any) -> None:
        self._under_way.remove(future)
        end_s = now()
        self.spans.append((self._last_s, end_s))
        self._last_s = end_s


class Collectives:
    """What one rank times, on its first ranks by their number; ``members`` are their process groups, or meshes."""

    def __init__(self, reductions: dict[int, Any], members: dict[int, Any], *, fully_shard: bool = False) -> None:
        self._reductions, self._members = reductions, members
        self._tensors: dict[tuple[int, int, int], list[Any]] = {}
        self._models: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.waited = WaitedCollectives() if fully_shard else None

    @functools.cached_property
    def load(self) -> Load:
        """What computes behind or beside allreduces."""
        return Load()

    def take(self, timed: Timed) -> Any:
        """Return what is asked for, which begins on all ranks at the same moment."""
        takes: dict[str, Callable[[Timed], Any]] = {
            "burst": self._burst,
            "stream": self._stream,
            "broadcasts": self._stream,
            "load": self._load,
            "beside": self._beside,
            "sharded": self._sharded,
        }
        sleep_until(timed.at_s)
        return takes[timed.what](timed)

    def _stream_of(self, timed: Timed) -> tuple[list[Any], Callable[[Any], Any]]:
        """Return the tensors of a stream, and what starts to reduce or broadcast one."""
        key = timed.devices, timed.size_bytes, timed.at_once
        if key not in self._tensors:
            dtype = getattr(torch, timed.reduce_dtype)
            numbers = timed.size_bytes // dtype.itemsize
            self._tensors[key] = [torch.ones(numbers, dtype=dtype) for _ in range(timed.at_once)]
        reduction = self._reductions[timed.devices]
        return self._tensors[key], reduction.broadcast if timed.what == "broadcasts" else reduction.reduce

    def _burst(self, timed: Timed) -> tuple[float, float]:
        """Return when allreduces that are started together began, and when all had ended."""
        tensors, reduce = self._stream_of(timed)
        begun_s = now()
        for future in [reduce(tensor) for tensor in tensors]:
            future.wait()
        return begun_s, now()

    def _stream(self, timed: Timed) -> list[tuple[float, float]]:
        """Return when a few streams of allreduces began and ended.

        gloo reduces several at a time, so that the time of one alone says little about a stream of them. Each stream
        follows a forward and a backward, and the next step follows it, as in training: gloo's thread spins on a core
        while a message waits for it that came before its rank was ready, so that when the ranks begin decides how long
        it takes. A rank that has slept loses its core to that thread more often at first: of 1.6 MB alone, 60 to 75 %
        of the first three streams took 4.5 ms in place of 0.6, and half of those behind the fifth.
        """
        tensors, reduce = self._stream_of(timed)
        spans: list[tuple[float, float]] = []
        for _ in range(_SETTLING + STREAMS):
            self.load.run(1)
            for tensor in tensors:
                tensor.fill_(1.0)
            begun_s = now()
            for future in [reduce(tensor) for tensor in tensors]:
                future.wait()
            spans.append((begun_s, now()))
        return spans[_SETTLING:]

    def _load(self, timed: Timed) -> float:
        return self.load.run(timed.units)

    def _beside(self, timed: Timed) -> tuple[float, list[tuple[float, float]]]:
        """Return how long the load takes with a stream beside it, and when each allreduce took its turn."""
        tensors, reduce = self._stream_of(timed)
        self.load.run(_SETTLING)
        start_s = now()
        queue = Queue()
        for tensor in tensors:
            queue.submit(reduce(tensor))
        self.load.run(timed.units, queue.poll)
        loaded_s = now() - start_s
        queue.finish()
        return loaded_s, queue.spans

    def _sharded(self, timed: Timed) -> dict[str, list[tuple[float, float]]]:
        """Return when the collectives of a few steps of a small model began and ended, by their kind.

        A unit is a square linear layer, so that its computation grows with its size. What a collective takes depends on
        what comes before it: alone, in memory that was used just before, those of 2 MiB took half as long as in
        training.
        """
        assert self.waited is not None
        key = timed.devices, timed.size_bytes
        if key not in self._models:
            self._models[key] = self._model(timed)
        model, samples = self._models[key]
        for step in range(1 + STREAMS):
            if step == 1:
                self.waited.forget()
            model(samples).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
        spans = {kind: list(each) for kind, each in self.waited.spans.items() if each}
        self.waited.forget()
        return spans

    def _model(self, timed: Timed) -> tuple[Any, Any]:
        width = max(round(math.sqrt(timed.size_bytes / 4)), timed.devices)
        linear = functools.partial(torch.nn.Linear, width, width, bias=False)
        model = torch.nn.Sequential(*(torch.nn.Sequential(linear(), torch.nn.ReLU()) for _ in range(timed.units)))
        members = self._members[timed.devices]
        mesh = members if isinstance(members, DeviceMesh) else DeviceMesh.from_group(members, "cpu")
        policy = MixedPrecisionPolicy(getattr(torch, timed.gather_dtype), getattr(torch, timed.reduce_dtype))
        for unit in model:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy), torch.randn(_BATCH, width)


def time_collectives(part: Any, rank: int, folder: str, reductions: dict[int, Any]) -> None:
    """Time what is asked for as a rank of a part, until it is enough: by gloo, unless there are ``reductions``.

    Raises ``ConfigError`` where FSDP trains otherwise than DDP here.
    """
    members: dict[int, Any] = {}
    if not reductions:
        store = distributed.FileStore(os.path.join(folder, f"ranks-{part.number}"), part.ranks)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=part.ranks)
        if part.fully_shard:
            check_gradients()
        members = {devices: distributed.new_group(list(range(devices))) for devices in part.counts}
        reductions = {devices: GlooReduction(group) for devices, group in members.items() if rank < devices}
        for devices in part.counts if part.replicas > 1 else ():
            groups = torch.arange(devices).view(part.replicas, -1)
            members[devices] = DeviceMesh("cpu", groups, mesh_dim_names=("replicate", "shard"))
    collectives = Collectives(reductions, members, fully_shard=part.fully_shard)
    turns = Turns(folder, part.number, rank)
    visit = Visit(taken=collectives.load.unit_s)
    while (turn := turns.take(visit)).timed is not None:
        visit = Visit(taken=collectives.take(turn.timed))
    turns.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()
