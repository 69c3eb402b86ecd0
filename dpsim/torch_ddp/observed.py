"""Observes a user's DDP script on a real rank: when its parts begin and end, and when its buckets do. Loads torch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.lowering.ddp import final_buckets
from dpsim.model.observed import ObservedRank, ObservedStep
from dpsim.torch_ddp import record
from dpsim.torch_ddp.endings import EnoughSteps, Refused
from dpsim.torch_ddp.fsdp import ShardedModel
from dpsim.torch_ddp.logged import options_of, parameters_of
from dpsim.torch_ddp.record import Training, leading_extent, second_model
from dpsim.torch_ddp.timed import bucket_bytes, cap_in_mib

WARM_UP_STEPS = 4
"""Synchronising steps before the first that is observed: DDP rebuilds its buckets as the second one begins."""
_MOST_HOOKED = 8
"""Buckets up to which DDP gets a hook that notes when each is ready and done: a call into Python delays a bucket."""
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

    def __init__(self, wanted: int, observed: Callable[[Observer], None], reduce: Reduce | None = None) -> None:
        self._wanted, self._reduce, self._observed = wanted, reduce, observed
        self.ddp: Any = None
        self.steps: list[ObservedStep] = []
        self.local_batch = 0
        self.accumulate = 1
        self._training = Training()
        self._warmed_up = 0
        self._depth = 0
        self._hooked = False
        self._hooks_itself = False
        self._synchronises = False
        self._ended_s = self._update_began_s = now()
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
        """Around the construction of a DDP model, which logs the times of every step."""
        yield
        ddp._set_ddp_runtime_logging_sample_rate(1)

    def script_hooks(self, *_: Any, **__: Any) -> None:
        """Take note of a communication hook of the script's own. Raises ``Refused`` where dpsim needs its place."""
        if self._reduce is not None:
            raise Refused(
                ConfigError(
                    "the script registers a communication hook of its own",
                    allowed="no hook on an emulated link: DDP takes one, and dpsim sends the buckets by it",
                    remedy="leave --network out",
                )
            )
        self._hooks_itself = True

    def _hook(self) -> None:
        """Give DDP a hook where its buckets go over an emulated link, or are so few that noting each takes no time."""
        parameters = parameters_of(self.ddp)
        buckets = final_buckets(parameters, range(len(parameters) - 1, -1, -1), options_of(self.ddp))
        few = not self._hooks_itself and len(buckets) <= _MOST_HOOKED
        reduce = self._reduce or (by_gloo if few else None)
        self._hooked = reduce is not None
        if reduce is not None:
            _REGISTER(self.ddp, None, lambda _, bucket: self._reduced(bucket, lambda: reduce(bucket.buffer())))

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

    def _computed_as_logged(self, began_s: float) -> None:
        """Take when the last gradients were ready from DDP's own log of the backward that has ended."""
        self._computed()
        self.ddp.logger.set_runtime_stats_and_log()
        logged_s = self.ddp._get_ddp_logging_data().get("backward_compute_time", 0) * _NANOSECOND_S
        self._computed_s = min(began_s + max(logged_s, 0.0), self._computed_s)

    @contextmanager
    def forward(self, ddp: Any, /, *arguments: Any, **keywords: Any) -> Iterator[None]:
        """Around DDP's forward. Raises ``EnoughSteps``."""
        if not self._training.forward(ddp):
            yield
            return
        if isinstance(ddp, ShardedModel):
            raise Refused(
                ConfigError(
                    "the script shards its model with fully_shard",
                    allowed="a script that wraps its model in DistributedDataParallel",
                    remedy="measure it: dpsim sweep --torch-script predicts and times FSDP",
                )
            )
        if self.ddp is None:
            self.ddp = ddp
            self._hook()
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
            self._update_began_s = ended_s  # where an optimizer's step calls a closure, that is no update
            self._micro_batches += 1
            if not self._synchronises:
                self._seconds["backward_s"] += ended_s - began_s
            else:
                if not self._hooked:
                    self._computed_as_logged(began_s)
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


def install(observer: Observer, bucket_cap_bytes: float | None) -> None:
    """Put the observer around a script, and let DDP have this bucket cap in place of the script's."""
    initialise, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    parameters = inspect.signature(initialise)

    def capped(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = parameters.bind(self, *arguments, **keywords)
        if bucket_cap_bytes is not None:
            given.arguments.pop("bucket_cap_mb_list", None)
            given.arguments["bucket_cap_mb"] = cap_in_mib(bucket_cap_bytes)
        initialise(*given.args, **given.kwargs)

    def registered(self: Any, *arguments: Any, **keywords: Any) -> None:
        observer.script_hooks()
        register(self, *arguments, **keywords)

    DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook = capped, registered
    record.install(observer)
