"""Observes the steps of a script on one rank, and lets each begin from the state of the first run. Loads torch.

A step goes from the first forward pass after an optimizer's step to the next such step. What it begins with is first
observed, so that ranks that have come apart are seen, and then replaced: parameters, buffers, optimizer state.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dpsim.errors import ConfigError
from dpsim.torch_ddp.endings import EnoughSteps, Refused, second_model
from dpsim.torch_ddp.fsdp import ShardedModel, check_optimizer, watch
from dpsim.torch_ddp.injected.around import Script, leading_extent
from dpsim.torch_ddp.reproduce import streams as sample_streams
from dpsim.torch_ddp.reproduce.loaders import Loaders
from dpsim.torch_ddp.reproduce.models import Given, InReplicas, InShards, digest, hashed, whole, write
from dpsim.torch_ddp.reproduce.observation import MOST_VALUES, MicroBatch, RankReport, RankStep, Run, write_step
from dpsim.torch_ddp.reproduce.streams import SampleStreams, sample_key

Array = Any


class Observer(Script):
    """Around one model in DDP or FSDP, its backward passes and all optimizers of a rank."""

    def __init__(self, run: Run, rank: int, steps: int, folder: Path, first_folder: Path, loaders: Loaders) -> None:
        super().__init__()
        self._run, self._rank, self._wanted = run, rank, steps
        self._folder, self._first_folder, self._loaders = folder, first_folder, loaders
        self.streams = SampleStreams()
        self.given = Given()
        self.model: InReplicas | InShards | None = None
        self.steps = 0
        self._hook = ""
        self._optimizers: list[Any] = []
        self._names: dict[int, str] = {}
        self._step: RankStep | None = None
        self._stepped = False
        self._losses: list[float] = []
        self._bypassed_loss: float | None = None
        """Of a backward since the last optimizer step, where no forward of the wrapped model was called."""
        self._random_state = b""
        self._noise = torch.Generator().manual_seed(run.null_seed)
        loaders.loaded = self._mark_random_state

    def __deepcopy__(self, _: Any) -> Observer:
        """Return itself, for a script that copies its model, as for a moving average, copies hooks too."""
        return self

    def report(self, **fields: Any) -> RankReport:
        """Return what this rank says at its end."""
        self._finish_step()
        norms = []
        if self.model is not None:
            norms = [
                name
                for name, module in self.model.module.named_modules()
                if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.training
            ]
        return RankReport(
            steps=self.steps,
            parameters=tuple(reversed([name for name, _ in self._parameters()])),
            local_norms=tuple(norms),
            switched=tuple(self.streams.switched),
            hook=self._hook,
            wrapper="DDP" if self.model is None else self.model.wrapper,
            loaders=self._loaders.used,
            **fields,
        )

    # What DDP or FSDP, forward, backward and the optimizer call.

    def built(self, ddp: Any) -> None:
        self._observe(InReplicas(ddp))

    def _observe(self, model: InReplicas | InShards) -> None:
        """Observe a model that DDP was constructed with, or whose shards are complete."""
        if self.model is not None:
            raise second_model("compare")
        self.model = model
        if distributed.get_world_size() > 1:
            self.streams.group = distributed.new_group()
        model.module.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)
        model.observe(self._gradient)
        if self._run.null_seed:
            for module in model.module.modules():
                if next(module.parameters(recurse=False), None) is not None or module is model.module:
                    module.register_forward_hook(self._rounded)

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
        self._note(optimizer)

    def _note(self, optimizer: Any) -> None:
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)

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
        rows = _row_hashes(inputs, samples)
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

    def backward(self, original: Callable[..., Any], /, tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        result = super().backward(original, tensors, *arguments, **keywords)
        self._observe_backward(tensors)
        return result

    def _observe_backward(self, tensors: Any) -> None:
        """Observe the end of a backward pass."""
        self.streams.end()
        if self._step is None or self._stepped:
            self._bypassed_loss = _mean(tensors)
            return
        self._losses.append(_mean(tensors))
        self._step.loss = sum(self._losses)
        self._step.draws |= self._random_state != _random_state()
        if self.model is not None and self.model.reduced():
            for name, parameter in self._parameters():
                if parameter.grad is not None:
                    self._step.reduced[name] = sampled(whole(parameter.grad))

    def optimizer_begins(
        self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Observe the gradients that an optimizer gets: after its closure, where there is one, which this returns."""
        self._note(optimizer)
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
        if self._step is None or self._stepped:
            return
        if isinstance(self.model, InShards) and self._losses:
            self._check_reduced(optimizer, self._step)
        self._parameters()  # an optimizer may have been given more of them
        step, number = self._step, next(n for n, each in enumerate(self._optimizers) if each is optimizer)
        for position, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    step.settings[f"{key} of group {position} of optimizer {number}"] = float(value)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name, gradient = self._names.get(id(parameter), ""), whole(parameter.grad)
                    step.final[name] = sampled(gradient)
                    step.final_hashes[name] = digest(gradient)

    @staticmethod
    def _check_reduced(optimizer: Any, step: RankStep) -> None:
        """Raises ``Refused`` for an optimizer that gets no gradient of FSDP, on any number of ranks."""
        if not any(each.grad is not None for group in optimizer.param_groups for each in group["params"]):
            check_optimizer(optimizer)
        if not step.local:
            raise Refused(
                ConfigError(
                    "an optimizer steps where FSDP has reduced no gradient since its last step (a missing gradient)",
                    allowed="a last backward of each step that reduces the gradients",
                    remedy="call set_requires_gradient_sync(True) before the last micro-batch",
                )
            )

    def optimizer_ends(self, *_: Any) -> None:
        """Observe the buffers after a step."""
        if self._step is not None and self._losses:
            self._stepped = True
            self._step.buffers = {name: sampled(each) for name, each in self._buffers().items()}

    # Steps.

    def _parameters(self) -> list[tuple[str, Any]]:
        """All parameters of the model and of the optimizers, by their names."""
        if self.model is None:
            return []
        found = {id(each): (name, each) for name, each in self.model.named_parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    shape = "x".join(map(str, each.shape))
                    name = f"parameter {len(found) + 1} of shape {shape}, outside of {self.model.wrapper}"
                    found.setdefault(id(each), (name, each))
        self._names = {key: name for key, (name, _) in found.items()}
        return list(found.values())

    def _buffers(self) -> dict[str, Any]:
        return {} if self.model is None else dict(self.model.module.named_buffers())

    def _begin_step(self) -> None:
        """Observe what a step begins with, and begin it from the state of the first run. Raises ``EnoughSteps``."""
        self._finish_step()
        if self.steps == self._wanted:
            raise EnoughSteps
        assert self.model is not None
        begun = {name: self.model.begun(each) for name, each in self._parameters()}
        self._step = RankStep(
            begun={name: value for name, value in begun.items() if value is not None},
            buffers_seen={name: digest(each) for name, each in self._buffers().items()},
        )
        self.model.settle()
        path = self._first_folder / f"state-{self.steps}.pt"
        if self._folder != self._first_folder:
            if not path.exists():
                raise EnoughSteps
            self._load(torch.load(path, weights_only=True))
            return
        state = self._state()
        if self._rank == 0:
            torch.save(state, path)

    def _finish_step(self) -> None:
        if self._step is not None and self._stepped:
            write_step(self._folder, self._rank, self.steps, self._step)
            self.steps += 1
        self._step, self._stepped = None, False
        self._losses, self._bypassed_loss = [], None

    def _state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer states as whole tensors. All ranks must ask for it."""
        optimizers = [
            [
                {key: _whole(value) for key, value in optimizer.state.get(each, {}).items()}
                for group in optimizer.param_groups
                for each in group["params"]
            ]
            for optimizer in self._optimizers
        ]
        parameters = {name: whole(each) for name, each in self._parameters()}
        return {"parameters": parameters, "buffers": self._buffers(), "optimizers": optimizers}

    def _load(self, saved: dict[str, Any]) -> None:
        for own, kind in ((dict(self._parameters()), "parameters"), (self._buffers(), "buffers")):
            for name, value in saved[kind].items():
                if name in own and own[name].shape == value.shape:
                    write(own[name], value)
        for optimizer, states in zip(self._optimizers, saved["optimizers"], strict=False):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for parameter, state in zip(parameters, states, strict=False):
                own_state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(own_state.get(key), torch.Tensor) and own_state[key].shape == value.shape:
                        write(own_state[key], value)
                    elif key in own_state and not isinstance(value, torch.Tensor):
                        own_state[key] = value

    # The null.

    def _rounded(self, _: Any, __: Any, output: Any) -> Any:
        """Add to a module's output what a rounding of its sums would, at random."""
        if not (self.streams.active and isinstance(output, torch.Tensor) and output.is_floating_point()):
            return None
        size = output.detach().float().square().mean().sqrt()
        if not torch.isfinite(size):
            return None
        noise = torch.empty(output.shape)
        _NORMAL(noise, generator=self._noise)
        return output + (noise * (size * torch.finfo(output.dtype).eps)).to(output.dtype)

    def _mark_random_state(self) -> None:
        self._random_state = _random_state()


_NORMAL = torch.Tensor.normal_


def _mean(tensors: Any) -> float:
    """The sum of the means of what backward begins at."""
    several = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    return sum(float(each.detach().float().mean()) for each in several)


def sampled(tensor: Any) -> Array:
    """Return at most ``MOST_VALUES`` values of a whole tensor, at equal distances, as an array of one dimension."""
    flat = whole(tensor).reshape(-1)
    stride = -(-flat.numel() // MOST_VALUES) or 1
    values = flat[::stride]
    return (values.double() if values.dtype == torch.float64 else values.float()).numpy().copy()


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, torch.Tensor) else value


def _row_hashes(inputs: Any, samples: int) -> tuple[int, ...]:
    """A hash for each sample: of its rows in all tensors of the inputs that have one for each."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.dim() and len(each) == samples]
    rows = [
        each.detach().contiguous().view(torch.uint8).reshape(samples, -1).numpy() if each.numel() else None
        for each in (each if each.dim() > 1 else each.unsqueeze(1) for each in tensors)
    ]
    return tuple(hashed(b"".join(row[n].tobytes() for row in rows if row is not None)) for n in range(samples))


def _random_state() -> bytes:
    numbers = np.random.get_state()
    parts = (torch.get_rng_state().numpy().tobytes(), str((numbers[1].tobytes(), numbers[2], random.getstate())))  # type: ignore[index]
    return hashlib.blake2b(parts[0] + parts[1].encode(), digest_size=8).digest()


def install(observer: Observer, bucket_cap_bytes: float | None) -> None:
    """Put ``observer`` around DDP, FSDP, backward and every optimizer of this process."""
    observer.listen_to_construction(bucket_cap_bytes)
    observer.wrap(torch.autograd, "backward", observer.backward)
    observer.wrap(Optimizer, "__init__", observer.constructed)
    watch(observer.sharded, instead_of_ddp=False, done="compared")
    observer.given.install()
    register_optimizer_step_pre_hook(observer.optimizer_begins)
    register_optimizer_step_post_hook(observer.optimizer_ends)
    sample_streams.install(observer.streams)


def seed_untouched(rank: int) -> None:
    """Seed what Python and NumPy seed differently in every process, so that a run can be repeated."""
    random.seed(rank)
    np.random.seed(rank)
    make, made = np.random.default_rng, itertools.count()

    @functools.wraps(make)
    def default_rng(seed: Any = None) -> Any:
        return make([rank, next(made)] if seed is None else seed)

    np.random.default_rng = default_rng
