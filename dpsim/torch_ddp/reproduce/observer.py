"""Observes the steps of a script on one rank, and lets each begin from the state of the first run. Loads torch.

A step goes from the first forward pass after an optimizer's step to the next such step. What it begins with is first
observed, so that ranks that have come apart are seen, and then replaced: parameters, buffers, optimizer state.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dpsim.torch_ddp.endings import EnoughSteps
from dpsim.torch_ddp.process_group import replace_everywhere
from dpsim.torch_ddp.record import Training, leading_extent, second_model
from dpsim.torch_ddp.reproduce import streams as sample_streams
from dpsim.torch_ddp.reproduce.loaders import Loaders
from dpsim.torch_ddp.reproduce.observation import MOST_VALUES, MicroBatch, RankReport, RankStep, Run, write_step
from dpsim.torch_ddp.reproduce.streams import SampleStreams, sample_key
from dpsim.torch_ddp.timed import cap_in_mib

Array = Any


class Observer:
    """Around one DDP model, its backward passes and all optimizers of a rank."""

    def __init__(self, run: Run, rank: int, steps: int, folder: Path, first_folder: Path, loaders: Loaders) -> None:
        self._run, self._rank, self._wanted = run, rank, steps
        self._folder, self._first_folder, self._loaders = folder, first_folder, loaders
        self.streams = SampleStreams()
        self.ddp: Any = None
        self.steps = 0
        self._hook = ""
        self._training = Training()
        self._optimizers: list[Any] = []
        self._names: dict[int, str] = {}
        self._step: RankStep | None = None
        self._stepped = False
        self._losses: list[float] = []
        self._synchronises = False
        self._random_state = b""
        self._noise = torch.Generator().manual_seed(run.null_seed)
        loaders.loaded = self._mark_random_state

    def report(self, **fields: Any) -> RankReport:
        """Return what this rank says at its end."""
        self._finish_step()
        norms = []
        if self.ddp is not None:
            norms = [
                name
                for name, module in self.ddp.module.named_modules()
                if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.training
            ]
        return RankReport(
            steps=self.steps,
            parameters=tuple(reversed([name for name, _ in self._parameters()])),
            local_norms=tuple(norms),
            switched=tuple(self.streams.switched),
            hook=self._hook,
            loaders=self._loaders.used,
            **fields,
        )

    # What DDP, forward, backward and the optimizer call.

    def built(self, ddp: Any) -> None:
        """Observe a DDP model that was constructed."""
        if self.ddp is not None:
            raise second_model("compare")
        self.ddp = ddp
        ddp.module.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)
        for name, parameter in ddp.module.named_parameters():
            self._names[id(parameter)] = name
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient, name))
        if self._run.null_seed:
            for module in ddp.module.modules():
                if next(module.parameters(recurse=False), None) is not None or module is ddp.module:
                    module.register_forward_hook(self._rounded)

    def hooked(self, name: str) -> None:
        """Note that the script has registered a communication hook."""
        self._hook = name

    def constructed(self, optimizer: Any) -> None:
        """Note that the script has made an optimizer."""
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)

    def _forward(self, module: Any, arguments: Any, keywords: Any) -> None:
        if not self._training.forward(module):
            self.streams.end()
            return
        if self._step is None or self._stepped:
            self._begin_step()
        assert self._step is not None
        inputs = (*arguments, *keywords.values())
        samples = leading_extent(inputs)
        rows = _row_hashes(inputs, samples)
        epoch, indices, data_size = self._loaders.batch_of(inputs) or (0, (), 0)
        if len(indices) != samples:
            epoch, indices, data_size = 0, (), 0
        self._step.micro_batches.append(MicroBatch(rows=rows, epoch=epoch, indices=indices, data_size=data_size))
        self.streams.begin([sample_key(self.steps, each) for each in indices or rows])
        self._synchronises = self.ddp.require_backward_grad_sync
        if not self._loaders.reports:
            self._mark_random_state()

    def _gradient(self, name: str, parameter: Any) -> None:
        if self._step is not None:
            self._step.local[name] = sampled(parameter.grad)

    def backward(self, tensors: Any) -> None:
        """Observe the end of a backward pass."""
        self._training.backward()
        self.streams.end()
        if self._step is None or self._stepped:
            return
        several = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        self._losses.append(sum(float(each.detach().float().mean()) for each in several))
        self._step.loss = sum(self._losses)
        self._step.draws |= self._random_state != _random_state()
        for name, parameter in self._parameters():
            if self._synchronises and parameter.grad is not None:
                self._step.reduced[name] = sampled(parameter.grad)

    def optimizer_begins(
        self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Observe the gradients that an optimizer gets: after its closure, where there is one, which this returns."""
        self.constructed(optimizer)
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

    def _gradients_of(self, optimizer: Any) -> None:
        if self._step is None or self._stepped:
            return
        self._parameters()  # an optimizer may have been given more of them
        step, number = self._step, next(n for n, each in enumerate(self._optimizers) if each is optimizer)
        for position, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    step.settings[f"{key} of group {position} of optimizer {number}"] = float(value)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name = self._names.get(id(parameter), "")
                    step.final[name] = sampled(parameter.grad)
                    step.final_hashes[name] = digest(parameter.grad)

    def optimizer_ends(self, *_: Any) -> None:
        """Observe the buffers after a step."""
        if self._step is not None and self._losses:
            self._stepped = True
            self._step.buffers = {name: sampled(each) for name, each in self.ddp.module.named_buffers()}

    # Steps.

    def _parameters(self) -> list[tuple[str, Any]]:
        """All parameters of the DDP model and of the optimizers, by their names."""
        if self.ddp is None:
            return []
        found = {id(each): (name, each) for name, each in self.ddp.module.named_parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    name = f"parameter {len(found) + 1} of shape {'x'.join(map(str, each.shape))}, outside of DDP"
                    found.setdefault(id(each), (name, each))
        self._names = {key: name for key, (name, _) in found.items()}
        return list(found.values())

    def _begin_step(self) -> None:
        """Observe what a step begins with, and begin it from the state of the first run. Raises ``EnoughSteps``."""
        self._finish_step()
        if self.steps == self._wanted:
            raise EnoughSteps
        self._step = RankStep(
            begun={name: digest(each) for name, each in self._parameters()},
            buffers_seen={name: digest(each) for name, each in self.ddp.module.named_buffers()},
        )
        path = self._first_folder / f"state-{self.steps}.pt"
        if self._folder != self._first_folder:
            if not path.exists():
                raise EnoughSteps
            self._load(torch.load(path, weights_only=True))
        elif self._rank == 0:
            torch.save(self._state(), path)

    def _finish_step(self) -> None:
        if self._step is not None and self._stepped:
            write_step(self._folder, self._rank, self.steps, self._step)
            self.steps += 1
        self._step, self._stepped = None, False
        self._losses = []

    def _state(self) -> dict[str, Any]:
        parameters = {name: each.detach() for name, each in self._parameters()}
        buffers = dict(self.ddp.module.named_buffers())
        optimizers = [
            [dict(optimizer.state.get(each, {})) for group in optimizer.param_groups for each in group["params"]]
            for optimizer in self._optimizers
        ]
        return {"parameters": parameters, "buffers": buffers, "optimizers": optimizers}

    def _load(self, saved: dict[str, Any]) -> None:
        for own, kind in (
            (dict(self._parameters()), "parameters"),
            (dict(self.ddp.module.named_buffers()), "buffers"),
        ):
            for name, value in saved[kind].items():
                if name in own and own[name].shape == value.shape:
                    own[name].detach().copy_(value)
        for optimizer, states in zip(self._optimizers, saved["optimizers"], strict=False):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for parameter, state in zip(parameters, states, strict=False):
                own_state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(own_state.get(key), torch.Tensor) and own_state[key].shape == value.shape:
                        own_state[key].copy_(value)
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


def sampled(tensor: Any) -> Array:
    """Return at most ``MOST_VALUES`` values of a tensor, at equal distances, as an array of one dimension."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = dense.reshape(-1)
    stride = -(-flat.numel() // MOST_VALUES) or 1
    values = flat[::stride]
    return (values.double() if values.dtype == torch.float64 else values.float()).numpy().copy()


def digest(tensor: Any) -> int:
    """Return a hash of a tensor's bits."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return _hash(dense.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")


def _row_hashes(inputs: Any, samples: int) -> tuple[int, ...]:
    """A hash for each sample: of its rows in all tensors of the inputs that have one for each."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.dim() and len(each) == samples]
    rows = [
        each.detach().contiguous().view(torch.uint8).reshape(samples, -1).numpy() if each.numel() else None
        for each in (each if each.dim() > 1 else each.unsqueeze(1) for each in tensors)
    ]
    return tuple(_hash(b"".join(row[n].tobytes() for row in rows if row is not None)) for n in range(samples))


def _random_state() -> bytes:
    numbers = np.random.get_state()
    parts = (torch.get_rng_state().numpy().tobytes(), str((numbers[1].tobytes(), numbers[2], random.getstate())))  # type: ignore[index]
    return hashlib.blake2b(parts[0] + parts[1].encode(), digest_size=8).digest()


def install(observer: Observer) -> None:
    """Put ``observer`` around DDP, backward and every optimizer of this process."""
    initialise, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    make, backward = Optimizer.__init__, torch.autograd.backward
    parameters, cap_bytes = inspect.signature(initialise), observer._run.bucket_cap_bytes

    @functools.wraps(initialise)
    def built(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = parameters.bind(self, *arguments, **keywords)
        if cap_bytes is not None:
            given.arguments.pop("bucket_cap_mb_list", None)
            given.arguments["bucket_cap_mb"] = cap_in_mib(cap_bytes)
        initialise(*given.args, **given.kwargs)
        if distributed.get_world_size() > 1:
            observer.streams.group = distributed.new_group()
        observer.built(self)

    @functools.wraps(register)
    def hooked(self: Any, state: Any, hook: Any) -> Any:
        observer.hooked(getattr(hook, "__qualname__", type(hook).__name__))
        return register(self, state, hook)

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        observer.constructed(self)

    @functools.wraps(backward)
    def observed(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        result = backward(tensors, *arguments, **keywords)
        observer.backward(tensors)
        return result

    DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook = built, hooked
    Optimizer.__init__ = made
    replace_everywhere(backward, observed)
    register_optimizer_step_pre_hook(observer.optimizer_begins)
    register_optimizer_step_post_hook(observer.optimizer_ends)
    sample_streams.install(observer.streams)


def seed_untouched(rank: int) -> None:
    """Seed what Python and NumPy seed differently in every process, so that a run can be repeated."""
    random.seed(rank)
    np.random.seed(rank)
