"""Observes a user's DDP or FSDP script on a real rank: when its parts begin and end, and its buckets. Loads torch."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter as now
from typing import Any

from torch import distributed

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.around import SETTLED_STEPS, CoreTime, Script
from dpsim.torch.script.probe.endings import EnoughSteps, Refused, second_model
from dpsim.torch.script.probe.fsdp import ShardedModel
from dpsim.torch.script.probe.in_turns.timed import bucket_bytes
from dpsim.torch.script.probe.parameters import reduced_parameters
from dpsim.torch.script.probe.rank_record import type_name
from dpsim.torch.script.probe.waited import WaitedCollectives

_MOST_HOOKED = 8
"""Buckets up to which DDP gets a hook that notes when each is ready and done: a call into Python delays a bucket."""
_NANOSECOND_S = 1e-9

Reduce = Callable[[Any], Any]
"""Starts to average a flat tensor over all ranks; returns a future of it."""


def by_gloo(tensor: Any) -> Any:
    """Average a tensor as DDP does by itself."""
    tensor.div_(distributed.get_world_size())
    work = distributed.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Observer(Script):
    """Observes ``wanted`` synchronising steps, then calls ``observed``, and ends the script."""

    def __init__(self, wanted: int, observed: Callable[[Observer], None], reduce: Reduce | None = None) -> None:
        super().__init__()
        self._wanted, self._reduce, self._observed = wanted, reduce, observed
        self.steps: list[dict[str, Any]] = []
        self.local_batch = 0
        self.accumulate = 1
        self._hooked = self._hooks_itself = False
        self._core = CoreTime()
        self._waited: WaitedCollectives | None = None
        self._sizes: dict[str, Any] = {}
        self._ended_s = now()
        self._began = self._update_began = self._moment()
        self._clear()

    def _moment(self) -> tuple[float, float]:
        """Return the seconds now, and those for which this thread had no core until now, without FSDP's collectives."""
        moment = now(), self._core.waited_s()
        return moment if self._waited is None else self._waited.own(moment)

    def _clear(self) -> None:
        self._seconds = dict.fromkeys(("forward_s", "backward_s", "update_s", "input_s"), 0.0)
        self._ready_s: list[float] = []
        self._done_s: dict[int, float] = {}
        self._computing_delayed_s = self._input_delayed_s = 0.0
        self._computed = (0.0, 0.0)
        self._step_began = self._moment()
        if self._waited is not None:
            self._waited.forget()

    def _add(self, name: str, began: tuple[float, float], ended: tuple[float, float]) -> None:
        """Count a part of the computation."""
        self._seconds[name] += ended[0] - began[0]
        self._computing_delayed_s += ended[1] - began[1]

    @property
    def rank(self) -> dict[str, Any]:
        """What was observed: the fields of a ``dpsim.model.observed.ObservedRank``."""
        return {
            "steps": self.steps,
            "bucket_bytes": bucket_bytes(self.ddp),
            "local_batch": self.local_batch,
            "accumulate": self.accumulate,
            "dtype": type_name(self._most_common_dtype()),
            **self._sizes,
        }

    def _most_common_dtype(self) -> Any:
        numbers: dict[Any, int] = {}
        for _, parameter in reduced_parameters(self.ddp):
            numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
        return max(numbers, key=lambda dtype: numbers[dtype])

    def built(self, ddp: Any) -> None:
        """Let DDP log the times of every step."""
        ddp._set_ddp_runtime_logging_sample_rate(1)

    def hooked(self, ddp: Any, hook: Any) -> None:
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
        few = not self._hooks_itself and len(bucket_bytes(self.ddp)) <= _MOST_HOOKED
        reduce = self._reduce or (by_gloo if few else None)
        self._hooked = reduce is not None
        if reduce is not None:
            self.register_hook(self.ddp, lambda _, bucket: self._reduced(bucket, reduce))

    def _reduced(self, bucket: Any, reduce: Reduce) -> Any:
        """Start the allreduce of a bucket, and note when it was ready and when it is done."""
        number, done_s = len(self._ready_s), self._done_s
        self._ready_s.append(now())
        if bucket.is_last():
            self._computed = self._moment()
        future = reduce(bucket.buffer())

        def done(finished: Any) -> Any:
            done_s[number] = now()
            return finished.value()

        return future.then(done)

    def _computed_as_logged(self, ended: tuple[float, float]) -> tuple[float, float]:
        """Return when the last gradients were ready, from DDP's own log of the backward that has ended."""
        self.ddp.logger.set_runtime_stats_and_log()
        logged_s = self.ddp._get_ddp_logging_data().get("backward_compute_time", 0) * _NANOSECOND_S
        return min(self._began[0] + max(logged_s, 0.0), ended[0]), ended[1]

    def first_forward(self) -> None:
        if not isinstance(self.ddp, ShardedModel):
            self._hook()
        elif getattr(self.ddp, "replicas", 1) > 1:
            raise Refused(
                ConfigError(
                    "the script uses fully_shard on a mesh of two dimensions (HSDP), which is not explained",
                    allowed="a mesh of one dimension",
                    remedy="measure it: dpsim sweep --torch-script",
                )
            )
        elif self._reduce is not None:
            raise Refused(
                ConfigError(
                    "the script shards its model with fully_shard, by gloo, which has no emulated link",
                    allowed="--network node",
                    remedy="leave --network out",
                )
            )
        else:
            self._waited = WaitedCollectives(self.wrap, self._core)
            self._clear()

    def other_model(self, model: Any) -> bool:
        raise second_model("explain")

    def step_begins(self, samples: int) -> None:
        """End the script if enough steps were observed. Raises ``EnoughSteps``."""
        if len(self.steps) >= self._wanted:
            self._observed(self)
            raise EnoughSteps

    def forward_begins(self, samples: int) -> None:
        self.local_batch = max(self.local_batch, samples)
        self._began = self._moment()

    def forward_ends(self) -> None:
        self._add("forward_s", self._began, self._moment())

    def backward_begins(self) -> None:
        self._began = self._moment()

    def backward_ends(self) -> None:
        if not self.synchronises:
            self._add("backward_s", self._began, self._moment())

    def step_ends(self) -> None:
        ended = self._moment()
        ended_s = now() if self._waited else ended[0]
        computed = ended if self._waited else self._computed if self._hooked else self._computed_as_logged(ended)
        self._add("backward_s", self._began, computed)
        if self.synchronised > SETTLED_STEPS:
            done_s = [self._done_s.get(number, ended_s) for number in range(len(self._ready_s))]
            self.accumulate = self.micro_batches
            step = {
                "began_s": self._ended_s,
                "computed_s": self._ended_s + computed[0] - self._step_began[0] if self._waited else computed[0],
                "ended_s": ended_s,
                "delayed_s": computed[1] - self._step_began[1],
                "computing_delayed_s": self._computing_delayed_s,
                "input_delayed_s": self._input_delayed_s,
                "ready_s": self._ready_s,
                "done_s": done_s,
            }
            if self._waited is not None:
                self._sizes = {**self._waited.of_rank(), "units": self.ddp.calls}
                step |= self._waited.of_step()
            self.steps.append({**step, **self._seconds})
        self._ended_s = ended_s
        self._clear()

    def update_begins(self, optimizer: Any) -> None:
        self._update_began = self._moment()

    def update_ends(self, optimizer: Any) -> None:
        self._add("update_s", self._update_began, self._moment())

    def load(self, original: Callable[..., Any], iterator: Any) -> Any:
        without_core_s = self._core.waited_s()
        batch = super().load(original, iterator)
        self._input_delayed_s += self._core.waited_s() - without_core_s
        return batch

    def loaded(self, iterator: Any, seconds: float) -> None:
        self._seconds["input_s"] += seconds
