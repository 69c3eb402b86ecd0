"""A script's model as its observer sees it: replicas that DDP reduces, or shards that FSDP reduces. Loads torch.

Both have the same members, and all that is compared are whole tensors: what FSDP shards is gathered to be read, and
cut to be written.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.endings import Refused
from dpsim.torch.script.probe.fsdp import ShardedModel, check_optimizer, give_up
from dpsim.torch.script.probe.process_group import replace_everywhere
from dpsim.torch.script.probe.reproduce.lines import script_line

Tensor = Any


class InReplicas:
    """A model in DistributedDataParallel."""

    wrapper = "DDP"

    def __init__(self, ddp: Any) -> None:
        self.module = ddp.module
        self._ddp = ddp
        self._synchronises = False
        self._wrapped, self._lines = dict(self.module.named_parameters()), dict[int, str]()
        register_module_parameter_registration_hook(self._registered)

    def _registered(self, _: Any, __: str, parameter: Any) -> None:
        """Note the line of the script that registers a parameter with any module."""
        self._lines[id(parameter)] = script_line()

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The names and parameters, as optimizers have them."""
        return list(self.module.named_parameters())

    def observe(self, local: Callable[[str, Tensor], None]) -> None:
        """Let ``local`` get the name and this rank's own gradient of each parameter before it is reduced."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(_accumulated, local, name)
                parameter.register_post_accumulate_grad_hook(hook)

    def begun(self, parameter: Any) -> int | None:
        """The hash of what this rank holds of a parameter as a step begins; None where ranks hold other parts of it."""
        return digest(parameter)

    def settle(self) -> None:
        """Nothing: replicas are whole at any time."""

    def forward(self) -> None:
        """Note that a forward pass begins: DDP decides then whether its backward reduces.

        Raises ``Refused`` where a parameter is not the one that DDP was given.
        """
        self._synchronises = self._ddp.require_backward_grad_sync
        for name, parameter in self.module.named_parameters():
            if parameter is not self._wrapped.get(name, parameter):
                raise Refused(
                    ConfigError(
                        f"{self._lines.get(id(parameter), 'the script')} replaces the parameter {name} after"
                        " DistributedDataParallel was given the model: it reduces the gradient of the one from before"
                        " (a missing gradient)",
                        allowed="parameters that stay the same while DDP trains them",
                        remedy="replace it before the model is wrapped, or write into it: with torch.no_grad(): "
                        f"{name}.copy_(...)",
                    )
                )

    def reduced(self) -> bool:
        """Whether the backward that has just ended reduced the gradients."""
        return self._synchronises


def _accumulated(local: Callable[[str, Tensor], None], name: str, parameter: Any) -> None:
    local(name, parameter.grad)


class InShards:
    """A model that ``fully_shard`` was given. It is made before its first forward, when its parameters are shards."""

    wrapper = "FSDP"

    def __init__(self, model: ShardedModel, given: Given) -> None:
        self.module = model.module
        self._model = model
        self._parameters = list(self.module.named_parameters())
        self._given = given.unchanged([each for _, each in self._parameters])

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The names and shards, as optimizers have them."""
        return self._parameters

    def observe(self, local: Callable[[str, Tensor], None]) -> None:
        """Let ``local`` get the name and this rank's own whole gradient of each parameter before it is reduced.

        Where the gradients of earlier micro-batches were reduced already, their sum is part of it, as with DDP.
        """

        @functools.wraps(foreach_reduce)
        def reduce(parameters: Any, gradients: Any, *arguments: Any, **keywords: Any) -> Any:
            _check_same_parameters([each._param_fqn for each in parameters], parameters[0].mesh_info)
            for parameter, gradient in zip(parameters, gradients):
                kept = parameter.sharded_param.grad
                local(parameter._param_fqn, gradient if kept is None else gradient + whole(kept))
            return foreach_reduce(parameters, gradients, *arguments, **keywords)

        replace_everywhere(foreach_reduce, reduce)

    def begun(self, parameter: Any) -> int | None:
        """The hash of the parameter that this rank gave to ``fully_shard``; None in later steps, or if not known."""
        return self._given.get(id(parameter)) if isinstance(parameter, DTensor) else digest(parameter)

    def settle(self) -> None:
        """Give up whole parameters, such as an evaluation leaves, so that forward gathers the shards anew."""
        self._given = {}
        give_up(self.module)

    def forward(self) -> None:
        """Nothing: FSDP decides in backward whether it reduces."""

    def reduced(self) -> bool:
        """Whether the backward that has just ended reduced the gradients."""
        return self._model.require_backward_grad_sync


def _check_same_parameters(names: list[str], mesh_info: Any) -> None:
    """Raises ``Refused`` unless all ranks are about to reduce the gradients of the same parameters."""
    ranks = gathered(names, mesh_info.shard_process_group)
    for rank, others in enumerate(ranks):
        if missing := [name for each in ranks for name in each if name not in others]:
            raise Refused(
                ConfigError(
                    f"rank {rank} has no gradient of {missing[0]} where others have one (a missing gradient), so that"
                    " FSDP reduces others than theirs with it, or waits for ever",
                    allowed="gradients of the same parameters on all ranks in each step",
                    remedy="use the parameter on all ranks, or call set_reduce_scatter_unused_params(True)",
                )
            )


def check_reduced(optimizer: Any, *, any_reduced: bool) -> None:
    """Raises ``Refused`` for an optimizer that gets no gradient of FSDP, on any number of ranks."""
    if not any(each.grad is not None for group in optimizer.param_groups for each in group["params"]):
        check_optimizer(optimizer)
    if not any_reduced:
        raise Refused(
            ConfigError(
                "an optimizer steps where FSDP has reduced no gradient since its last step (a missing gradient)",
                allowed="a last backward of each step that reduces the gradients",
                remedy="call set_requires_gradient_sync(True) before the last micro-batch",
            )
        )


class Given:
    """The hashes of the whole parameters that this rank gave to ``fully_shard``, each of which keeps but its shard."""

    def __init__(self) -> None:
        self._hashes: dict[int, tuple[Any, int, int]] = {}

    def install(self) -> None:
        """Put itself around ``fully_shard``."""
        shard = fsdp.fully_shard

        @functools.wraps(shard)
        def noted(module: Any, *arguments: Any, **keywords: Any) -> Any:
            before = {
                name: digest(each)
                for name, each in _named_parameters(module)
                if not (isinstance(each, DTensor) or each.is_meta)
            }
            sharded = shard(module, *arguments, **keywords)
            for name, each in _named_parameters(module):
                if name in before and isinstance(each, DTensor):
                    self._hashes[id(each)] = each, before[name], digest(each.to_local())
            return sharded

        replace_everywhere(shard, noted)

    def unchanged(self, parameters: list[Any]) -> dict[int, int]:
        """Return the hashes of the whole parameters, by ``id``, of which no rank wrote its shard since.

        A checkpoint that was loaded makes what ranks gave irrelevant. All ranks must ask for it.
        """
        known = [self._hashes.get(id(each)) for each in parameters]
        same = [each is not None and each[2] == digest(each[0].to_local()) for each in known]
        on_all = map(all, zip(*gathered(same)))
        return {id(each[0]): each[1] for each, kept in zip(known, on_all) if each is not None and kept}


def _named_parameters(module: Any) -> list[tuple[str, Any]]:
    return list(module.named_parameters()) if isinstance(module, torch.nn.Module) else []


def whole(tensor: Tensor) -> Tensor:
    """Return all values of a tensor. All ranks must ask for a tensor that is in shards."""
    values = tensor.detach()
    if isinstance(values, DTensor):
        return values.full_tensor()
    return values.to_dense() if values.is_sparse else values


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    values = tensor.detach()
    if isinstance(values, DTensor):
        return values.to_local()
    return values.to_dense() if values.is_sparse else values


def write(tensor: Tensor, values: Tensor) -> None:
    """Write all values of a tensor, or those of this rank's shard of it."""
    own = tensor.detach()
    if isinstance(own, DTensor):
        values = distribute_tensor(values, own.device_mesh, own.placements, src_data_rank=None).to_local()
        own = own.to_local()
    own.copy_(values)


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return what JSON can say of every rank, without NumPy, which ``all_gather_object`` needs. All ranks must ask."""
    text = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, torch.tensor([len(text)]), group=group)
    padded = torch.tensor(list(text.ljust(max(map(int, sizes)))), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(texts, padded, group=group)
    return [json.loads(content(each)) for each in texts]


def digest(tensor: Tensor) -> int:
    """Return a hash of the bits of a tensor that is whole."""
    return hashed(content(whole(tensor)))


def content(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the host, without NumPy, which the environment of a job need not have."""
    values = tensor.detach().contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel() * values.element_size())


def hashed(content: bytes) -> int:
    """Return a hash of 56 bits."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
