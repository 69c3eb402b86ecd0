"""Weighs a step of a script: what lives at its peak beside parameters, gradients and optimizer state. Loads torch.

On processors these are the allocations of PyTorch's memory profile. It does not see how what is older than itself is
freed, so it begins a step early: in the second step all but parameters, state and DDP's buckets is new.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from dpsim.torch.script.probe.fsdp import ShardedModel, blocks_of
from dpsim.torch.script.probe.record import Recorder
from dpsim.torch.script.probe.steps import StepMemory

_MARK = "dpsim "
_BEGINS, _GRADIENT, _COMPUTED, _UPDATED = "begins", "gradient", "computed", "updated"
_FIRST_COMPUTED = "first"
_STEPS = 2
_VIEWS = ("TBackward0", "TransposeBackward0", "ViewBackward0")


class _Saved(NamedTuple):
    """A storage that autograd saves: for which module, and in which region that backward computes again (0: none)."""

    module: str
    storage: Any
    region: int


class WeighingRecorder(Recorder):
    """A recorder that weighs the second of two more steps, which a script may have or not, after those it records."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self._weighed = 0  # steps that were begun
        self._profile: Any = None
        self._module = ""
        self._storages: dict[int, _Saved] = {}
        self._saved_bytes: dict[str, int] = {}
        self._copied_bytes: dict[str, int] = {}
        self._again_bytes: dict[str, int] = {}
        self._entered_bytes: dict[str, int] = {}
        self._largest_region_bytes = 0
        self._copies: set[int] = set()  # the storages that are copies of parameters
        self._saving: Any = None
        self._released = self._added = False  # gradients, after an update, and to those of earlier micro-batches

    def ends(self) -> bool:
        """Begin the next step that is weighed, and return whether there is none."""
        self._weighed += 1
        if self._weighed == 1 and self.ddp.device_type == "cpu" and not torch.autograd._profiler_enabled():
            self._profile = profiler.profile(profile_memory=True)
            self._profile.__enter__()
        if self._weighed <= _STEPS and self._profile is not None:
            return False
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.memory = self._of_profile(self._profile.kineto_results.events())
            self._profile = None
        return True

    def forward_begins(self, samples: int) -> None:
        super().forward_begins(samples)
        if self._weighed == 1:
            self._storages.clear()
            self._copies.clear()
            self._hook_modules()
            self._hook_blocks()
            self.recomputation.keep_all = self._save
            self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
            self._saving.__enter__()
        self._mark(_BEGINS)

    def _module_begins(self, name: str, *arguments: Any) -> None:
        self._module = name
        super()._module_begins(name, *arguments)

    def _hook_blocks(self) -> None:
        """Note what each block reads, which is all that is kept of it where backward computes it again."""
        self._entered_bytes.clear()
        blocks = {*map(id, blocks_of(self.ddp.module))}

        def enters(name: str, _: Any, arguments: Any, keywords: Any) -> None:
            tensors = [each for each in torch.utils._pytree.tree_leaves((arguments, keywords)) if torch.is_tensor(each)]
            self._entered_bytes[name] = self._entered_bytes.get(name, 0) + sum(map(_bytes, tensors))

        for name, module in self.ddp.module.named_modules():
            if id(module) in blocks and not isinstance(module, torch.jit.RecursiveScriptModule):
                enter = functools.partial(enters, name)
                self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))

    def _save(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            module = self._module or next(iter(self.first_parameter))
            self._storages.setdefault(storage._cdata, _Saved(module, storage, self.recomputation.region))
            if _copies_parameter(tensor):
                self._copies.add(storage._cdata)
            return tensor.detach()  # to keep the tensor itself would let its graph refer to itself
        return tensor

    def forward_ends(self) -> None:
        """Count what autograd has saved, each storage once; FSDP has given back what it gathered for some of it.

        The largest copy of a parameter counts twice: its gradient has the copy's type until it is added to the other.
        """
        super().forward_ends()
        if self._saving is None:
            return
        self._saving.__exit__(None, None, None)
        self._saving = self.recomputation.keep_all = None
        others = {each.untyped_storage()._cdata for each in _state_of(self.ddp)}
        of_modules = (self._saved_bytes, self._copied_bytes, self._again_bytes)
        for sizes in of_modules:
            sizes.clear()
        saved = {key: each for key, each in self._storages.items() if key not in others}
        kept = [(key in self._copies, each) for key, each in saved.items() if not each.region]
        kept += sorted((each for each in kept if each[0]), key=lambda each: each[1].storage.nbytes())[-1:]
        regions: dict[int, int] = {}
        for which, each in [*kept, *((2, each) for each in saved.values() if each.region)]:
            size_bytes = each.storage.nbytes()
            of_modules[which][each.module] = of_modules[which].get(each.module, 0) + size_bytes
            regions[each.region] = regions.get(each.region, 0) + size_bytes * bool(each.region)
        self._largest_region_bytes = max(regions.values(), default=0)
        self._storages.clear()

    def backward_begins(self) -> None:
        super().backward_begins()
        if not self._weighed:
            return
        without = [each for each in self._parameters if each.grad is None]
        if self.micro_batches == 0:
            self._released = bool(without)
        else:
            self._added = True
        self._mark(_BEGINS)
        hooked = self._own_gradients and not isinstance(self.ddp, ShardedModel)
        for parameter in without if hooked else ():
            ready = functools.partial(self._mark, _GRADIENT, _bytes(parameter))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def backward_ends(self) -> None:
        first = self._added and self.micro_batches == 1 and isinstance(self.ddp, ShardedModel)
        self._mark(_FIRST_COMPUTED if first else _COMPUTED)  # FSDP's gradients grow in it, and each has no mark
        super().backward_ends()

    def update_ends(self, optimizer: Any) -> None:
        self._mark(_UPDATED)
        super().update_ends(optimizer)

    @property
    def _own_gradients(self) -> bool:
        """Whether gradients have memory of their own, and are no views of DDP's buckets."""
        return not getattr(self.ddp, "gradient_as_bucket_view", False)

    def _gradient_bytes(self) -> int:
        shards = sum(_bytes(each) for each in self._parameters if self._own_gradients and each.grad is not None)
        return shards + (self.ddp.whole_gradient_bytes() if isinstance(self.ddp, ShardedModel) else 0)

    def _mark(self, name: str, size_bytes: int | None = None, *_: Any) -> None:
        """Write into the profile what begins or ends here, and the bytes of all gradients, or of one that is final."""
        if self._weighed == _STEPS and self._profile is not None:
            size_bytes = self._gradient_bytes() if size_bytes is None else size_bytes
            with profiler.record_function(f"{_MARK}{name} {size_bytes}"):
                pass

    def _of_profile(self, events: Iterable[Any]) -> StepMemory:
        """Return the largest sums of live bytes beside gradients, until backward ends, and in an update."""
        kept_bytes = 0 if self._released else self._gradient_bytes()
        peaks = {_BEGINS: 0, _GRADIENT: 0, _FIRST_COMPUTED: 0, _COMPUTED: 0, _UPDATED: 0}
        since: int | None = None  # the first step is not weighed
        for change in _beside_gradients(events):
            if isinstance(change, str):
                peaks[change], since = max(peaks[change], since or 0), 0
            elif since is not None:
                since = max(since, change + kept_bytes)
        priced_bytes = 0  # what ``dpsim.model.memory`` adds to that: a gathered unit, or a gradient before it is added
        if isinstance(self.ddp, ShardedModel):
            priced_bytes = self.ddp.gathered_bytes + self._added * max(self.ddp.bucket_bytes, default=0)
        elif self._added:
            priced_bytes = max(map(_bytes, self._parameters))
        priced_bytes += sum(self._copied_bytes.values())
        backward_bytes, again_bytes = max(peaks[_GRADIENT], peaks[_COMPUTED]), sum(self._again_bytes.values())
        saved_bytes = sum(self._saved_bytes.values())
        without_bytes = max(peaks[_BEGINS], backward_bytes - self._largest_region_bytes) + again_bytes
        return StepMemory(
            activation_bytes=max(max(peaks[_BEGINS], backward_bytes) - priced_bytes, saved_bytes),
            update_bytes=peaks[_UPDATED],
            saved_bytes=self._saved_bytes,
            copied_bytes=self._copied_bytes,
            gradients=("released" if self._released else "kept") if self._own_gradients else "buckets",
            again_bytes=self._again_bytes,
            without_bytes=max(without_bytes - priced_bytes, saved_bytes + again_bytes),
            entered_bytes={} if again_bytes else self._entered_bytes,
        )


def _copies_parameter(tensor: Any) -> bool:
    """Whether a tensor is a parameter in another type, or a view of such a copy."""
    function = tensor.grad_fn
    while function is not None and function.name() in _VIEWS:
        function = function.next_functions[0][0]
    if function is None or function.name() != "ToCopyBackward0":
        return False
    return hasattr(function.next_functions[0][0], "variable")


def _beside_gradients(events: Iterable[Any]) -> Iterator[int | str]:
    """Yield the live bytes beside gradients after each allocation, and the marks between them.

    A gradient counts as one from when its memory was allocated, not from when it is final.
    """
    changes: list[tuple[int | str, int]] = []  # bytes or a mark, and by how much the bytes of gradients change
    total = first = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            changes.append((event.nbytes(), 0))
        elif event.name().startswith(_MARK):
            _, mark, size = event.name().split()
            grown = int(size) - (0 if mark == _GRADIENT else total)
            total += grown
            if mark == _GRADIENT:
                own = [at for at in range(first, len(changes)) if changes[at] == (grown, 0)]
                if own:
                    changes[own[-1]], grown = (grown, grown), 0
            else:
                first = len(changes)
            changes.append((mark, grown))
    live = 0
    for each, gradient in changes:
        live += (each if isinstance(each, int) else 0) - gradient
        yield live if isinstance(each, int) else each


def _state_of(ddp: Any) -> Iterator[Any]:
    """Yield the parameters and buffers of a model, on this rank, and what FSDP gathers."""
    for tensor in (*ddp.module.parameters(), *ddp.module.buffers()):
        yield tensor.to_local() if hasattr(tensor, "to_local") else tensor
    for groups in ddp.groups.values() if isinstance(ddp, ShardedModel) else ():
        for group in groups:
            yield from (each._unsharded_param for each in group.fsdp_params if hasattr(each, "_unsharded_param"))


def _bytes(tensor: Any) -> int:
    """The bytes of a tensor, or of this rank's shard of it."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
