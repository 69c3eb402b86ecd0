"""Lets a script that updates after every backward accumulate gradients under DDP or FSDP, as it is. Loads torch.

One pass of the script's loop becomes a micro-batch. DDP or FSDP synchronises in the last backward of a step alone;
every loss counts 1 / k in its backward; and what belongs to an update (the optimizer's step, clearing and clipping the
gradients) is left out after the other micro-batches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.around import Script
from dpsim.torch.script.probe.endings import WITH_ACCUMULATE, Refused
from dpsim.torch.script.probe.fsdp import ShardedModel, call_inside
from dpsim.torch.script.probe.process_group import replace_everywhere

_LOOKED_AT = 2
"""Micro-batches whose gradients are looked at, whether the script has cleared them by itself."""
_BACKWARD = inspect.signature(torch.autograd.backward)
_CLIPPING = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)


class Accumulation(Script):
    """Which micro-batch of its step a script is in; each step has ``wanted``, all of one forward and backward.

    With one micro-batch nothing changes, and a script is refused that could not have several.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted
        self._done = 0  # micro-batches of this step whose backward has ended
        self._without_update = 0  # backward passes since an optimizer's step was last asked for
        self._looked_at = 0

    @property
    def within_step(self) -> bool:
        """Whether the step has begun and has more micro-batches to come, so that it is too early for an update."""
        return 0 < self._done < self._wanted

    def forward_begins(self, samples: int) -> None:
        """Let the backward of this forward synchronise in the last micro-batch alone. Raises ``Refused``."""
        ddp = self.ddp
        if ddp.static_graph:  # in its first step PyTorch fails with "expect_autograd_hooks_ INTERNAL ASSERT FAILED"
            raise _refused("sets static_graph, which PyTorch does not allow with no_sync()")
        self._done %= self._wanted
        if self._done and self._looked_at < _LOOKED_AT:
            self._looked_at += 1
            if not _holds_gradients(ddp):
                raise _refused("clears its gradients by itself, and not by zero_grad()")
        if self._wanted > 1:
            ddp.require_backward_grad_sync = self._done == self._wanted - 1

    def backward(self, original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Go back from the losses, each of which counts 1 / k."""
        if self._wanted > 1 and self.awaits_backward:
            given = _BACKWARD.bind(*arguments, **keywords)
            given.arguments["grad_tensors"] = self._shares(**given.arguments)
            arguments, keywords = given.args, given.kwargs
        return super().backward(original, *arguments, **keywords)

    def backward_ends(self) -> None:
        self._done += 1
        self._without_update += 1

    def _shares(self, tensors: Any, grad_tensors: Any = None, **_: Any) -> Any:
        """The gradients of the losses divided by the number of micro-batches."""
        losses = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
        given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else [*grad_tensors]
        given *= len(losses) if given == [None] else 1
        return [
            gradient / self._wanted
            if gradient is not None
            else torch.full_like(loss, 1 / self._wanted)
            if loss.numel() == 1
            else None
            for loss, gradient in zip(losses, given)
        ]

    def update_asked_for(self, closure: Any) -> None:
        """Raises ``Refused`` for an update that accumulation would change to something else."""
        if closure is not None:
            raise _refused("gives the optimizer's step a closure, which runs forward and backward within it")
        if self._without_update > 1:
            raise _refused(f"has {self._without_update} backward passes before an update: it accumulates by itself")
        self._without_update = 0


def accumulate(micro_batches: int) -> None:
    """Let the script that this process will run accumulate over so many micro-batches. To be called once.

    A script ends with ``Refused`` whose updates are not each of one backward: one that accumulates by itself, gives
    closures to its optimizer, scales its loss by a ``GradScaler``, or clears its gradients by other means than
    ``zero_grad``.
    """
    state = Accumulation(micro_batches)
    initialise, scaled_step = Optimizer.__init__, GradScaler.step
    optimizers: set[type] = set()

    @functools.wraps(initialise)
    def initialise_optimizer(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialise(self, *arguments, **keywords)
        if type(self) not in optimizers:
            optimizers.add(type(self))
            type(self).step = step_of_last(type(self).step)

    def step_of_last(step: Any) -> Any:
        @functools.wraps(step)
        def if_last(self: Any, *arguments: Any, **keywords: Any) -> Any:
            state.update_asked_for(keywords.get("closure", next(iter(arguments), None)))
            return None if state.within_step else step(self, *arguments, **keywords)

        return if_last

    @functools.wraps(scaled_step)
    def step_without_scale(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.is_enabled():
            raise _refused("scales its loss by a GradScaler, which undoes the scale at every update")
        return scaled_step(self, *arguments, **keywords)

    state.listen()
    call_inside(state.forward)
    Optimizer.__init__, GradScaler.step = initialise_optimizer, step_without_scale
    for owner in (Optimizer, torch.nn.Module):
        owner.zero_grad = _of_last(owner.zero_grad, state)
    for clip in _CLIPPING:
        replace_everywhere(clip, _of_last(clip, state))


def _holds_gradients(ddp: Any) -> bool:
    """Whether the gradients of the last backward are still there."""
    if isinstance(ddp, ShardedModel):
        return ddp.holds_gradients
    return any(bool(each.grad.any()) for each in ddp.module.parameters() if each.grad is not None)


def _of_last(original: Any, state: Accumulation) -> Any:
    """Return ``original`` for the last micro-batch of a step; in the others the call does nothing.

    It returns what it last did then: of ``clip_grad_norm_`` the norm.
    """
    last: Any = torch.zeros(())

    @functools.wraps(original)
    def of_last(*arguments: Any, **keywords: Any) -> Any:
        nonlocal last
        if not state.within_step:
            last = original(*arguments, **keywords)
        return last

    return of_last


def _refused(given: str) -> Refused:
    return Refused(
        ConfigError(
            WITH_ACCUMULATE + given,
            allowed="a script in which each pass of the loop has one backward(), and then the optimizer's step()",
            remedy="leave --accumulate out, and give the script its micro-batches itself, after --; dpsim reproduce"
            " gives it the number for {accumulate} there",
        )
    )
