"""The rule of PyTorch's DistributedDataParallel (DDP): which gradients it sends together, in which order.

``ddp`` is the fusion rule, ``ddp_2_3`` and ``ddp_1_5`` are those of earlier versions; the other functions give the
bucket lists of a DDP model with parameters of several kinds.

DDP makes its first list at construction, from the order of the parameters. Unless ``find_unused_parameters`` is set,
that list has one bucket for each dtype and device, and after the first synchronising step DDP makes the list that it
keeps, in the order in which the gradients became ready.

Source: PyTorch ``reducer.cpp`` (compute_bucket_assignment_by_size, rebuild_buckets) and ``distributed.py``
(_ddp_init_helper).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dpsim.ddp_settings import CAP_FOR_THE_FIRST_BUCKET_TOO
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.lowering.fusion import GradientTensors, Ints, closed_at, from_first_layer

DDP_FIRST_BUCKET_BYTES = float(2**20)
DDP_DEFAULT_CAP_BYTES = FUSION_RULES.find("ddp").default_threshold_bytes or 0.0
FIRST_VERSION = (2, 0)

Buckets = tuple[tuple[int, ...], ...]
"""Buckets in the order in which DDP sends them; each holds positions in the list of parameters."""


def ddp(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Close a bucket once its size >= threshold, as ``tarantella``; by default a dtype's first one at 1 MiB.

    This is the list that PyTorch's DDP keeps (``final_buckets``), for tensors of one dtype, and for several where a
    bucket's tensors stand together. A threshold that is set holds for the first bucket too, as ``bucket_cap_mb`` does.
    """
    first = (DDP_FIRST_BUCKET_BYTES,) if tensors.default_threshold else ()
    return closed_at(tensors, *first, threshold_bytes)


def ddp_2_3(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Close as ``ddp`` of PyTorch 1.6 to 2.3: the first bucket of a dtype at 1 MiB, whatever threshold is set."""
    return closed_at(tensors, DDP_FIRST_BUCKET_BYTES, threshold_bytes)


def ddp_1_5(tensors: GradientTensors, threshold_bytes: float) -> Ints:
    """Close as ``ddp_2_3``, in the parameters' order: the bucket of 1 MiB is the first layers', sent last.

    So up to PyTorch 1.5, which kept the list made at construction; later ones do with ``find_unused_parameters``.
    """
    return from_first_layer(ddp_2_3, tensors, threshold_bytes)


@dataclass(frozen=True, kw_only=True)
class DdpParameter:
    """A parameter that DDP reduces: the bytes of its gradient, its dtype and device, whether its gradient is sparse.

    A parameter that several layers share counts once.
    """

    size_bytes: int
    dtype: str = "float32"
    device: str = "cpu"
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """The arguments of DDP that decide its buckets, and PyTorch's version.

    ``bucket_cap_bytes`` is ``bucket_cap_mb`` in bytes; ``None``: not set. DDP's default then is 25 MiB, after a first
    bucket of 1 MiB. ``bucket_caps_bytes`` is ``bucket_cap_mb_list`` in bytes (PyTorch 2.13), which goes before it and
    holds for the initial list too.
    """

    bucket_cap_bytes: float | None = None
    bucket_caps_bytes: tuple[float, ...] = ()
    find_unused_parameters: bool = False
    static_graph: bool = False
    torch_version: tuple[int, int] = (2, 13)

    def __post_init__(self) -> None:
        if self.torch_version < FIRST_VERSION:
            version = ".".join(map(str, self.torch_version))
            raise ConfigError(f"the buckets of PyTorch {version}", allowed="PyTorch 2.0 or newer")
        for cap in (self.bucket_cap_bytes or 0.0, *self.bucket_caps_bytes):
            if not cap >= 0:
                raise ConfigError(f"bucket cap is {cap}", allowed="0 or more bytes")

    @property
    def rebuilds(self) -> bool:
        """Whether DDP makes its list again in the order in which gradients become ready."""
        return self.static_graph or not self.find_unused_parameters

    @property
    def limits_bytes(self) -> tuple[float, ...]:
        """The size at which the first, second ... bucket of a dtype closes; the last one holds for all that follow."""
        if self.bucket_caps_bytes:
            return self.bucket_caps_bytes
        cap = DDP_DEFAULT_CAP_BYTES if self.bucket_cap_bytes is None else self.bucket_cap_bytes
        if self.bucket_cap_bytes is None or self.torch_version < CAP_FOR_THE_FIRST_BUCKET_TOO:
            return (DDP_FIRST_BUCKET_BYTES, cap)
        return (cap,)


def initial_buckets(parameters: Sequence[DdpParameter], options: DdpOptions) -> Buckets:
    """Return the list that DDP makes at construction, from the parameters in the order of ``module.parameters()``."""
    one_limit = options.rebuilds and not options.bucket_caps_bytes
    limits = (math.inf,) if one_limit else options.limits_bytes
    assigned = _assign(parameters, range(len(parameters)), limits)
    return tuple(sorted(assigned, key=min, reverse=True))


def final_buckets(parameters: Sequence[DdpParameter], ready_order: Sequence[int], options: DdpOptions) -> Buckets:
    """Return the list that DDP keeps, where gradients became ready in ``ready_order`` (positions in ``parameters``).

    It is the initial list where DDP does not rebuild. Parameters that got no gradient may be left out of
    ``ready_order`` under ``static_graph``, where they come last. Raises ``ConfigError``.
    """
    unused = sorted(set(range(len(parameters))) - set(ready_order))
    if len(ready_order) + len(unused) != len(parameters):
        raise ConfigError(f"ready_order is {list(ready_order)}", allowed="each position in parameters at most once")
    if not options.rebuilds:
        return initial_buckets(parameters, options)
    if unused and not options.static_graph:
        raise ConfigError(
            f"parameters {unused} get no gradient",
            allowed="a gradient for every parameter, or find_unused_parameters, or static_graph",
            remedy="DDP itself fails in its second step with such a model: set find_unused_parameters=True there",
        )
    return _assign(parameters, [*ready_order, *unused], options.limits_bytes)


def _assign(parameters: Sequence[DdpParameter], order: Iterable[int], limits_bytes: tuple[float, ...]) -> Buckets:
    """Return buckets of one dtype and device that close once their size >= their limit; those that never do come last.

    PyTorch collects the last ones from a hash map, which lists them by last first appearance of dtype and device.
    """
    ended: dict[int, tuple[int, ...]] = {}
    growing: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for position, index in enumerate(order):
        parameter = parameters[index]
        if parameter.sparse:
            ended[position] = (index,)
        else:
            growing.setdefault((parameter.dtype, parameter.device), []).append((position, index))
    rests: list[tuple[int, ...]] = []
    for members in growing.values():
        sizes = np.array([parameters[index].size_bytes for _, index in members], np.int64)
        tensors = GradientTensors(size_bytes=sizes, dtype_code=np.zeros_like(sizes))
        for level, (start, stop) in enumerate(itertools.pairwise(closed_at(tensors, *limits_bytes).tolist())):
            bucket = tuple(index for _, index in members[start:stop])
            if sizes[start:stop].sum() >= limits_bytes[min(level, len(limits_bytes) - 1)]:
                ended[members[stop - 1][0]] = bucket
            else:
                rests.append(bucket)
    return (*(ended[position] for position in sorted(ended)), *reversed(rests))
