"""Records a script's training by putting itself around DDP or FSDP, backward, optimizer, data loader. Loads torch."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from time import sleep
from typing import Any

import torch
from torch.distributed import distributed_c10d

from dpsim.torch.script.probe.around import REBUILT_STEPS, CoreTime, Script
from dpsim.torch.script.probe.batches import loading
from dpsim.torch.script.probe.endings import (
    EnoughSteps,
    forked,
    second_model,
    unpriced_precision,
    unreduced,
    unwrapped,
)
from dpsim.torch.script.probe.fsdp import ShardedModel, check_optimizer
from dpsim.torch.script.probe.parameters import first_parameters, reduced_parameters
from dpsim.torch.script.probe.process_group import CLOCK, ReplicatedGroup
from dpsim.torch.script.probe.recomputed import Recomputation
from dpsim.torch.script.probe.steps import MODES, RecordedStep, StepMemory

_UNWRAPPED_STEPS = 3
"""Optimizer steps on gradients that were reduced without DDP, or not at all, after which a script is refused."""

_LATEST_UPDATE = 32
"""Synchronising backwards until which the first update is waited for."""

_WAITED_UPDATES = 100
"""Optimizer steps before any model of DDP or FSDP is called after which the user is told that one is waited for."""


def enough(recorder: Recorder) -> None:
    """End the script: it is recorded once. Raises ``EnoughSteps``."""
    raise EnoughSteps


class Recorder(Script):
    """Records ``wanted`` synchronising steps of the one model that a script trains, after the warm-up.

    Then it calls ``recorded``, which ends the script or asks for ``another`` record; the clock stands still meanwhile.
    Every synchronising backward is followed by a pause of ``pause_s``, in which it stands still too.
    """

    until_update = True

    def __init__(self, wanted: int, recorded: Callable[[Recorder], None] = enough) -> None:
        super().__init__()
        self.wanted, self.pause_s, self._recorded = wanted, 0.0, recorded
        self._pid = os.getpid()
        self.steps: list[RecordedStep] = []
        self.models = self.skipped = self._unwrapped_steps = self._waited_updates = self._warmed_up = 0
        self.input_workers, self.load_s_per_sample = 0, 0.0
        self.optimizer: Any = None
        self.memory: StepMemory | None = None
        self._begun: Counter[int] = Counter()  # steps by their local batch
        self._step: RecordedStep | None = None
        self.first_parameter: dict[str, int] = {}
        self._parameters: list[Any] = []
        self._forward_began_s = self._forward_ended_s = self._backward_began_s = self._update_began_s = 0.0
        self._collectives_before = 0
        self._modules_began: list[tuple[str, float]] = []
        self._iterator: Any = None
        self._hooks: list[Any] = []
        self._core = CoreTime()
        self.recomputation = Recomputation(self.now, lambda: self._depth > 0)

    def listen(self) -> None:
        super().listen()
        self.recomputation.listen(self.wrap)

    def another(self, wanted: int, pause_s: float) -> None:
        """Record so many steps anew, after another warm-up."""
        self.wanted, self._warmed_up = wanted, 0
        if isinstance(self.ddp, ShardedModel):  # it waits in each collective
            self.ddp.pause(pause_s)
        else:
            self.pause_s = pause_s
        self.steps.clear()

    @property
    def complete(self) -> bool:
        """Whether all wanted steps are recorded, in every mode, or so many that some mode will not come."""
        return len(self.steps) >= self.wanted and (self.all_modes or len(self.steps) >= 2 * self.wanted)

    @property
    def _knows_steps(self) -> bool:
        """Whether the script has updated by its optimizer, or will not: an update ends a step."""
        return self._updates or not self.has_optimizer or self.synchronised >= _LATEST_UPDATE

    @property
    def all_modes(self) -> bool:
        """Whether there are steps of every mode."""
        return {step.mode for step in self.steps} == set(MODES)

    @property
    def warm_up(self) -> int:
        """Synchronising steps before the first that is recorded; a static graph is rebuilt one later."""
        return REBUILT_STEPS + bool(self.ddp.static_graph)

    def now(self) -> float:
        """Seconds of computation, with the work of an accelerator done."""
        if self.ddp is not None and self.ddp.device_type == "cuda":
            torch.cuda.synchronize()
            CLOCK.settle()
        return CLOCK.now()

    def clock(self) -> float:
        """Return seconds of computation on the host."""
        return CLOCK.now()

    def ends(self) -> bool:
        """Return whether the script may end, now that the record is complete; else it goes on for a step."""
        return True

    def built(self, ddp: Any) -> None:
        if getattr(ddp, "mixed_precision", None) is not None:
            raise unpriced_precision()
        self.models += 1

    def first_forward(self) -> None:
        self.models += isinstance(self.ddp, ShardedModel)
        self._parameters = [parameter for _, parameter in reduced_parameters(self.ddp)]
        self.first_parameter = first_parameters(self.ddp, self._parameters)

    def other_model(self, model: Any) -> bool:
        raise second_model("profile")

    def step_begins(self, samples: int) -> None:
        """End the step before this one, and begin another in the next mode. Raises ``EnoughSteps``."""
        self._check_process()
        if self._step is not None:
            self._step.step_s = self.now() - self._step.start_s
            self._step.delayed_s += self._core.waited_s()
            self._step.own_collectives = tuple(CLOCK.collectives)
            if self._step.mode is not None and not self.complete:
                self.steps.append(self._step)
        if self.complete and self.ends():
            self._step = None
            with CLOCK.stopped():
                if self.steps:
                    self.input_workers, self.load_s_per_sample = loading(self._iterator, samples)
                self._recorded(self)
        mode = None
        if self._warmed_up < self.warm_up:
            self._warmed_up += 1
        elif not self._knows_steps:
            pass
        elif not self.complete:  # in turn for each batch: else the short one of each epoch might have the same mode
            mode = MODES[self._begun[samples] % len(MODES)]
            self._begun[samples] += 1
        CLOCK.collectives.clear()
        self._step = RecordedStep(mode=mode, start_s=self.now(), local_batch=samples, delayed_s=-self._core.waited_s())

    def forward_begins(self, samples: int) -> None:
        if self._step is not None and self._step.mode == "forward":
            self._hook_modules()
        self._collectives_before = len(CLOCK.collectives)
        self._forward_began_s = self.now()

    def forward_ends(self) -> None:
        self._forward_ended_s = self.now()
        if isinstance(self.ddp, ShardedModel):  # gathers of units
            del CLOCK.collectives[self._collectives_before :]
        if self._step is not None:
            self._step.forward_s += self._forward_ended_s - self._forward_began_s
            self._count_modules(self._step)
        self._unhook()

    def backward_begins(self) -> None:
        if self._step is not None and self._step.mode == "gradients" and self.synchronises:
            for index, parameter in enumerate(self._parameters):
                done = functools.partial(self._gradient_is_ready, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(done))
        self.recomputation.timed = self._step is not None and self._step.mode == "gradients"
        self.recomputation.seconds = 0.0
        self._backward_began_s = self.now()
        if self._step is not None:
            self._step.loss_s += self._backward_began_s - self._forward_ended_s
        self._collectives_before = len(CLOCK.collectives)

    def backward_ends(self) -> None:
        del CLOCK.collectives[self._collectives_before :]
        seconds = self.now() - self._backward_began_s
        self._unhook()
        if self._step is not None:
            self._step.backward_s += seconds
            self._step.last_backward_s = seconds
            self._step.recomputed_s = self.recomputation.seconds
            self._step.micro_batches = self.micro_batches
            self._step.late_flags = self.late_flags
        if isinstance(self.ddp, ShardedModel):
            self.ddp.note_backward()
            if self._step is not None and self.synchronises:
                self._step.all_reductions += self.ddp.adds_up_replicas

    def step_ends(self) -> None:
        if self._step is not None:
            self._step.reductions = tuple(self.reductions)
        if self.pause_s:
            without_core_s = self._core.waited_s()
            with CLOCK.stopped():
                sleep(self.pause_s)
            if self._step is not None:
                self._step.delayed_s -= self._core.waited_s() - without_core_s

    def update_begins(self, optimizer: Any) -> None:
        self._update_began_s = self.now()

    def update_ends(self, optimizer: Any) -> None:
        if self.ddp is not None and self._step is None:  # the copy that ``plain_update_s`` times
            return
        if self._step is not None:
            self._step.update_s += self.now() - self._update_began_s
        if optimizer is None:
            return
        self.optimizer = optimizer
        if not self._updates:  # what was taken for steps were micro-batches
            self.steps.clear()
        if self.ddp is None:
            self._check_wrapped(optimizer)
        elif isinstance(self.ddp, ShardedModel):
            check_optimizer(optimizer)
            self.ddp.check_resharded()
            self.ddp.check_added_up()
        if self.unreduced_updates == _UNWRAPPED_STEPS:
            raise unreduced()

    def update_skipped(self) -> None:
        """Record no step without an update; another one is recorded in its mode."""
        self.skipped += 1
        if self._step is not None and self._step.mode is not None:
            self._begun[self._step.local_batch] -= 1
            self._step.mode = None

    def loaded(self, iterator: Any, seconds: float) -> None:
        self._iterator = iterator
        if self._step is not None:
            self._step.input_s += seconds

    def _check_wrapped(self, optimizer: Any) -> None:
        """Raises ``Refused`` once the script has stepped several times on gradients that it reduced without DDP."""
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        self._waited_updates += 1
        if self._waited_updates == _WAITED_UPDATES:
            print(
                f"dpsim: after {_WAITED_UPDATES} updates the script has called no model of DistributedDataParallel or"
                " fully_shard; it is let go on until it does",
                file=sys.stderr,
                flush=True,
            )
        groups = [each for each in distributed_c10d._world.pg_map if isinstance(each, ReplicatedGroup)]
        reduced = sum(group.reduced_elements for group in groups)
        for group in groups:
            group.reduced_elements = 0
        self._unwrapped_steps += 0 < sum(gradient.numel() for gradient in gradients) <= reduced
        if self._unwrapped_steps == _UNWRAPPED_STEPS:
            raise unwrapped()

    def _check_process(self) -> None:
        """Raises ``Refused`` in a process that the script has forked, whose training would slow that of this one."""
        if os.getpid() != self._pid:
            raise forked()

    def _hook_modules(self) -> None:
        for name, module in self.ddp.module.named_modules():
            takes_hooks = not isinstance(module, torch.jit.RecursiveScriptModule)
            if name in self.first_parameter and takes_hooks:
                begins = functools.partial(self._module_begins, name)
                self._hooks.append(module.register_forward_pre_hook(begins, prepend=True))

    def _module_begins(self, name: str, *_: Any) -> None:
        self._modules_began.append((name, self.now()))

    def _count_modules(self, step: RecordedStep) -> None:
        """Count the forward from one module's beginning to the next one's as the first one's."""
        began_s = self._forward_began_s
        following = [*(moment_s for _, moment_s in self._modules_began[1:]), self._forward_ended_s]
        for (name, _), next_s in zip(self._modules_began, following):
            step.module_s[name] = step.module_s.get(name, 0.0) + next_s - began_s
            began_s = next_s
        self._modules_began.clear()

    def _gradient_is_ready(self, index: int, _: Any) -> None:
        if self._step is not None:
            self._step.ready_s[index] = self.now() - self._backward_began_s

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
