"""PyTorch's ``fully_shard`` (FSDP): what is recorded and timed of a model that it has sharded. Loads torch.

On processors FSDP waits for each of its collectives: a unit is gathered as its forward begins, and where it is given up
after forward once more in backward; its gradients are reduce-scattered as its backward ends, and in a mesh of two
dimensions (HSDP) its shards are then allreduced over the replicas. Nothing runs beside them.
Source: PyTorch 2.13, ``torch/distributed/fsdp/_fully_shard``, where streams and events do nothing on a processor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter as now
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.endings import Refused
from dpsim.torch.script.probe.process_group import CLOCK, replace_everywhere

_UPDATES = 3


class Unit(NamedTuple):
    """A ``dpsim.ddp_settings.ShardedUnit``."""

    name: str
    size_bytes: int
    reshard: bool
    reshard_after_backward: bool


class ShardOf(NamedTuple):
    """A parameter that is trained: its name, its unit, this rank's shard, and what it is gathered and reduced as."""

    name: str
    unit: str
    shard: Any
    gathered: Any
    reduced: Any

    def size_bytes(self, dtype: Any = None) -> int:
        """The bytes of the whole parameter, in a type other than its own."""
        return int(self.shard.numel() * (dtype or self.shard.dtype).itemsize)


class ShardedModel:
    """A model whose root was given to ``fully_shard``, with what is asked of a DDP model, and its units.

    It is made before the first forward, when the module has its shards as parameters.
    """

    static_graph = False
    reads_flag_in_backward = True

    def __init__(self, root: Any) -> None:
        self.module = root
        state = root._get_fsdp_state()
        if not hasattr(state, "_fsdp_param_groups"):
            raise Refused(
                ConfigError(
                    f"the script uses fully_shard of PyTorch {torch.__version__}",
                    allowed="that of PyTorch 2.13, whose units dpsim can read",
                    remedy="install PyTorch 2.13 or newer",
                )
            )
        self.device_type = state._device.type
        give_up(root)
        names = {id(parameter): name for name, parameter in root.named_parameters(remove_duplicate=False)}
        self.groups: dict[str, list[Any]] = {}
        self.parameters: list[ShardOf] = []
        units = _units(root)
        self.calls = len(units)
        """How often ``fully_shard`` was called."""
        for unit, module in units:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                self.groups.setdefault(unit, []).append(group)
                shards = [each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
                self.parameters += [ShardOf(names[id(each)], unit, each, *_sent_as(each, group)) for each in shards]
        self.replicas = self._replicas()
        self.called: dict[str, None] = {}
        """The units in the order in which their forwards began."""
        self._whole: list[set[str]] = [set(), set()]
        """The units that the last two backwards left whole."""

    def _replicas(self) -> int:
        """The groups of ranks that have a copy of the parameters each. Raises ``Refused`` where units differ in it."""
        every = (group for groups in self.groups.values() for group in groups)
        sizes = {getattr(group.mesh_info, "replicate_mesh_size", 1) for group in every}
        if len(sizes) > 1:
            words = "fully_shard with meshes of two dimensions for some of its units"
            raise Refused(_not_done(words, "the same mesh for all units"))
        return int(sizes.pop())

    @property
    def adds_up_replicas(self) -> bool:
        """Whether the next backward that reduces adds up shards over several replicas (``set_requires_all_reduce``)."""
        every = (group for groups in self.groups.values() for group in groups)
        return self.replicas > 1 and all(group.all_reduce_grads for group in every)

    def check_added_up(self) -> None:
        """Raises ``Refused`` for an update of shards that are not added up over the replicas: it has no gradients."""
        if self._partial_sums():
            raise Refused(
                ConfigError(
                    "the script updates after a backward() whose shards are not added up over the replicas, by"
                    " set_requires_all_reduce(False): the update has no gradients",
                    allowed="set_requires_all_reduce(True) before the last backward of a step",
                    remedy="call model.set_requires_all_reduce(last)",
                )
            )

    def _partial_sums(self) -> list[Any]:
        """The shards that are still to be added up over the replicas."""
        every = (group for groups in self.groups.values() for group in groups)
        sums = [getattr(group, "_partial_reduce_output", None) for group in every]
        return [each for each in sums if each is not None]

    def modules(self) -> Any:
        return self.module.modules()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward reduces gradients (``set_requires_gradient_sync``)."""
        return all(group.reduce_grads for groups in self.groups.values() for group in groups)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, reduces: bool) -> None:
        self.module.set_requires_gradient_sync(reduces)

    def note_backward(self) -> None:
        """Note that the backward of a micro-batch has ended, and which units it left whole."""
        whole = {name for name, groups in self.groups.items() if not all(g.reshard_after_backward for g in groups)}
        self._whole = [self._whole[1], whole]

    def check_resharded(self) -> None:
        """Raises ``Refused`` for an update of shards whose units stay whole: the next forward would not see it."""
        if self._whole[1]:
            raise Refused(
                ConfigError(
                    f"the script updates while {len(self._whole[1])} units stay whole, by"
                    " set_reshard_after_backward(False): the next forward computes with the parameters before it",
                    allowed="set_reshard_after_backward(True) before the last backward of a step",
                    remedy="call model.set_reshard_after_backward(last), as set_requires_gradient_sync(last)",
                )
            )

    def whole_gradient_bytes(self) -> int:
        """The bytes of the whole gradients that backwards without synchronisation have added up.

        Sums of shards that are still to be added up over replicas are among them.
        """
        grads = self._partial_sums()
        for group in (group for groups in self.groups.values() for group in groups):
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                grads += [each.unsharded_accumulated_grad, getattr(whole, "grad", None)]
        return sum(grad.numel() * grad.element_size() for grad in grads if grad is not None)

    def began(self, module: Any) -> None:
        """Note that the forward of a unit has begun."""
        name = next((name for name, each in _units(self.module) if each is module), None)
        if name in self.groups:
            self.called.setdefault(name)

    def pause(self, seconds: float) -> None:
        """Let this rank of a ``ReplicatedGroup`` sleep so long for all parameters: in a collective as its bytes are."""
        whole_bytes = sum(each.size_bytes(each.reduced) for each in self.parameters)
        for groups in self.groups.values():
            for group in groups:
                group.mesh_info.shard_process_group.pause_s_per_byte = seconds / whole_bytes

    @property
    def holds_gradients(self) -> bool:
        """Whether backwards have left gradients that are not cleared."""
        return bool(self.whole_gradient_bytes()) or any(each.shard.grad is not None for each in self.parameters)

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """The sizes of the units' gradients as they are reduced, in the order in which backward does that."""
        return tuple(
            sum(each.size_bytes(each.reduced) for each in self.parameters if each.unit == unit.name)
            for unit in reversed(self.units)
        )

    @property
    def gathered_bytes(self) -> int:
        """What is gathered at once: what stays until backward, and the largest other unit."""
        kept, largest = 0, 0
        for unit in self.units:
            size = sum(each.size_bytes(each.gathered) for each in self.parameters if each.unit == unit.name)
            kept, largest = (kept, max(largest, size)) if unit.reshard else (kept + size, largest)
        return kept + largest

    @property
    def frozen_bytes(self) -> int:
        """The bytes of parameters that are gathered, and not trained."""
        groups = (group for groups in self.groups.values() for group in groups)
        frozen = [each.sharded_param for group in groups for each in group.fsdp_params]
        return sum(each.numel() * each.element_size() for each in frozen if not each.requires_grad)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with parameters that are trained, in the order of their forwards. Raises ``ConfigError``."""
        sizes: dict[str, int] = {}
        for each in self.parameters:
            sizes[each.unit] = sizes.get(each.unit, 0) + each.size_bytes()
        units = []
        for name in self.called:
            for group in self.groups[name]:
                _check_group(name, group)
            again = any(group._reshard_after_forward and group.unshard_in_backward for group in self.groups[name])
            if name in sizes:
                units.append(Unit(name, sizes[name], again, name not in self._whole[0]))
        return tuple(units)


def _sent_as(parameter: Any, group: Any) -> tuple[Any, Any]:
    """The types as which FSDP gathers a parameter and reduces its gradient.

    Source: PyTorch 2.13, ``FSDPParam.init_dtype_attrs``: what a policy leaves out is as the one before it.
    """
    gathered = group.mp_policy.param_dtype or parameter.dtype
    return gathered, group.mp_policy.reduce_dtype or gathered


def give_up(root: Any) -> None:
    """Let all units keep but their shards, also where the script has gathered them before forward."""
    for _, module in _units(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group.wait_for_unshard()
            group.reshard()


def _units(root: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in root.named_modules() if isinstance(module, fsdp.FSDPModule)]


def _check_group(unit: str, group: Any) -> None:
    """Raises ``ConfigError`` for what a script set after ``fully_shard``, and no prediction contains."""
    for name, is_set in (
        ("set_all_reduce_hook", group._all_reduce_hook is not None),
        ("an unshard that is not waited for", group.unshard_async_op),
    ):
        if is_set:
            raise _not_done(f"{name} of the unit {unit or 'of the root'}", "units as fully_shard makes them")


class Forwards:
    """Calls ``around`` in place of the forward of a root, and notes the units that are called in it.

    It gets that forward, which takes the model first, the model and the arguments. A unit that backward calls again, to
    compute its activations anew, is no forward of the model.
    """

    def __init__(self, around: Callable[..., Any]) -> None:
        self._around = around
        self._models: dict[Any, ShardedModel] = {}
        self._current: ShardedModel | None = None

    def call(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a module that ``fully_shard`` was given."""
        original: Any = super(fsdp.FSDPModule, module).__call__  # type: ignore[misc]
        if self._current is not None:
            self._current.began(module)
            return original(*arguments, **keywords)
        if module._get_fsdp_state()._is_root is False:
            return original(*arguments, **keywords)
        if module not in self._models:
            self._models[module] = ShardedModel(module)

        def forward(model: ShardedModel, /, *arguments: Any, **keywords: Any) -> Any:
            self._current = model
            model.began(module)
            try:
                return original(*arguments, **keywords)
            finally:
                self._current = None

        forwards = functools.reduce(lambda inner, each: functools.partial(each, inner), _INSIDE, forward)
        return self._around(forwards, self._models[module], *arguments, **keywords)


_INSIDE: list[Callable[..., Any]] = []
"""What is called in place of a root's forward within what ``watch`` calls for it."""


def call_inside(around: Callable[..., Any]) -> None:
    """Call ``around`` within what ``watch`` calls in place of the forward of every root."""
    _INSIDE.append(around)


def watch(around: Callable[..., Any], *, replicas: int = 0, done: str = "predicted") -> None:
    """Call ``around`` in place of the forward of every root, and refuse arguments with which FSDP is not ``done``.

    With ``replicas`` a script that wraps its model in DistributedDataParallel shards it instead, in so many copies.
    """
    forwards, shard = Forwards(around), fsdp.fully_shard
    parameters = inspect.signature(shard)

    @functools.wraps(shard)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        _check_arguments(parameters.bind(*arguments, **keywords).arguments, done)
        return shard(*arguments, **keywords)

    def call(module: Any, *arguments: Any, **keywords: Any) -> Any:
        return forwards.call(module, arguments, keywords)

    fsdp.FSDPModule.__call__ = call
    replace_everywhere(shard, checked)
    replace_everywhere(foreach_all_gather, _gather)
    fsdp.FullyShardedDataParallel.__init__ = _refuse_first_version
    if replicas:
        ShardedInstead.replicas = replicas
        make = Optimizer.__init__

        @functools.wraps(make)
        def made(self: Any, *arguments: Any, **keywords: Any) -> None:
            make(self, *arguments, **keywords)
            _OPTIMIZERS.append(self)

        Optimizer.__init__ = made
        replace_everywhere(DistributedDataParallel, ShardedInstead)


def join_units(calls: int, least_bytes: float) -> None:
    """Let ``fully_shard`` leave modules with fewer bytes to the unit of the root, the last of so many calls.

    That unit is given up after forward as the first of them would be, so that nothing changes but their number.
    """
    shard, number = fsdp.fully_shard, 0
    parameters = inspect.signature(shard)
    left: list[Any] = []

    @functools.wraps(shard)
    def joined(*arguments: Any, **keywords: Any) -> Any:
        nonlocal number
        number += 1
        bound = parameters.bind(*arguments, **keywords)
        given = bound.arguments
        own = [each for each in given["module"].parameters() if not isinstance(each, DTensor)]
        if number < calls and sum(each.numel() * each.element_size() for each in own) < least_bytes:
            left.append(given.get("reshard_after_forward"))
            return given["module"]
        if number == calls and left and given.get("reshard_after_forward") is None:
            given["reshard_after_forward"] = left[0] is not False
        return shard(*bound.args, **bound.kwargs)

    replace_everywhere(shard, joined)


@functools.wraps(foreach_all_gather)
def _gather(*arguments: Any, **keywords: Any) -> Any:
    """Gather a unit, which is none of the collectives that the script asks for itself."""
    before = len(CLOCK.collectives)
    gathered = foreach_all_gather(*arguments, **keywords)
    del CLOCK.collectives[before:]
    return gathered


class ShardedInstead(nn.Module):
    """What takes the place of DistributedDataParallel in a script: it shards the module, a unit for each block.

    Blocks are the members of the outermost ``Sequential`` and ``ModuleList``, or the module's children where it has
    none. As DDP does, it lets all ranks begin with rank 0's parameters and buffers.
    """

    replicas = 1

    def __init__(self, module: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        for tensor in (*module.parameters(), *module.buffers()):
            distributed.broadcast(tensor.detach(), src=0)
        whole = dict(module.named_parameters())
        mesh, ranks = None, distributed.get_world_size()
        if 1 < self.replicas < ranks:
            shape = self.replicas, ranks // self.replicas
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for block in blocks_of(module):
            fsdp.fully_shard(block, mesh=mesh)
        self.module = fsdp.fully_shard(module, mesh=mesh)
        _give_shards({whole[name]: shard for name, shard in self.module.named_parameters() if name in whole})

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Say to ``torch.compile`` that no graph is to be cut at DDP's buckets."""

    def join_hook(self, **_: Any) -> Any:
        raise Refused(_not_done("Join, and FSDP in place of DDP", "as many batches on each rank"))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within it add to the gradients of this rank alone."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


_OPTIMIZERS: list[Any] = []
"""Those that a script has built, where what it wraps in DDP is sharded instead."""


def _give_shards(shards: dict[Any, Any]) -> None:
    """Let the optimizers that were built before the model was wrapped have its shards, as with DDP they are the same.

    One that has a state of the whole parameters already is left alone, and refused as it steps.
    """
    for optimizer in _OPTIMIZERS:
        if any(optimizer.state.get(whole) for whole in shards):
            continue
        for group in optimizer.param_groups:
            group["params"] = [shards.get(each, each) for each in group["params"]]


def blocks_of(module: Any) -> list[Any]:
    """The blocks of a model, each with parameters that are trained, which are sharded as units of their own."""
    children = list(module.children())
    if not isinstance(module, (nn.Sequential, nn.ModuleList)):
        lists = [each for each in children if isinstance(each, (nn.Sequential, nn.ModuleList))]
        children = [member for each in lists for member in each] or children
    return [each for each in children if any(parameter.requires_grad for parameter in each.parameters())]


def plain_update_s(optimizer: Any) -> float | None:
    """Seconds that an optimizer of PyTorch takes for this rank's shards as plain tensors; None for another one.

    What it takes longer for shards, whose every operation is dispatched by ``DTensor``, does not grow with their size.
    """
    if optimizer is None or not type(optimizer).__module__.startswith("torch.optim"):
        return None
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        return None
    groups = []
    for group in optimizer.param_groups:
        plain = [
            nn.Parameter(each.detach().to_local().clone()) for each in group["params"] if isinstance(each, DTensor)
        ]
        for each in plain:
            each.grad = torch.ones_like(each)
        groups.append(group | {"params": plain})
    copy = type(optimizer)(groups)
    times = []
    for _ in range(_UPDATES):
        began_s = now()
        copy.step()
        times.append(now() - began_s)
    return min(times)


def check_optimizer(optimizer: Any) -> None:
    """Raises ``Refused`` for an optimizer that has none of the shards: it was built before the model was sharded."""
    if not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        raise Refused(
            ConfigError(
                "the script builds its optimizer before fully_shard, of parameters that are no longer the model's",
                allowed="an optimizer of the parameters that the sharded model has",
                remedy="build the optimizer behind fully_shard, or behind DistributedDataParallel",
            )
        )


def _check_arguments(given: dict[str, Any], done: str) -> None:
    """Raises ``Refused`` for arguments of ``fully_shard`` with which a script is not predicted, or not compared."""
    mesh, reshard = (given.get(name) for name in ("mesh", "reshard_after_forward"))
    for words, is_given, allowed in (
        ("a list of modules", isinstance(given["module"], (list, tuple)), "a module a call"),
        (
            "offload_policy, which offloads to the host",
            isinstance(given.get("offload_policy"), fsdp.CPUOffloadPolicy),
            "parameters that stay on the device",
        ),
        (
            "a mesh of several dimensions (HSDP)",
            mesh is not None and mesh.ndim > (1 if done == "compared" else 2),
            "a mesh of one dimension" + (", or of two: replicas and shards" if done != "compared" else ""),
        ),
        (
            "a mesh of some of the ranks, or of them in another order",
            mesh is not None and mesh.mesh.flatten().tolist() != list(range(distributed.get_world_size())),
            "a mesh of all ranks in their order: neighbours share a copy of the parameters",
        ),
        (
            "a mesh of replicas of one rank each",
            mesh is not None and mesh.ndim == 2 and mesh.size(1) == 1 < mesh.size(0),
            "two ranks or more for each copy of the parameters, or DistributedDataParallel",
        ),
        (
            f"reshard_after_forward={reshard}, a number of ranks",
            isinstance(reshard, int) and not isinstance(reshard, bool),
            "reshard_after_forward True, False or None",
        ),
        ("shard_placement_fn", given.get("shard_placement_fn") is not None, "parameters cut along their first extent"),
        ("dp_mesh_dims", given.get("dp_mesh_dims") is not None, "a mesh of one dimension"),
    ):
        if is_given:
            raise Refused(_not_done(f"fully_shard with {words}", allowed, done))


def _not_done(given: str, allowed: str, done: str = "predicted") -> ConfigError:
    rest = "compare" if done == "compared" else "measure"
    return ConfigError(
        f"the script uses {given}, which is not {done}", allowed=allowed, remedy=f"leave it out to {rest} the rest"
    )


def _refuse_first_version(*_: Any, **__: Any) -> None:
    raise Refused(
        ConfigError(
            "the script uses FullyShardedDataParallel, PyTorch's first FSDP",
            allowed="a script that trains with DistributedDataParallel or with fully_shard",
            remedy="call torch.distributed.fsdp.fully_shard on the modules that it wraps, and then on the model",
        )
    )


def check_gradients() -> None:
    """Raises ``ConfigError`` unless a step's gradients by ``fully_shard`` are those of DDP, on the calling ranks."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    plain, sharded = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    fsdp.fully_shard(sharded[0])
    fsdp.fully_shard(sharded)
    samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(1 + rank))
    for model in (DistributedDataParallel(plain), sharded):
        model(samples).square().sum().backward()
    for parameter, shard in zip(plain.parameters(), sharded.parameters()):
        whole = shard.grad.full_tensor()
        if not torch.allclose(whole, parameter.grad, rtol=1e-4, atol=1e-5):
            ratio = float((whole * parameter.grad).sum() / parameter.grad.square().sum())
            raise ConfigError(
                f"fully_shard of PyTorch {torch.__version__} over gloo gives {ratio:.3g} times DDP's gradients on"
                f" {ranks} ranks",
                allowed="a PyTorch with which both train alike, such as 2.13",
                remedy="install another version of PyTorch",
            )
