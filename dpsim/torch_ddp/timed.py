"""Times the steps of a user's DDP or FSDP script on one rank, a few at a time, when it is their turn. Loads torch.

Between its turns the script waits where its next step would begin. The script itself is not changed.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.torch_ddp.endings import EnoughSteps, Refused
from dpsim.torch_ddp.fsdp import ShardedModel, WaitedCollectives, watch
from dpsim.torch_ddp.logged import parameters_of
from dpsim.torch_ddp.process_group import check_world_size, replace_everywhere
from dpsim.torch_ddp.record import Training, leading_extent, second_model
from dpsim.torch_ddp.reductions import MpiReduction
from dpsim.torch_ddp.visit import LOGGED, Turn, Visit

_NANOSECOND_S = 1e-9

TakeTurn = Callable[[Visit], Turn]
"""Hands over what was done, waits for the next turn, and returns it."""


class StepTimer:
    """Around DDP's forward, or that of FSDP's root, and every backward of a script."""

    def __init__(self, take_turn: TakeTurn, reduction: MpiReduction | WaitedCollectives | None = None) -> None:
        self._take_turn, self._reduction = take_turn, reduction
        self.ddp: Any = None
        self._training = Training()
        self._visit = Visit()
        self._left = 0
        self._begins = True
        self._synchronises = False
        self._waited_s = 0.0
        self._backward_began_s = 0.0

    def before_forward(self, ddp: Any, inputs: Any) -> None:
        """A step begins with the first forward after a backward that synchronised, as in a profile.

        Raises ``EnoughSteps``.
        """
        if not self._training.forward(ddp):
            return
        if self.ddp is None:
            self.ddp = ddp
        elif self.ddp is not ddp:
            raise second_model("measure")
        samples = leading_extent(inputs)
        if self._begins:
            self._step_begins()
            self._visit.local_batches.append(samples)
        self._visit.local_batches[-1] = min(samples, self._visit.local_batches[-1])
        self._begins, self._synchronises = False, ddp.require_backward_grad_sync

    @contextmanager
    def forward(self, model: ShardedModel, /, *arguments: Any, **keywords: Any) -> Iterator[None]:
        """Around the forward of a model that ``fully_shard`` has sharded."""
        self.before_forward(model, (*arguments, *keywords.values()))
        yield

    def before_backward(self) -> None:
        self._training.backward()
        self._backward_began_s = now()

    def after_backward(self) -> None:
        if self.ddp is not None:
            self._begins = self._synchronises

    def _step_begins(self) -> None:
        visit = self._visit
        if self.ddp.device_type == "cuda":
            torch.cuda.synchronize()
        visit.moments_s.append(now())
        if len(visit.moments_s) > 1:
            self._keep_logged(visit)
        else:
            self._forget_reductions()
        if self._left == 0:
            visit.bucket_bytes = bucket_bytes(self.ddp)
            self._left = self._take_turn(visit).steps
            if not self._left:
                raise EnoughSteps
            self._visit = Visit()
            self._visit.moments_s.append(now())
        self._left -= 1

    def _keep_logged(self, visit: Visit) -> None:
        """Keep what DDP logged of the step that has ended, or how long FSDP was in its collectives."""
        if isinstance(self._reduction, WaitedCollectives):
            visit.logged_s.clear()
            visit.waited_s.append(self._reduction.taken_s())
            return
        self.ddp.logger.set_runtime_stats_and_log()
        logged = self.ddp._get_ddp_logging_data()
        for name, short in LOGGED.items():
            visit.logged_s[short].append(_NANOSECOND_S * max(logged.get(name, 0), 0))
        if self._reduction is None:
            visit.waited_s.append(0.0)
            return
        visit.waited_s.append(self._reduction.waited_s - self._waited_s)
        began_s = self._backward_began_s - self._waited_s
        visit.ready_s.append([start_s - waited_s - began_s for start_s, waited_s in self._reduction.starts])
        self._forget_reductions()

    def _forget_reductions(self) -> None:
        if isinstance(self._reduction, WaitedCollectives):
            self._reduction.forget()
        elif self._reduction is not None:
            self._waited_s = self._reduction.waited_s
            self._reduction.starts.clear()


def bucket_bytes(ddp: Any) -> tuple[int, ...]:
    """The sizes of the buckets that DDP uses now, as it logs them, or of FSDP's units."""
    if isinstance(ddp, ShardedModel):
        return ddp.bucket_bytes
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes", "")
    return tuple(int(size) for size in sizes.split(",") if size.strip())


def install(
    timer: StepTimer, bucket_cap_bytes: float | None, reduction: MpiReduction | None, *, dpsim_hook: bool = False
) -> None:
    """Put ``timer`` around DDP and backward, give DDP its cap, and its hook where there is a ``reduction``.

    ``dpsim_hook``: the hook is ``dpsim.torch.allreduce_hook()``, as a user would register it.
    """
    initialise, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    register = DistributedDataParallel.register_comm_hook
    parameters = inspect.signature(initialise)

    @functools.wraps(initialise)
    def capped_initialise(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = parameters.bind(self, *arguments, **keywords)
        if bucket_cap_bytes is not None:
            given.arguments.pop("bucket_cap_mb_list", None)
            given.arguments["bucket_cap_mb"] = cap_in_mib(bucket_cap_bytes)
        initialise(*given.args, **given.kwargs)
        self._set_ddp_runtime_logging_sample_rate(1)
        if reduction is not None:
            if any(parameter.sparse for parameter in parameters_of(self)):
                raise _not_by_hook("the script has sparse gradients, of an embedding with sparse=True", "dense ones")
            register(self, None, lambda state, bucket: reduction.reduce(bucket.buffer()))
        elif dpsim_hook:
            from dpsim.torch import allreduce_hook

            register(self, None, allreduce_hook(process_group=self.process_group))

    @functools.wraps(forward)
    def timed_forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        timer.before_forward(self, (*arguments, *keywords.values()))
        return forward(self, *arguments, **keywords)

    DistributedDataParallel.__init__, DistributedDataParallel.forward = capped_initialise, timed_forward
    if reduction is not None or dpsim_hook:
        DistributedDataParallel.register_comm_hook = _refuse_hook
    _time_backward(timer)


def install_sharded(timer: StepTimer) -> None:
    """Put ``timer`` around the forward of FSDP's root and backward; what the script wraps in DDP is sharded, too."""
    watch(timer.forward, instead_of_ddp=True)
    _time_backward(timer)


def _time_backward(timer: StepTimer) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def timed_backward(*arguments: Any, **keywords: Any) -> Any:
        timer.before_backward()
        result = backward(*arguments, **keywords)
        timer.after_backward()
        return result

    replace_everywhere(backward, timed_backward)


def cap_in_mib(size_bytes: float) -> float:
    """``bucket_cap_mb`` for a fusion threshold: 0 is one bucket a tensor, infinity one for all of a dtype."""
    return min(max(size_bytes, 1.0), float(2**50)) / 2**20


def _refuse_hook(*_: Any, **__: Any) -> None:
    allowed = "no hook, for DDP takes one, and this measurement needs it"
    raise _not_by_hook("the script registers a communication hook of its own", allowed)


def _not_by_hook(given: str, allowed: str) -> Refused:
    """What ends a script that gloo can train, and a hook over MPI cannot."""
    return Refused(ConfigError(given, allowed=allowed, remedy="measure this script with --algorithm gloo"))


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
