"""Observes the steps of a script on one rank, and lets each begin from the state of the first run. Loads torch.

A step goes from the first forward pass after an optimizer's step to the next such step. What it begins with is first
observed, so that ranks that have come apart are seen, and then replaced: parameters, buffers, optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.around import Script, leading_extent
from dpsim.torch.script.probe.endings import EnoughSteps, Refused, second_model
from dpsim.torch.script.probe.fsdp import ShardedModel
from dpsim.torch.script.probe.reproduce.environment import environment
from dpsim.torch.script.probe.reproduce.lines import module_lines
from dpsim.torch.script.probe.reproduce.loaders import Loaders
from dpsim.torch.script.probe.reproduce.models import (
    Given,
    InReplicas,
    InShards,
    check_reduced,
    digest,
    local_part,
    whole,
)
from dpsim.torch.script.probe.reproduce.precision import Precision, in_norms, narrow, skips, unscaled
from dpsim.torch.script.probe.reproduce.report import MicroBatch, RankReport, RankStep, write_step
from dpsim.torch.script.probe.reproduce.state import TrainingState
from dpsim.torch.script.probe.reproduce.streams import SampleStreams, sample_key
from dpsim.torch.script.probe.reproduce.values import has_gradient, mean_of, random_state, rounded, row_hashes, sampled

_CLIPPING_EPSILON = 1e-6
"""What ``clip_grad_norm_`` adds to a norm."""
_UNCHANGED = 1e-6
"""The part by which the size of a gradient may change between two micro-batches as it is read."""


class Observer(Script):
    """Around one model in DDP or FSDP, its backward passes and all optimizers of a rank."""

    def __init__(self, run: Any, rank: int, steps: int, folder: Path, first_folder: Path, loaders: Loaders) -> None:
        super().__init__()
        self._run, self._rank, self._wanted = run, rank, 1 if run.overflow else steps
        self._folder, self._first_folder, self._loaders = folder, first_folder, loaders
        self.streams = SampleStreams()
        self.given = Given()
        self.precision = Precision(run, rank)
        self.precision.stepped = self._scaler_stepped
        self._state = TrainingState()
        self.steps = 0
        self._hook = ""
        self._step: RankStep | None = None
        self._stepped = False
        self._losses: list[float] = []
        self._before: dict[str, Any] = {}
        """The gradients that a backward adds to, by their names, where a step has several micro-batches."""
        self._bypassed_loss: float | None = None
        """Of a backward since the last optimizer step, where no forward of the wrapped model was called."""
        self._random_state = b""
        self._noise = torch.Generator().manual_seed(run.null_seed)
        self.streams.running_norms = run.running_norms
        loaders.loaded = self._mark_random_state

    @property
    def model(self) -> InReplicas | InShards | None:
        """The model that is observed, once there is one."""
        return self._state.model

    def __deepcopy__(self, _: Any) -> Observer:
        """Return itself, for a script that copies its model, as for a moving average, copies hooks too."""
        return self

    def report(self, **fields: Any) -> RankReport:
        """Return what this rank says at its end."""
        self._finish_step()
        types = {} if self.model is None else narrow(self.model.module)
        return RankReport(
            steps=self.steps,
            parameters=tuple(reversed([name for name, _ in self._state.parameters()])),
            local_norms=self._state.local_norms(),
            switched=tuple(self.streams.switched),
            hook=self._hook,
            narrow=types,
            narrow_norms=in_norms(self.model.module, types) if self.model is not None else (),
            computes_in=tuple(self.precision.used),
            sent_as=self.precision.sent_as,
            scales=self.precision.scales,
            wrapper="DDP" if self.model is None else self.model.wrapper,
            loaders=self._loaders.used,
            lines={} if self.model is None else module_lines(self.model.module),
            environment=environment(),
            **fields,
        )

    # What DDP or FSDP, forward, backward and the optimizer call.

    def built(self, ddp: Any) -> None:
        self._observe(InReplicas(ddp))

    def _observe(self, model: InReplicas | InShards) -> None:
        """Observe a model that DDP was constructed with, or whose shards are complete."""
        if self.model is not None:
            raise second_model("compare")
        self._state.model = model
        if distributed.get_world_size() > 1:
            self.streams.group = distributed.new_group()
        model.module.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)
        model.observe(self._gradient)
        if self._run.null_seed:
            for module in model.module.modules():
                if next(module.parameters(recurse=False), None) is not None or module is model.module:
                    module.register_forward_hook(self._with_noise)

    def sharded(self, forward: Any, model: ShardedModel, /, *arguments: Any, **keywords: Any) -> Any:
        """Call the forward of a root of FSDP."""
        if self.model is None or self.model.module is not model.module:
            if self._run.bucket_cap_bytes is not None:
                raise Refused(
                    ConfigError(
                        "--fusion-threshold for a script that calls fully_shard",
                        allowed="it with DistributedDataParallel, for FSDP has no buckets",
                        remedy="leave it out, and give several --devices",
                    )
                )
            self._observe(InShards(model, self.given))
        return forward(model, *arguments, **keywords)

    def hooked(self, ddp: Any, hook: Any) -> None:
        self._hook = getattr(hook, "__qualname__", type(hook).__name__)

    def constructed(self, make: Any, optimizer: Any, /, *arguments: Any, **keywords: Any) -> None:
        """Call the making of an optimizer, and note it."""
        make(optimizer, *arguments, **keywords)
        self._state.note(optimizer)

    def _forward(self, module: Any, arguments: Any, keywords: Any) -> None:
        if self.model is None or module is not self.model.module:  # a copy of the model, which has its hooks
            return
        if not self._training.forward(module):
            self.streams.end()
            return
        if self._step is None or self._stepped:
            self._begin_step()
        assert self._step is not None and self.model is not None
        inputs = (*arguments, *keywords.values())
        samples = leading_extent(inputs)
        rows = row_hashes(inputs, samples)
        _, epoch, indices, data_size = self._loaders.batch_of(inputs) or (0, 0, (), 0)
        if len(indices) != samples:
            epoch, indices, data_size = 0, (), 0
        self._step.micro_batches.append(MicroBatch(rows=rows, epoch=epoch, indices=indices, data_size=data_size))
        self.streams.begin([sample_key(self.steps, each) for each in indices or rows])
        self.model.forward()
        if not self._loaders.reports:
            self._mark_random_state()

    def _gradient(self, name: str, gradient: Any) -> None:
        if self._step is not None and not self._stepped:
            self._step.local[name] = sampled(gradient)
            if self._run.running_norms and isinstance(self.model, InReplicas):
                before = self._before.get(name)
                added = whole(gradient) if before is None else whole(gradient) - before
                self._step.parts[f"{len(self._losses)} {name}"] = sampled(added)

    def _gradients_before(self) -> None:
        """Keep the gradients that a backward adds to, and note which the script has changed since the one before."""
        if self._step is None or self._stepped or not self._run.running_norms:
            return
        kept, self._before = self._before, {}
        for name, parameter in self._state.parameters():
            gradient = None if parameter.grad is None else local_part(parameter.grad).clone()
            if gradient is not None:
                self._before[name] = gradient
            if self._losses and name in kept and (length := float(kept[name].norm())):
                factor = 0.0 if gradient is None else float(gradient.norm()) / length
                if abs(factor - 1) > _UNCHANGED:
                    self._step.changed[name] = min(factor, self._step.changed.get(name, factor))

    def backward(self, original: Callable[..., Any], /, tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        self._gradients_before()
        result = super().backward(original, self.precision.overflowing(tensors), *arguments, **keywords)
        self._observe_backward(tensors)
        return result

    def _observe_backward(self, tensors: Any) -> None:
        """Observe the end of a backward pass."""
        self.streams.end()
        if self._step is None or self._stepped:
            self._bypassed_loss = mean_of(tensors)
            return
        self._step.clipped.clear()
        self._losses.append(mean_of(tensors) / (self._run.accumulate if self._run.wraps else 1))
        self._step.loss, self._step.scale = sum(self._losses), self.precision.scale()
        self._step.draws |= self._random_state != random_state()
        if self.model is not None:
            wrapped = {name for name, _ in self.model.named_parameters()} if self.model.reduced() else set[str]()
            outside = {name for name, _ in self._state.parameters()} - {
                name for name, _ in self.model.named_parameters()
            }
            for name, parameter in self._state.parameters():
                if parameter.grad is not None and name in wrapped | outside:
                    values = self._step.local if name in outside else self._step.reduced
                    values[name] = sampled(whole(parameter.grad))
        if self._run.running_norms:
            held = {name: each.grad for name, each in self._state.parameters() if each.grad is not None}
            self._before = {name: local_part(gradient).clone() for name, gradient in held.items()}

    def gathers(self, gather: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call a gather, and note one of what has a gradient, which it loses."""
        if self._step is not None:
            self._step.gathers |= has_gradient(*arguments, *keywords.values())
        return gather(*arguments, **keywords)

    def adds(self, reduce: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call an all_reduce, and note one of what has a gradient."""
        if self._step is not None:
            self._step.adds |= has_gradient(*arguments, *keywords.values())
        return reduce(*arguments, **keywords)

    def clips(
        self, clip: Callable[..., Any], /, parameters: Any, max_norm: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """Call what clips the norm of gradients, and note by which factor it does."""
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = clip(clipped, max_norm, *arguments, **keywords)
        if self._step is not None and not self._stepped:
            factor = float(max_norm) / (float(whole(norm)) + _CLIPPING_EPSILON)
            names = {id(each): name for name, each in self._state.parameters()}
            if factor < 1:
                for name in (names[id(each)] for each in clipped if id(each) in names):
                    self._step.clipped[name] = factor * self._step.clipped.get(name, 1.0)
        return norm

    def optimizer_begins(
        self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Observe the gradients that an optimizer gets: after its closure, where there is one, which this returns."""
        self._state.note(optimizer)
        itself, *rest = arguments
        closure = keywords.get("closure", next(iter(rest), None))
        if closure is None:
            self._gradients_of(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            self._gradients_of(optimizer)
            return loss

        return (itself,), keywords | {"closure": observed}

    def _begin_bypassed(self, optimizer: Any) -> None:
        """Begin a step of gradients that a backward gave to a wrapped model without a forward of it."""
        loss = self._bypassed_loss
        if not isinstance(self.model, InReplicas) or loss is None:
            return
        wrapped = {id(each) for _, each in self.model.named_parameters()}
        given = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if any(id(each) in wrapped for each in given):
            self._finish_step()
            if self.steps == self._wanted:
                raise EnoughSteps
            self._step, self._losses = RankStep(loss=loss, bypassed=True), [loss]

    def _gradients_of(self, optimizer: Any) -> None:
        if self._step is None or self._stepped:
            self._begin_bypassed(optimizer)
        if self._step is None or self._stepped or self._run.overflow:  # no rank waits for one that skips its update
            return
        if isinstance(self.model, InShards) and self._losses:
            check_reduced(optimizer, any_reduced=bool(self._step.local))
        self._state.parameters()  # an optimizer may have been given more of them
        self._step.settings.update(self._state.settings(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name = self._state.names.get(id(parameter), "")
                    gradient = unscaled(optimizer, whole(parameter.grad))
                    self.precision.update_begins(optimizer, name, parameter, group.get("lr"))
                    self._step.final[name], self._step.final_hashes[name] = sampled(gradient), digest(gradient)

    def optimizer_ends(self, optimizer: Any = None, *_: Any) -> None:
        """Observe the buffers after a step."""
        if self._step is not None and self._losses:
            self._stepped = True
            self._step.skipped |= skips(optimizer)
            self._step.lost = self.precision.lost()
            self._step.buffers = {name: sampled(each) for name, each in self._state.buffers().items()}

    def _scaler_stepped(self) -> None:
        """End a step whose update a scaler of gradients has skipped."""
        if self._step is not None and not self._stepped:
            self._step.skipped = True
            self.optimizer_ends()

    # Steps.

    def _begin_step(self) -> None:
        """Observe what a step begins with, and begin it from the state of the first run. Raises ``EnoughSteps``."""
        self._finish_step()
        if self.steps == self._wanted:
            raise EnoughSteps
        assert self.model is not None
        begun = {name: self.model.begun(each) for name, each in self._state.parameters()}
        self._step = RankStep(
            begun={name: value for name, value in begun.items() if value is not None},
            buffers_seen={name: digest(each) for name, each in self._state.buffers().items()},
        )
        self._step.outside = {name: digest(each) for name, each in self._state.outside().items()}
        self.model.settle()
        self.streams.begin_step()
        path = self._first_folder / f"state-{self.steps}.pt"
        if self._run.free and self.steps:
            return
        if self._folder != self._first_folder:
            if not path.exists():
                raise EnoughSteps
            self._state.load(torch.load(path, weights_only=True))
            return
        state = self._state.whole()
        if self._rank == 0:
            torch.save(state, path)

    def _finish_step(self) -> None:
        if self._step is not None and self._stepped:
            write_step(self._folder, self._rank, self.steps, self._step)
            self.steps += 1
        self._step, self._stepped = None, False
        self._losses, self._before, self._bypassed_loss = [], {}, None

    def _with_noise(self, _: Any, __: Any, output: Any) -> Any:
        return rounded(output, self._noise) if self.streams.active else None

    def _mark_random_state(self) -> None:
        self._random_state = random_state()
