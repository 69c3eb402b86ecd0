"""The one seam around a script: decides when its steps begin, train, update and end, and what DDP is built with.

Loads nothing but the standard library and the process's PyTorch, for it is in the processes of watched jobs as well.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

REBUILT_STEPS = 2
"""Synchronising steps before the first that is profiled: DDP rebuilds its buckets as the second one begins."""
SETTLED_STEPS = 4
"""Synchronising steps before the first that is observed or watched, which is seen but once."""


_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_PREPARATION = object()
"""What updates while gradients are unscaled or clipped."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
_NANOSECOND_S = 1e-9


def records_gradients() -> bool:
    """Whether what is computed now can be trained: not within ``torch.no_grad``."""
    return bool(torch.is_grad_enabled())


class Training:
    """What forward and backward passes have shown of a script.

    With gradients enabled a forward pass trains if DDP or any module in it is in training mode: a library may leave the
    wrapper alone in evaluation mode. Where all of them are in evaluation mode, a backward pass that follows shows that
    the script trains in that mode (with its dropout and batch norm frozen), and such forward passes train from then on.
    """

    def __init__(self) -> None:
        self._in_evaluation_mode = False
        self._evaluated = False

    def forward(self, ddp: Any) -> bool:
        """Return whether this forward pass of ``ddp`` trains."""
        if not records_gradients():
            return False
        trains = self._in_evaluation_mode or any(module.training for module in ddp.modules())
        self._evaluated = not trains
        return trains

    def backward(self) -> None:
        """Learn from a backward pass that begins."""
        self._in_evaluation_mode |= self._evaluated


class Script:
    """A script's training, as the calls of DDP or FSDP, backward, optimizers and data loaders show it.

    A step begins with the first forward that trains after a backward that synchronised, and ends with the next such
    backward; each forward and its backward are a micro-batch. For a listener of whole steps (``until_update``), once
    the script has updated by an optimizer, a step goes on until an update follows: a script may synchronise in each
    micro-batch. DDP reads in forward whether a backward synchronises, FSDP in that backward. A backward inside another
    (checkpointing) is part of the outer one. An update that calls a closure, with forward and backward, begins anew
    when that backward has ended; an optimizer's step inside another's is part of the outer one. Unscaling and clipping
    gradients are parts of an update of no optimizer (None).

    Listeners derive from it and override what they need of the methods that do nothing here.
    """

    watches = True
    """Whether anything is listened to; else the script's calls are made as they are."""
    until_update = False
    """Whether a step ends with an update after a backward that synchronised, and not with that backward."""

    def __init__(self) -> None:
        self.ddp: Any = None
        self.synchronises = False
        self.synchronised = self.micro_batches = self.late_flags = 0
        self.reductions: list[int] = []  # the micro-batches of this step that synchronised, from 0
        self.unreduced_updates = 0  # one after another, each of gradients whose last backward did not synchronise
        self.step_has_begun = False
        self._training = Training()
        self._forward_since_backward = False
        self._depth = 0
        self._model: Any = None
        self._updating: Any = None
        self._updates = self._updated = False  # ever, and since the last backward began
        self.has_optimizer = False
        self._register: Any = None
        self._undo: list[Callable[[], None]] = []

    # What listeners override.

    def built(self, ddp: Any) -> None: ...  # a DDP model was made
    def hooked(self, ddp: Any, hook: Any) -> None: ...  # the script is about to register a communication hook
    def first_forward(self) -> None: ...  # of ``ddp``, the model that the script trains
    def step_begins(self, samples: int) -> None: ...  # with so many samples in its first micro-batch
    def forward_begins(self, samples: int) -> None: ...
    def forward_ends(self) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...
    def step_ends(self) -> None: ...  # behind each ``backward_ends`` that synchronised
    def update_begins(self, optimizer: Any) -> None: ...
    def update_ends(self, optimizer: Any) -> None: ...
    def update_skipped(self) -> None: ...  # by a GradScaler, as a gradient was not finite
    def loaded(self, iterator: Any, seconds: float) -> None: ...  # a data loader has given its next batch

    def other_model(self, model: Any) -> bool:
        """Return whether to listen to the forward of a model other than ``ddp``, or end the script."""
        return False

    def clock(self) -> float:
        """Return the seconds by which loading is timed."""
        return perf_counter()

    # What decides.

    @property
    def awaits_backward(self) -> bool:
        """Whether the next backward is that of a micro-batch: it is behind a forward, and inside no other backward."""
        return self._forward_since_backward and not self._depth

    def before_forward(self, model: Any, inputs: Any) -> bool:
        """Return whether this forward trains, and is listened to."""
        if not self._training.forward(model):
            return False
        if self.ddp is None:
            self.ddp = model
            self.first_forward()
        elif self.ddp is not model:
            return self.other_model(model)
        samples = leading_extent(inputs)
        if not self.step_has_begun:
            self.step_begins(samples)
            self.step_has_begun, self.micro_batches, self.reductions, self.late_flags = True, 0, [], 0
        self._model = model
        self.forward_begins(samples)
        return True

    def after_forward(self) -> None:
        """Note that a forward that trains has ended."""
        self.synchronises = bool(self._model.require_backward_grad_sync)
        self.forward_ends()
        self._forward_since_backward = True

    def before_backward(self) -> bool:
        """Return whether this backward is that of a micro-batch."""
        self._training.backward()
        if awaited := self.awaits_backward:
            self._updated = False
            if self.synchronises != bool(self._model.require_backward_grad_sync):
                if getattr(self._model, "reads_flag_in_backward", False):
                    self.synchronises = not self.synchronises
                else:
                    self.late_flags += 1
            self.backward_begins()
        return awaited

    def after_backward(self) -> None:
        """Note that the backward of a micro-batch has ended, and with it the step if it synchronised."""
        self._forward_since_backward = False
        self.micro_batches += 1
        self.backward_ends()
        if self.synchronises:
            self.synchronised += 1
            self.reductions.append(self.micro_batches - 1)
            in_an_update = self._updated or self._updating is not None
            self.step_has_begun = self.until_update and self._updates and not in_an_update
            self.step_ends()
        if self._updating is not None and self.watches:  # its step has called a closure, which is no update
            self.update_begins(self._updating)

    def before_update(self, optimizer: Any) -> None:
        """Note that an optimizer's step begins."""
        if self._updating in (None, optimizer):  # itself: its last step has raised an exception
            if self.micro_batches and not self._updated and optimizer is not _PREPARATION:
                self.unreduced_updates = 0 if self.synchronises else self.unreduced_updates + 1
            self._updating = optimizer
            self.update_begins(None if optimizer is _PREPARATION else optimizer)

    def after_update(self, optimizer: Any) -> None:
        """Note that an optimizer's step has ended."""
        if self._updating is optimizer:
            self._updating = None
            if optimizer is _PREPARATION:
                self.update_ends(None)
                return
            self.update_ends(optimizer)
            self._end_by_update()

    def before_preparation(self) -> bool:
        """Return whether what prepares an update begins here, inside nothing else of an update."""
        begins = self._updating is None
        if begins:
            Script.before_update(self, _PREPARATION)
        return begins

    def after_preparation(self) -> None:
        """Note that what prepares an update has ended."""
        Script.after_update(self, _PREPARATION)

    def _end_by_update(self) -> None:
        """Note that there was an update, or one was skipped: the step has ended if it has synchronised."""
        self._updates = self._updated = True
        if self.synchronises and not self.awaits_backward:
            self.step_has_begun = False

    # What the script's calls become.

    def forward(self, original: Callable[..., Any], model: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Call the forward of a model: DDP's, or that of a root of FSDP."""
        trains = self.before_forward(model, (*arguments, *keywords.values()))
        result = original(model, *arguments, **keywords)
        if trains:
            self.after_forward()
        return result

    def backward(self, original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call ``torch.autograd.backward``."""
        awaited = self.before_backward()
        self._depth += 1
        try:
            result = original(*arguments, **keywords)
        finally:
            self._depth -= 1
        if awaited:
            self.after_backward()
        return result

    def compile(self, original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call ``torch.compile``, whose graphs then have nothing of dpsim's."""
        from torch._dynamo import trace_rules

        trace_rules.add(__name__.rpartition(".")[0])
        return original(*arguments, **keywords)

    def prepare(self, original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call what unscales or clips gradients."""
        begins = self.before_preparation()
        try:
            return original(*arguments, **keywords)
        finally:
            if begins:
                self.after_preparation()

    def scaled_update(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        """Call ``GradScaler.step``, which updates nothing where it has found a gradient that is not finite."""
        result = original(scaler, optimizer, *rest, **named)
        if scaler.is_enabled():
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if any(each.item() for each in found.values()):
                self.update_skipped()
                self._end_by_update()
        return result

    def load(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Call for the next batch of a data loader."""
        began_s = self.clock()
        batch = original(iterator)
        self.loaded(iterator, self.clock() - began_s)
        return batch

    # Installing.

    def listen(self) -> None:
        """Put this around DDP's forward and every backward of this process. Those of FSDP's roots are not DDP's."""
        from torch.nn.parallel import DistributedDataParallel

        self.wrap(DistributedDataParallel, "forward", self.forward)
        self.wrap(torch.autograd, "backward", self.backward)
        self.wrap(torch, "compile", self.compile)
        if self.until_update:
            self._listen_to_updates()

    def listen_to_updates_and_input(self) -> None:
        """Put this around every optimizer's step, what prepares it, and every data loader's batches in this process."""
        from torch.amp.grad_scaler import GradScaler
        from torch.utils.data import dataloader

        self.wrap(dataloader._BaseDataLoaderIter, "__next__", self.load)
        for owner, name in ((GradScaler, "unscale_"), *((torch.nn.utils, name) for name in _CLIPPING)):
            self.wrap(owner, name, self.prepare)
        if not self.until_update:
            self._listen_to_updates()

    def _listen_to_updates(self) -> None:
        from torch.amp.grad_scaler import GradScaler
        from torch.optim import optimizer

        def initialise(original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> None:
            self.has_optimizer = True
            original(*arguments, **keywords)

        self.wrap(optimizer.Optimizer, "__init__", initialise)
        self.wrap(GradScaler, "step", self.scaled_update)
        for register, note in (
            (optimizer.register_optimizer_step_pre_hook, self.before_update),
            (optimizer.register_optimizer_step_post_hook, self.after_update),
        ):
            self._undo.append(register(lambda stepping, *_, note=note: note(stepping)).remove)

    def listen_to_construction(self, bucket_cap_bytes: float | None = None) -> None:
        """Put this around DDP's making and its hooks; with a cap DDP has this one in place of the script's."""
        from torch.nn.parallel import DistributedDataParallel

        parameters = inspect.signature(DistributedDataParallel.__init__)
        self._register = DistributedDataParallel.register_comm_hook

        def initialise(original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> None:
            given = parameters.bind(*arguments, **keywords)
            if bucket_cap_bytes is not None:
                given.arguments.pop("bucket_cap_mb_list", None)
                given.arguments["bucket_cap_mb"] = cap_in_mib(bucket_cap_bytes)
            original(*given.args, **given.kwargs)
            self.built(given.arguments["self"])

        def register(original: Callable[..., Any], ddp: Any, state: Any, hook: Any) -> Any:
            self.hooked(ddp, hook)
            return original(ddp, state, hook)

        self.wrap(DistributedDataParallel, "__init__", initialise)
        self.wrap(DistributedDataParallel, "register_comm_hook", register)

    def register_hook(self, ddp: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Give a DDP model a hook of dpsim's own: ``hook(None, bucket)`` returns a future of the flat tensor."""
        (self._register or type(ddp).register_comm_hook)(ddp, None, hook)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around`` in place of a function, which it gets first, before the arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if not self.watches:
                return original(*arguments, **keywords)
            return around(original, *arguments, **keywords)

        def undo() -> None:
            if getattr(owner, name) is wrapped:  # else somebody has wrapped it again since
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self._undo.append(undo)

    def leave(self) -> None:
        """Take this away from around the script again."""
        self.watches = False
        for undo in self._undo:
            undo()


def cap_in_mib(size_bytes: float) -> float:
    """``bucket_cap_mb`` for a fusion threshold: 0 is one bucket a tensor, infinity one for all of a dtype."""
    return min(max(size_bytes, 1.0), float(2**50)) / 2**20


def leading_extent(values: Any) -> int:
    """The leading extent of the first tensor of at least one dimension: samples of a batch; 1 without one."""
    for value in values if isinstance(values, tuple) else (values,):  # to look into other values takes longer
        for each in (value,) if isinstance(value, torch.Tensor) else torch.utils._pytree.tree_leaves(value):
            if isinstance(each, torch.Tensor) and each.dim() and each.shape[0]:
                return int(each.shape[0])
    return 1


class CoreTime:
    """Seconds for which the calling thread was ready to run and had no core, as Linux counts them; 0 elsewhere.

    The file stays open: to open it takes ten times as long as to read it.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._thread = 0

    def waited_s(self) -> float:
        try:
            if self._file is None or self._thread != threading.get_ident():
                self.close()
                self._file, self._thread = os.open(_SCHEDSTAT, os.O_RDONLY), threading.get_ident()
            return int(os.pread(self._file, 128, 0).split()[1]) * _NANOSECOND_S
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None
