"""Records a script's training by putting itself around DDP or FSDP, backward, optimizer, data loader. Loads torch."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter, sleep
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from dpsim.errors import ConfigError
from dpsim.torch_ddp.endings import EnoughSteps, Refused
from dpsim.torch_ddp.fsdp import ShardedModel, check_optimizer, watch
from dpsim.torch_ddp.process_group import CLOCK, ReplicatedGroup, replace_everywhere
from dpsim.torch_ddp.recorded import MODES, RecordedStep

WARM_UP_STEPS = 2
"""Synchronising steps before the first that is recorded: DDP rebuilds its buckets as the second one begins."""

_UNWRAPPED_STEPS = 3
"""Optimizer steps on gradients that were reduced without DDP after which a script is refused."""

_WAITED_UPDATES = 100
"""Optimizer steps before any model of DDP or FSDP is called after which the user is told that one is waited for."""


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
        """Whether this forward pass of ``ddp`` trains."""
        if not torch.is_grad_enabled():
            return False
        trains = self._in_evaluation_mode or any(module.training for module in ddp.modules())
        self._evaluated = not trains
        return trains

    def backward(self) -> None:
        """Learn from a backward pass that begins."""
        self._in_evaluation_mode |= self._evaluated


def second_model(verb: str) -> Refused:
    """What ends a script that trains two models; ``verb`` is what dpsim was to do with it."""
    return Refused(
        ConfigError(
            "the script trains two models with DistributedDataParallel or fully_shard",
            allowed="one model, as a workload is",
            remedy=f"{verb} a script that trains one of them, or wrap both in one module; where they are parts of"
            " one, call fully_shard on the whole model as well",
        )
    )


def enough(recorder: Recorder) -> None:
    """End the script: it is recorded once. Raises ``EnoughSteps``."""
    raise EnoughSteps


class Recorder:
    """Records ``wanted`` synchronising steps of the one model that a script trains, after the warm-up.

    Then it calls ``recorded``, which ends the script or asks for ``another`` record; the clock stands still meanwhile.
    Every synchronising backward is followed by a pause of ``pause_s``, in which it stands still too.
    """

    def __init__(self, wanted: int, recorded: Callable[[Recorder], None] = enough) -> None:
        self.wanted, self.pause_s, self._recorded = wanted, 0.0, recorded
        self._pid = os.getpid()
        self.steps: list[RecordedStep] = []
        self.built = 0
        self.synchronised = 0
        self.ddp: Any = None
        self._training = Training()
        self._unwrapped_steps = self._waited_updates = 0
        self.optimizer: Any = None
        self.input_workers = 0
        self.load_s_per_sample = 0.0
        self._warmed_up = 0
        self._begun: Counter[int] = Counter()  # steps by their local batch
        self._step: RecordedStep | None = None
        self.first_parameter: dict[str, int] = {}
        self._parameters: list[Any] = []
        self._synchronises = False
        self._forward_since_backward = False
        self._depth = 0
        self._forward_ended_s = 0.0
        self._backward_began_s = 0.0
        self._update_began_s = 0.0
        self._modules_began: list[tuple[str, float]] = []
        self._iterator: Any = None
        self._hooks: list[Any] = []

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
    def all_modes(self) -> bool:
        """Whether there are steps of every mode."""
        return {step.mode for step in self.steps} == set(MODES)

    @property
    def warm_up(self) -> int:
        """Synchronising steps before the first that is recorded; a static graph is rebuilt one later."""
        return WARM_UP_STEPS + bool(self.ddp.static_graph)

    def now(self) -> float:
        """Seconds of computation, with the work of an accelerator done."""
        if self.ddp is not None and self.ddp.device_type == "cuda":
            torch.cuda.synchronize()
            CLOCK.settle()
        return CLOCK.now()

    # What DDP, backward, the optimizer and the data loader call.

    @contextmanager
    def building(self, /, *_: Any, **__: Any) -> Iterator[None]:
        """Around the construction of a DDP model."""
        yield
        self.built += 1

    @contextmanager
    def forward(self, ddp: Any, /, *arguments: Any, **keywords: Any) -> Iterator[None]:
        """Around DDP's forward. Evaluation is not recorded. Raises ``EnoughSteps``."""
        if not self._training.forward(ddp):
            yield
            return
        self._check_process()
        if self.ddp is None:
            self.ddp = ddp
            self.built += isinstance(ddp, ShardedModel)
            self._parameters = [parameter for _, parameter in reduced_parameters(ddp)]
            self.first_parameter = _first_parameters(ddp, self._parameters)
        elif self.ddp is not ddp:
            raise second_model("profile")
        if self._step is None or self._step.synchronised:
            self._next_step(leading_extent((*arguments, *keywords.values())))
        step = self._step
        assert step is not None
        self._synchronises = ddp.require_backward_grad_sync
        if step.mode == "forward":
            self._hook_modules()
        began_s = self.now()
        yield
        ended_s = self.now()
        step.forward_s += ended_s - began_s
        self._forward_ended_s = ended_s
        self._count_modules(step, began_s, ended_s)
        self._unhook()
        self._forward_since_backward = True

    @contextmanager
    def backward(self, /, *_: Any, **__: Any) -> Iterator[None]:
        """Around ``torch.autograd.backward``; one inside another (checkpointing) is part of the outer one."""
        self._depth += 1
        self._training.backward()
        outermost = self._depth == 1 and self._forward_since_backward and self._step is not None
        if outermost and self._step is not None:
            if self._step.mode == "gradients" and self._synchronises:
                for index, parameter in enumerate(self._parameters):
                    done = functools.partial(self._gradient_is_ready, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(done))
            self._backward_began_s = self.now()
            self._step.loss_s += self._backward_began_s - self._forward_ended_s
        asked = len(CLOCK.collectives)
        try:
            yield
        finally:
            self._depth -= 1
        if outermost and self._step is not None:
            del CLOCK.collectives[asked:]
            seconds = self.now() - self._backward_began_s
            self._unhook()
            self._step.backward_s += seconds
            self._update_began_s = self.now()  # where an optimizer's step calls a closure, that is no update
            self._step.micro_batches += 1
            self._forward_since_backward = False
            if self._synchronises:
                self._step.last_backward_s = seconds
                self._step.synchronised = True
                self.synchronised += 1
                with CLOCK.stopped():
                    sleep(self.pause_s)

    def update_begins(self, optimizer: Any, *_: Any) -> None:
        self._update_began_s = self.now()

    def update_ends(self, optimizer: Any, *_: Any) -> None:
        if self.ddp is not None and self._step is None:  # the copy that ``plain_update_s`` times
            return
        self.optimizer = optimizer
        if self._step is not None:
            self._step.update_s += self.now() - self._update_began_s
        if self.ddp is None:
            self._check_wrapped(optimizer)
        elif isinstance(self.ddp, ShardedModel):
            check_optimizer(optimizer)

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
            raise Refused(
                ConfigError(
                    "the script reduces its gradients without calling a DistributedDataParallel model",
                    allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel, or calls"
                    " fully_shard",
                    remedy="wrap the model, call what DistributedDataParallel returns, and leave out the script's own"
                    " all_reduce, or replicate()",
                )
            )

    @contextmanager
    def loading(self, iterator: Any) -> Iterator[None]:
        """Around the next batch of a ``DataLoader``."""
        began_s = CLOCK.now()
        yield
        self._iterator = iterator
        if self._step is not None:
            self._step.input_s += CLOCK.now() - began_s

    def _check_process(self) -> None:
        """Raises ``Refused`` in a process that the script has forked, whose training would slow that of this one."""
        if os.getpid() != self._pid:
            raise Refused(
                ConfigError(
                    "the script trains in a process that it has started itself",
                    allowed="a script whose ranks torchrun or torch.multiprocessing.spawn starts",
                    remedy="start them by one of the two, in place of multiprocessing.Process or os.fork",
                )
            )

    # Steps.

    def _next_step(self, local_batch: int) -> None:
        """End the step before this one, and begin another in the next mode. Raises ``EnoughSteps``."""
        if self._step is not None:
            self._step.step_s = self.now() - self._step.start_s
            self._step.own_collectives = tuple(CLOCK.collectives)
            if self._step.mode is not None and not self.complete:
                self.steps.append(self._step)
        if self.complete:
            self._step = None
            with CLOCK.stopped():
                if self.steps:
                    self._learn_about_the_input(local_batch)
                self._recorded(self)
        mode = None
        if self._warmed_up < self.warm_up:
            self._warmed_up += 1
        else:  # in turn for each size of batch: else the short batch of every epoch might always have the same mode
            mode = MODES[self._begun[local_batch] % len(MODES)]
            self._begun[local_batch] += 1
        CLOCK.collectives.clear()
        self._step = RecordedStep(mode=mode, start_s=self.now(), local_batch=local_batch)

    def _hook_modules(self) -> None:
        for name, module in self.ddp.module.named_modules():
            takes_hooks = not isinstance(module, torch.jit.RecursiveScriptModule)
            if name in self.first_parameter and takes_hooks:
                begins = functools.partial(self._module_begins, name)
                self._hooks.append(module.register_forward_pre_hook(begins, prepend=True))

    def _module_begins(self, name: str, *_: Any) -> None:
        self._modules_began.append((name, self.now()))

    def _count_modules(self, step: RecordedStep, began_s: float, ended_s: float) -> None:
        """Count the forward from one module's beginning to the next one's as the first one's."""
        following = [*(moment_s for _, moment_s in self._modules_began[1:]), ended_s]
        for (name, _), next_s in zip(self._modules_began, following, strict=False):
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

    def _learn_about_the_input(self, local_batch: int) -> None:
        """How many processes load data, and how long one takes for a sample: the faster of two batches loaded here."""
        loader = self._iterator
        if loader is None or loader._num_workers == 0:
            return
        self.input_workers = loader._num_workers
        fetcher = dataloader._DatasetKind.create_fetcher(
            loader._dataset_kind, loader._dataset, loader._auto_collation, loader._collate_fn, loader._drop_last
        )
        times = []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _, indices in zip(range(2), loader._index_sampler, strict=False):
            began_s = perf_counter()
            fetcher.fetch(indices)
            times.append(perf_counter() - began_s)
        torch.set_num_threads(threads)
        self.load_s_per_sample = min(times, default=0.0) / local_batch


def _first_parameters(ddp: Any, parameters: list[Any]) -> dict[str, int]:
    """The position of the first reduced parameter of every module that has some of its own."""
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    if isinstance(ddp, ShardedModel):
        return {unit: position[id(shard)] for _, unit, shard in reversed(ddp.parameters)}
    own = {name: list(map(id, module.parameters(recurse=False))) for name, module in ddp.module.named_modules()}
    reduced = {name: [position[each] for each in ids if each in position] for name, ids in own.items()}
    return {name: positions[0] for name, positions in reduced.items() if positions}


def leading_extent(values: Any) -> int:
    """The leading extent of the first tensor of at least one dimension: samples of a batch; 1 without one."""
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0]:
            return int(value.shape[0])
    return 1


def reduced_parameters(ddp: Any) -> list[tuple[str, Any]]:
    """The parameters that DDP or FSDP reduces, by the names of the script's module, in the order of their positions."""
    if isinstance(ddp, ShardedModel):
        return [(name, shard) for name, _, shard in ddp.parameters]
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]


def install(recorder: Any, *, instead_of_ddp: bool = False) -> None:
    """Put ``recorder`` around DDP or FSDP, backward, every optimizer and every data loader of this process.

    It is a ``Recorder``, or has the methods that one has for what these call.

    With ``instead_of_ddp`` what the script wraps in DDP is sharded by FSDP.
    """
    backward, batches = torch.autograd.backward, dataloader._BaseDataLoaderIter
    for owner, name, context in (
        (DistributedDataParallel, "__init__", recorder.building),
        (DistributedDataParallel, "forward", recorder.forward),
        (batches, "__next__", recorder.loading),
    ):
        setattr(owner, name, _within(context, getattr(owner, name)))
    replace_everywhere(backward, _within(recorder.backward, backward))
    register_optimizer_step_pre_hook(recorder.update_begins)
    register_optimizer_step_post_hook(recorder.update_ends)
    watch(recorder.forward, instead_of_ddp=instead_of_ddp)


def _within(context: Callable[..., AbstractContextManager[None]], original: Any) -> Any:
    """Return ``original``, called within the context that its own arguments give."""

    @functools.wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        with context(*arguments, **keywords):
            return original(*arguments, **keywords)

    return wrapped


def check_one_graph(recorder: Recorder) -> None:
    """Raises ``ConfigError`` if other parameters got a gradient in one step than in another, as DDP allows some."""
    ready = [frozenset(step.ready_s) for step in recorder.steps if step.ready_s]
    changed = sorted(frozenset.union(*ready) - frozenset.intersection(*ready)) if ready else []
    if changed:
        names = [name for name, _ in reduced_parameters(recorder.ddp)]
        raise ConfigError(
            f"{len(changed)} parameters get a gradient in some steps and none in others, such as {names[changed[0]]}",
            allowed="a script whose graph is the same in every step, as a workload is one step",
            remedy="profile each kind of step by itself: let the script train that kind alone",
        )
