"""Times the steps of a user's DDP or FSDP script on one rank, a few at a time, when it is their turn. Loads torch.

Between its turns the script waits where its next step would begin. The script itself is not changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from time import perf_counter as now
from typing import Any

import torch

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.around import Script
from dpsim.torch.script.probe.endings import EnoughSteps, Refused, second_model
from dpsim.torch.script.probe.fsdp import ShardedModel
from dpsim.torch.script.probe.in_turns.visit import LOGGED, Turn, Visit
from dpsim.torch.script.probe.rank_record import ddp_parameters
from dpsim.torch.script.probe.waited import WaitedCollectives

_NANOSECOND_S = 1e-9

TakeTurn = Callable[[Visit], Turn]
"""Hands over what was done, waits for the next turn, and returns it."""


class StepTimer(Script):
    """Keeps when the steps of a turn began, and what was logged of each.

    With a ``reduction`` that is no ``WaitedCollectives`` DDP gets a hook that lets it reduce the buckets, such as a
    ``dpsim.torch.script.reductions.MpiReduction``. With a ``hook``, ``module:function``, DDP gets what this function
    returns, as a user would register it.
    """

    until_update = True

    def __init__(
        self,
        take_turn: TakeTurn,
        reduction: Any = None,
        *,
        hook: str = "",
    ) -> None:
        super().__init__()
        self._take_turn, self._reduction, self._hook = take_turn, reduction, hook
        self._reduces = reduction is not None and not isinstance(reduction, WaitedCollectives)
        self._visit = Visit()
        self._left = 0
        self._waited_s = 0.0
        self._backward_began_s = 0.0  # without what was waited before
        self._logged_s = dict.fromkeys(LOGGED.values(), 0.0)  # of the step so far
        self._reduced = False  # since then

    def built(self, ddp: Any) -> None:
        """Let DDP log every step, and give it a hook."""
        ddp._set_ddp_runtime_logging_sample_rate(1)
        reduction = self._reduction
        if self._reduces:
            if any(parameter["sparse"] for parameter in ddp_parameters(ddp)):
                raise _not_by_hook("the script has sparse gradients, of an embedding with sparse=True", "dense ones")
            self.register_hook(ddp, lambda _, bucket: reduction.reduce(bucket.buffer()))
        elif self._hook:
            module, _, name = self._hook.partition(":")
            make = getattr(importlib.import_module(module), name)
            self.register_hook(ddp, make(process_group=ddp.process_group))

    def hooked(self, ddp: Any, hook: Any) -> None:
        if self._reduces or self._hook:
            allowed = "no hook, for DDP takes one, and this measurement needs it"
            raise _not_by_hook("the script registers a communication hook of its own", allowed)

    def other_model(self, model: Any) -> bool:
        raise second_model("measure")

    def step_begins(self, samples: int) -> None:
        """Keep the moment; where the turn has ended, hand it over and wait for the next. Raises ``EnoughSteps``."""
        visit = self._visit
        if self.ddp.device_type == "cuda":
            torch.cuda.synchronize()
        visit.moments_s.append(now())
        if len(visit.moments_s) > 1:
            self._keep_logged(visit)
        else:
            self._forget_reductions()
        self._reduced = False
        if self._left == 0:
            visit.bucket_bytes = bucket_bytes(self.ddp)
            self._left = self._take_turn(visit).steps
            if not self._left:
                raise EnoughSteps
            self._visit = Visit()
            self._visit.moments_s.append(now())
        self._left -= 1
        self._visit.local_batches.append(samples)

    def forward_begins(self, samples: int) -> None:
        if self._reduced and not isinstance(self._reduction, WaitedCollectives):
            if self.ddp.device_type == "cuda":
                torch.cuda.synchronize()
            self._add_logged()
        self._visit.local_batches[-1] = min(samples, self._visit.local_batches[-1])

    def backward_begins(self) -> None:
        self._backward_began_s = now()
        if self._reduces:
            self._backward_began_s -= self._reduction.waited_s
            self._reduction.starts.clear()

    def step_ends(self) -> None:
        self._reduced = True

    def _add_logged(self) -> None:
        """Count what DDP logged of the last backward that reduced: a step may have several."""
        self._reduced = False
        self.ddp.logger.set_runtime_stats_and_log()
        logged = self.ddp._get_ddp_logging_data()
        for name, short in LOGGED.items():
            self._logged_s[short] += _NANOSECOND_S * max(logged.get(name, 0), 0)

    def _keep_logged(self, visit: Visit) -> None:
        """Keep what DDP logged of the step that has ended, or how long FSDP was in its collectives."""
        if isinstance(self._reduction, WaitedCollectives):
            visit.logged_s.clear()
            visit.waited_s.append(self._reduction.taken_s())
            return
        self._add_logged()
        for name, seconds in self._logged_s.items():
            visit.logged_s[name].append(seconds)
            self._logged_s[name] = 0.0
        if self._reduction is None:
            visit.waited_s.append(0.0)
            return
        visit.waited_s.append(self._reduction.waited_s - self._waited_s)
        began_s = self._backward_began_s
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


def _not_by_hook(given: str, allowed: str) -> Refused:
    """What ends a script that gloo can train, and a hook over MPI cannot."""
    return Refused(ConfigError(given, allowed=allowed, remedy="measure this script with --algorithm gloo"))
