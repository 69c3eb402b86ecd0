"""FSDP's collectives as a rank waits for them on a processor, and a sharded model as a watched job has it.

Loads nothing but the standard library and the process's PyTorch, for it is in the processes of watched jobs as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from time import perf_counter as now
from typing import Any

from torch import distributed

_NAMES = {
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "allreduce": ("all_reduce",),
}
"""The collectives that FSDP calls, by their names since PyTorch 2.13, and before. Others' allreduces do not count."""
_WHOLE = {"all-gather": (0, "output_tensor"), "reduce-scatter": (1, "input"), "allreduce": (0, "tensor")}
"""The argument of each that is whole, by its place and its name."""
_CALLER = "_fsdp_collectives"
"""The module of PyTorch that calls FSDP's allreduces."""


def _replace(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))


class WaitedCollectives:
    """When this rank's calls of FSDP's collectives began and ended, by their kind, and their sizes in bytes.

    ``wrap`` puts a function around one of a module. With a ``core`` (``around.CoreTime``) the time that this thread was
    ready and had no core is counted within them.
    """

    def __init__(self, wrap: Callable[[Any, str, Callable[..., Any]], None] = _replace, core: Any = None) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _NAMES}
        self.size_bytes: dict[str, list[int]] = {kind: [] for kind in _NAMES}
        self._core = core
        self._all_s = self._all_without_core_s = 0.0
        for kind, names in _NAMES.items():
            name = next(name for name in names if hasattr(distributed, name))
            wrap(distributed, name, functools.partial(self._called, kind))

    def _called(self, kind: str, original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        if kind == "allreduce" and not _by_fsdp():
            return original(*arguments, **keywords)
        without_core_s = self._core.waited_s() if self._core else 0.0
        begun_s = now()
        work = original(*arguments, **keywords)
        ended_s = now()
        self.spans[kind].append((begun_s, ended_s))
        self._all_s += ended_s - begun_s
        if self._core:
            self._all_without_core_s += self._core.waited_s() - without_core_s
            place, name = _WHOLE[kind]
            whole = keywords.get(name, *arguments[place : place + 1])
            self.size_bytes[kind].append(0 if whole is None else whole.numel() * whole.element_size())
        return work

    def own(self, moment: tuple[float, float]) -> tuple[float, float]:
        """Return the seconds of a clock that stands still within the collectives, and those without a core likewise."""
        return moment[0] - self._all_s, moment[1] - self._all_without_core_s

    def of_step(self) -> dict[str, list[float]]:
        """Return the seconds of each gather and reduce-scatter since ``forget``, as an ``ObservedStep`` has them."""
        names = {"gather_s": "all-gather", "reduce_scatter_s": "reduce-scatter"}
        return {name: [ended_s - begun_s for begun_s, ended_s in self.spans[kind]] for name, kind in names.items()}

    def of_rank(self) -> dict[str, list[int]]:
        """Return the sizes of the collectives since ``forget``, as an ``ObservedRank`` has them."""
        return {
            "gather_bytes": list(self.size_bytes["all-gather"]),
            "reduce_scatter_bytes": list(self.size_bytes["reduce-scatter"]),
        }

    def taken_s(self) -> float:
        """Seconds in the collectives since this was last asked for, or since ``forget``."""
        seconds = sum(ended_s - begun_s for spans in self.spans.values() for begun_s, ended_s in spans)
        self.forget()
        return seconds

    def forget(self) -> None:
        """Begin anew."""
        for kind in _NAMES:
            self.spans[kind].clear()
            self.size_bytes[kind].clear()


def _by_fsdp() -> bool:
    """Whether FSDP has called what is put around a collective."""
    frame: Any = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).endswith((".around", ".waited")):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).endswith(_CALLER)


class ShardedRoot:
    """A model whose root was given to ``fully_shard``, once FSDP knows its units, with what is asked of a DDP model."""

    static_graph = False
    reads_flag_in_backward = True

    def __init__(self, state: Any) -> None:
        (self.module,) = state._modules
        self.groups = [group for each in state._state_ctx.all_states for group in groups_of(each)]
        self.device_type = state._device.type
        mesh = self.groups[0].mesh_info
        self.process_group, self.is_replicated = mesh.shard_process_group, hasattr(mesh, "replicate_process_group")
        self.logged = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}

    def modules(self) -> Any:
        return self.module.modules()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward reduces gradients (``set_requires_gradient_sync``)."""
        return all(group.reduce_grads for group in self.groups)

    def unit_bytes(self, group: Any) -> int:
        """Return the bytes of a unit's gradients, as they are reduced."""
        shards = [each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
        policy = group.mp_policy
        dtypes = [policy.reduce_dtype or policy.param_dtype or each.dtype for each in shards]
        return sum(each.numel() * dtype.itemsize for each, dtype in zip(shards, dtypes))


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters that FSDP's state of a module has: several since PyTorch 2.13."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [each for each in [state._fsdp_param_group] if each is not None]
