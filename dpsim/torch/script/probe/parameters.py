"""The parameters that DDP or FSDP reduces, and where those of a module begin among them."""

from __future__ import annotations

from typing import Any

from dpsim.torch.script.probe.fsdp import ShardedModel


def reduced_parameters(ddp: Any) -> list[tuple[str, Any]]:
    """The parameters that DDP or FSDP reduces, by the names of the script's module, in the order of their positions."""
    if isinstance(ddp, ShardedModel):
        return [(each.name, each.shard) for each in ddp.parameters]
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]


def first_parameters(ddp: Any, parameters: list[Any]) -> dict[str, int]:
    """The position of the first reduced parameter of every module that has some of its own."""
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    if isinstance(ddp, ShardedModel):
        return {each.unit: position[id(each.shard)] for each in reversed(ddp.parameters)}
    own = {name: list(map(id, module.parameters(recurse=False))) for name, module in ddp.module.named_modules()}
    reduced = {name: [position[each] for each in ids if each in position] for name, ids in own.items()}
    return {name: positions[0] for name, positions in reduced.items() if positions}
