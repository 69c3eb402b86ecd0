"""A process group of n ranks in one process, which answers as if all ranks held rank 0's values. Loads torch."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import ReduceOp, distributed_c10d

from dpsim.torch.script.probe.endings import check_ranks

BACKEND = "dpsim"
_BARRIER_BYTES = 4
"""A barrier counts as an allreduce of one element, which NCCL's is (PyTorch, ProcessGroupNCCL::barrier)."""


class Clock:
    """Seconds of computation: it stands still inside the collectives, whose times are the model's to predict."""

    def __init__(self) -> None:
        self.collectives: list[int | None] = []
        """The bytes of each allreduce that has been asked for, and None for each other collective but a broadcast."""
        self._stopped_s = 0.0
        self._on_gpu: list[tuple[Any, Any]] = []

    def now(self) -> float:
        """Seconds since some moment, without the time spent in collectives."""
        return perf_counter() - self._stopped_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock for a while."""
        start = perf_counter()
        try:
            yield
        finally:
            self._stopped_s += perf_counter() - start

    @contextmanager
    def stopped_on_gpu(self) -> Iterator[None]:
        """Stop the clock while the GPU does what is asked for in the current stream; the host waits for nothing."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        try:
            yield
        finally:
            ended.record()
            self._on_gpu.append((began, ended))

    def settle(self) -> None:
        """Count what the GPU took while the clock was stopped; its work must be done."""
        self._stopped_s += sum(1e-3 * began.elapsed_time(ended) for began, ended in self._on_gpu)
        self._on_gpu.clear()


CLOCK = Clock()


class ReplicatedGroup(distributed.ProcessGroup):
    """Rank 0 of ``size`` ranks that all hold rank 0's values. Every collective has finished when it returns.

    A sum is ``size`` times the value and a product its power; mean, minimum and maximum are the value itself. What is
    gathered is the value ``size`` times, what is broadcast or received is rank 0's own.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.pause_s_per_byte = 0.0
        """How long a rank sleeps in each all-gather and reduce-scatter of a whole tensor, for each of its bytes."""
        self._sent: Any = None
        self._name = ""
        self.received = ""
        """The last collective that should have brought what another rank alone has."""
        self.reduced_elements = 0

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which ``torch.distributed`` knows this group, as device meshes ask for it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name  # kept here: a group that is being destroyed is asked for it after torch has forgotten it
        super()._set_group_name(name)

    def _get_backend(self, device: Any) -> Any:
        """This group itself, which is the backend of every device."""
        return self

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def monitored_barrier(self, *_: object, **__: object) -> None:
        """Nothing: there is nobody to wait for."""

    def _reduce(self, tensor: Any, options: Any) -> None:
        operation, ranks = ReduceOp.SUM if options is None else options.reduceOp, self.size()
        self.reduced_elements += tensor.numel()
        if operation == ReduceOp.SUM:
            tensor.mul_(ranks)
        elif operation == ReduceOp.PRODUCT:
            tensor.pow_(ranks)
        elif operation == ReduceOp.BXOR and ranks % 2 == 0:
            tensor.zero_()

    def _pause(self, whole: Any) -> None:
        with CLOCK.stopped():
            sleep(self.pause_s_per_byte * whole.numel() * whole.element_size())

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        with _collective(tensors, sum(tensor.numel() * tensor.element_size() for tensor in tensors)):
            for tensor in tensors:
                self._reduce(tensor, opts)
        return _finished(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        with _collective(tensors):
            for tensor in tensors if opts is None or opts.rootRank == self.rank() else ():
                self._reduce(tensor, opts)
        return _finished(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        if opts is not None and opts.rootRank != self.rank():
            self.received = f"a broadcast from rank {opts.rootRank}"
        return _finished(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        with _collective(outputs):
            for copies, tensor in zip(outputs, inputs):
                for copy in copies:
                    copy.copy_(tensor)
        return _finished(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.allgather(outputs, inputs) if outputs else _finished(inputs)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        self._pause(output)
        with _collective([output]):
            output.view(self.size(), -1).copy_(tensor.reshape(1, -1).expand(self.size(), -1))
        return _finished([output])

    all_gather_single = _allgather_base  # its name since PyTorch 2.13, likewise below

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs):
            self._allgather_base(output, tensor)
        return _finished(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        with _collective(outputs):
            for output, parts in zip(outputs, inputs):
                output.copy_(parts[self.rank()])
                self._reduce(output, opts)
        return _finished(outputs)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        self._pause(tensor)
        return self.reduce_scatter([output], [tensor.reshape(self.size(), *output.shape)], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs):
            self._reduce_scatter_base(output, tensor, opts)
        return _finished(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        with _collective(outputs):
            for output, parts in zip(outputs, inputs):  # only the sending rank has parts
                output.copy_(parts[self.rank()])
        return _finished(outputs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        with _collective(outputs):
            for output in outputs:
                output.copy_(inputs[self.rank()])
        return _finished(outputs)

    def alltoall_base(
        self, output: Any, tensor: Any, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        outputs = output.split(list(output_sizes) or len(output) // self.size())
        return self.alltoall(outputs, tensor.split(list(input_sizes) or len(tensor) // self.size()))

    all_to_all_single = alltoall_base

    def send(self, tensors: Any, rank: int = 0, tag: int = 0) -> Any:
        self._sent = [tensor.detach().clone() for tensor in tensors]
        return _finished(tensors)

    def recv(self, tensors: Any, rank: int = 0, tag: int = 0) -> Any:
        """The last message that was sent, for every rank sends what rank 0 sends; zeros where nothing fits."""
        with _collective(tensors):
            for number, tensor in enumerate(tensors):
                sent = self._sent[number] if self._sent is not None and number < len(self._sent) else None
                if sent is not None and (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype):
                    tensor.copy_(sent)
                else:
                    tensor.zero_()
                    self.received = f"a message from rank {rank}"
        return _finished(tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self.recv(tensors)

    def barrier(self, opts: Any = None) -> Any:
        with _collective([], _BARRIER_BYTES):
            return _finished([])


@contextmanager
def _collective(value: Any, allreduced_bytes: int | None = None) -> Iterator[None]:
    """Around a collective whose results are in the tensors of ``value``; an allreduce says of how many bytes."""
    CLOCK.collectives.append(allreduced_bytes)
    on_gpu = any(tensor.device.type == "cuda" for tensor in _tensors(value))
    with CLOCK.stopped_on_gpu() if on_gpu else CLOCK.stopped(), torch.no_grad():
        yield


def _tensors(value: Any) -> list[Any]:
    return [each for item in value for each in (item if isinstance(item, (list, tuple)) else (item,))]


def _finished(value: Any) -> Any:
    """A ``Work`` that is done, with a future that has this value."""
    devices = list(dict.fromkeys(tensor.device for tensor in _tensors(value) if tensor.device.type != "cpu"))
    future = torch.futures.Future(devices=devices)
    future.set_result(list(value))
    return _create_work_from_future(future)


def register() -> None:
    """Make the backend known to ``torch.distributed`` under its name."""
    if BACKEND.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])


def answer_for(ranks: int) -> None:
    """Let every process group that this process asks for, from now on, be one of ``ranks`` ranks in this process."""
    register()
    original, helper = distributed_c10d.init_process_group, distributed_c10d._new_process_group_helper
    parameters = inspect.signature(original)

    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        given = parameters.bind(*arguments, **keywords).arguments
        check_world_size(given, ranks)
        original(BACKEND, store=distributed.HashStore(), rank=0, world_size=ranks)
        _answer_backend(distributed_c10d._get_default_group(), given.get("backend") or "undefined")

    def new_process_group(size: int, rank: int, members: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        created = helper(size, rank, members, distributed.Backend(BACKEND), *rest, **options)
        _answer_backend(created[0], backend)
        return created

    replace_everywhere(original, init_process_group)
    replace_everywhere(helper, new_process_group)
    replace_everywhere(distributed_c10d.monitored_barrier, lambda *_, **__: None)  # PyTorch allows it for gloo alone


def check_world_size(given: dict[str, Any], ranks: int) -> None:
    """Raises ``Refused`` if what ``init_process_group`` was given names another number of ranks."""
    asked = given.get("world_size", -1)
    if asked != -1:
        check_ranks(int(asked), ranks, f"init_process_group(world_size={asked})")


def _answer_backend(group: Any, backend: Any) -> None:
    """Let ``get_backend`` answer what the script asked for."""
    if isinstance(group, ReplicatedGroup):
        groups = distributed_c10d._world.pg_map
        groups[group] = (distributed.Backend(str(backend)), groups[group][1])


def _create(store: object, rank: int, size: int, timeout: timedelta) -> ReplicatedGroup:
    return ReplicatedGroup(rank, size)


def replace_everywhere(original: Any, replacement: Any) -> None:
    """Let every loaded module of PyTorch that has ``original`` under its name have ``replacement`` there."""
    name = original.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "torch" and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def connect(store: str, rank: int, ranks: int, *, on_gpus: bool = False) -> None:
    """Let the process group that the script asks for be one that meets in the file ``store``.

    It is gloo's; with ``on_gpus`` NCCL's for tensors on GPUs, and each rank has the GPU of its number.
    """
    original = distributed_c10d.init_process_group
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    if on_gpus:
        torch.cuda.set_device(rank)

    parameters = inspect.signature(original)

    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        check_world_size(parameters.bind(*arguments, **keywords).arguments, ranks)
        original(backend, store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks)

    replace_everywhere(original, init_process_group)


def disconnect() -> None:
    """End the script's process group, whose threads would abort the process as it ends."""
    if distributed.is_initialized():
        gc.collect()  # what refers to the group in a circle, as sharded modules do, keeps its threads
        distributed.destroy_process_group()
        gc.collect()
