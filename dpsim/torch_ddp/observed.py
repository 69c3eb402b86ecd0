"""Observes a user's DDP script on a real rank: when its parts begin and end, and when its buckets do. Loads torch."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.predict.observed import ObservedRank, ObservedStep
from dpsim.torch_ddp.endings import EnoughSteps, Refused
from dpsim.torch_ddp.record import Training, leading_extent, second_model
from dpsim.torch_ddp.reductions import MpiReduction
from dpsim.torch_ddp.timed import bucket_bytes, cap_in_mib

WARM_UP_STEPS = 4
"""Synchronising steps before the first that is observed: DDP rebuilds its buckets as the second one begins."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
_NANOSECOND_S = 1e-9

Reduce = Callable[[Any], Any]
"""Starts to average a flat tensor over all ranks; returns a future of it."""


def without_core_s() -> float:
    """Seconds for which this thread was ready to run and had no core, as Linux counts them; 0 on other systems."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(_SCHEDSTAT) as file:
        return int(file.read().split()[1]) * _NANOSECOND_S
    return 0.0


def by_gloo(tensor: Any) -> Any:
    """Average a tensor as DDP does by itself."""
    tensor.div_(distributed.get_world_size())
    work = distributed.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Observer:
    """Observes ``wanted`` synchronising steps, then calls ``observed``, and ends the script.

    Has the methods that ``dpsim.torch_ddp.record.install`` puts around DDP, backward, optimizers and data loaders.
    """

    def __init__(self, wanted: int, reduce: Reduce, observed: Callable[[Observer], None]) -> None:
        self._wanted, self._reduce, self._observed = wanted, reduce, observed
        self.ddp: Any = None
        self.steps: list[ObservedStep] = []
        self.local_batch = 0
        self.accumulate = 1
        self._training = Training()
        self._warmed_up = 0
        self._depth = 0
        self._hooked = False
        self._synchronises = False
        self._ended_s = now()
        self._clear()

    def _clear(self) -> None:
        self._seconds = dict.fromkeys(("forward_s", "backward_s", "update_s", "input_s"), 0.0)
        self._ready_s: list[float] = []
        self._done_s: dict[int, float] = {}
        self._computed_s = self._delayed_s = 0.0
        self._micro_batches = 0
        self._without_core_s = without_core_s()

    @property
    def rank(self) -> ObservedRank:
        """What was observed."""
        return ObservedRank(
            steps=tuple(self.steps),
            bucket_bytes=bucket_bytes(self.ddp),
            local_batch=self.local_batch,
            accumulate=self.accumulate,
        )

    @contextmanager
    def building(self, ddp: Any, /, *_: Any, **__: Any) -> Iterator[None]:
        """Around the construction of a DDP model, which gets a hook that observes its buckets."""
        yield
        _REGISTER(ddp, None, lambda _, bucket: self._reduced(bucket, lambda: self._reduce(bucket.buffer())))

    def _reduced(self, bucket: Any, reduce: Callable[[], Any]) -> Any:
        """Start the allreduce of a bucket, and note when it was ready and when it is done."""
        number, done_s = len(self._ready_s), self._done_s
        self._ready_s.append(now())
        if bucket.is_last():
            self._computed()
        future = reduce()

        def done(finished: Any) -> Any:
            done_s[number] = now()
            return finished.value()

        return future.then(done)

    def _computed(self) -> None:
        self._computed_s = now()
        self._delayed_s = without_core_s() - self._without_core_s

    @contextmanager
    def forward(self, ddp: Any, /, *arguments: Any, **keywords: Any) -> Iterator[None]:
        """Around DDP's forward. Raises ``EnoughSteps``."""
        if not self._training.forward(ddp):
            yield
            return
        if self.ddp is None:
            self.ddp = ddp
        elif self.ddp is not ddp:
            raise second_model("explain")
        if len(self.steps) >= self._wanted:
            self._observed(self)
            raise EnoughSteps
        self._synchronises = ddp.require_backward_grad_sync
        self.local_batch = max(self.local_batch, leading_extent((*arguments, *keywords.values())))
        began_s = now()
        yield
        self._seconds["forward_s"] += now() - began_s

    @contextmanager
    def backward(self, /, *_: Any, **__: Any) -> Iterator[None]:
        """Around ``torch.autograd.backward``; one inside another is part of the outer one."""
        self._depth += 1
        self._training.backward()
        outermost, began_s = self._depth == 1 and self.ddp is not None, now()
        try:
            yield
        finally:
            self._depth -= 1
        if outermost:
            ended_s = now()
            self._micro_batches += 1
            if not self._synchronises:
                self._seconds["backward_s"] += ended_s - began_s
            elif self._ready_s:
                self._seconds["backward_s"] += self._computed_s - began_s
                self._step_ends(ended_s)

    def _step_ends(self, ended_s: float) -> None:
        if self._warmed_up < WARM_UP_STEPS:
            self._warmed_up += 1
        else:
            done_s = [self._done_s.get(number, ended_s) for number in range(len(self._ready_s))]
            self.accumulate = self._micro_batches
            self.steps.append(
                ObservedStep(
                    began_s=self._ended_s,
                    computed_s=self._computed_s,
                    ended_s=ended_s,
                    delayed_s=self._delayed_s,
                    ready_s=tuple(self._ready_s),
                    done_s=tuple(done_s),
                    **self._seconds,
                )
            )
        self._ended_s = ended_s
        self._clear()

    def update_begins(self, optimizer: Any, *_: Any) -> None:
        self._update_began_s = now()

    def update_ends(self, optimizer: Any, *_: Any) -> None:
        self._seconds["update_s"] += now() - self._update_began_s

    @contextmanager
    def loading(self, iterator: Any) -> Iterator[None]:
        """Around the next batch of a ``DataLoader``."""
        began_s = now()
        yield
        self._seconds["input_s"] += now() - began_s


_REGISTER = DistributedDataParallel.register_comm_hook


def set_cap(bucket_cap_bytes: float | None) -> None:
    """Let DDP have this bucket cap in place of the script's; refuse a hook of the script's own."""
    DistributedDataParallel.register_comm_hook = _refuse_hook
    if bucket_cap_bytes is None:
        return
    initialise = DistributedDataParallel.__init__
    parameters = inspect.signature(initialise)

    def capped(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = parameters.bind(self, *arguments, **keywords)
        given.arguments.pop("bucket_cap_mb_list", None)
        given.arguments["bucket_cap_mb"] = cap_in_mib(bucket_cap_bytes)
        initialise(*given.args, **given.kwargs)

    DistributedDataParallel.__init__ = capped


def _refuse_hook(*_: Any, **__: Any) -> None:
    raise Refused(
        ConfigError(
            "the script registers a communication hook of its own",
            allowed="no hook, for DDP takes one, and dpsim explain observes the buckets by it",
            remedy="explain a trace of the script: --trace",
        )
    )
