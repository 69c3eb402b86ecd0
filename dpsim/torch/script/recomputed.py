"""What of a recorded script would be otherwise if backward did, or did not, compute activations again. Loads no torch.

Where the script recomputes (``torch.utils.checkpoint``), the other choice keeps everything; else it keeps the inputs of
each block alone. A block is a member of the model's outermost ``Sequential`` and ``ModuleList``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpsim.torch.script.probe.steps import StepMemory

Modules = dict[str, float]


def block_of(module: str, memory: StepMemory | None) -> str | None:
    """Return the block that a module is or belongs to."""
    blocks = {} if memory is None else memory.entered_bytes
    return next((name for name in blocks if name == module or module.startswith(f"{name}.")), None)


def forward_of_blocks_s(memory: StepMemory | None, forward_s: Mapping[str, float]) -> Modules:
    """Return the forward seconds of the modules that belong to blocks."""
    return {module: seconds for module, seconds in forward_s.items() if block_of(module, memory) is not None}


def divided_s(recomputed_s: float, backward_s: Sequence[float], recomputes: Sequence[bool]) -> list[float]:
    """Return what of ``recomputed_s`` each layer takes: in proportion to the backward of those that recompute.

    Gradients of a block become ready behind its recomputation, so that the backward of its last layer has most of it.
    Where no layer is known to recompute, all are taken to.
    """
    own_s = [seconds * (of or not any(recomputes)) for seconds, of in zip(backward_s, recomputes, strict=True)]
    share = min(recomputed_s / (sum(own_s) or 1.0), 1.0)
    return [share * seconds for seconds in own_s]


def other_activation_bytes(memory: StepMemory | None) -> Modules:
    """Return activation bytes by module with the other choice; none where they are not known.

    With all blocks recomputed the largest sum is that of what is kept, and of what a step takes beside what autograd
    saves, as for its loss; or that of what is kept until a block, and of all that this block saves.
    """
    if memory is None:
        return {}
    saved = {module: float(memory.saved_bytes.get(module, 0)) for module in (*memory.saved_bytes, *memory.again_bytes)}
    if memory.again_bytes:
        for module, size_bytes in memory.again_bytes.items():
            saved[module] += size_bytes
        return {module: memory.without_bytes * each / sum(saved.values()) for module, each in saved.items()}
    if not memory.entered_bytes:
        return {}
    of_blocks: Modules = {}
    for module, saved_bytes in saved.items():
        if (block := block_of(module, memory)) is not None:
            of_blocks[block] = of_blocks.get(block, 0.0) + saved_bytes
    others: Modules = {}
    largest_bytes = 0.0
    for module, saved_bytes in saved.items():
        block = block_of(module, memory)
        if block in of_blocks:
            largest_bytes = max(largest_bytes, sum(others.values()) + of_blocks.pop(block))
            others[module] = float(memory.entered_bytes[block])
        elif block is None:
            others[module] = saved_bytes
    beside_bytes = max(memory.activation_bytes - sum(saved.values()), 0.0)
    for module in [*others][:1]:
        others[module] += max(beside_bytes, largest_bytes - sum(others.values()))
    return others
