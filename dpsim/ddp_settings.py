"""``DdpSettings``: what a script told PyTorch's DistributedDataParallel (DDP) or FSDP, and the buckets that it made."""

from __future__ import annotations

import re
from typing import Literal

from dpsim.codec import Noun
from dpsim.dtypes import WireDtype
from dpsim.errors import ConfigError
from dpsim.units import format_size

GradientMemory = Literal["kept", "released", "buckets", ""]
"""Gradients have memory of their own all the time, or from backward to update, or are views of DDP's buckets."""
_DEFAULT_HOOK = "allreduce_hook"
"""PyTorch's hook that does what DDP does without one."""
FSDP_ON_GPUS = (
    "On processors FSDP waits for each gather and each reduce-scatter by gloo. This does not carry over to NCCL on"
    " GPUs, where both run in streams of their own, the next unit is gathered while one computes, and a reduce-scatter"
    " sends as many bytes as a gather."
)
"""What is said of every prediction of FSDP by gloo."""
CAP_FOR_THE_FIRST_BUCKET_TOO = (2, 4)
"""From this PyTorch on, a cap that the user sets holds for the first bucket too; before, it was 1 MiB all the same."""


class ShardedUnit(Noun, frozen=True):
    """What FSDP gathers at once: the parameters of a module (``name``) that ``fully_shard`` was called with.

    ``size_bytes`` is whole, without padding. ``reshard``: it is given up after forward, and gathered again in backward.
    ``reshard_after_backward``: it is given up after each backward, and not after that of the last micro-batch alone.
    """

    name: str
    size_bytes: int
    reshard: bool
    reshard_after_backward: bool = True


class DdpSettings(Noun, frozen=True):
    """How a script trained, as far as it decides communication.

    ``torch`` is PyTorch's version (empty: not known), ``devices`` the world size that the script was given,
    ``accumulate`` its micro-batches a step. ``deferred``: the last of them alone reduces gradients (``no_sync``), and
    not each; ``reduces`` has those that do where they are others (from 0). ``late_flag``: it set
    ``require_backward_grad_sync`` between forward and backward, where DDP does not read it. ``bucket_cap_bytes`` is
    ``bucket_cap_mb`` in bytes (``None``: not set) and ``bucket_caps_bytes`` is ``bucket_cap_mb_list``, one size for
    each bucket (empty: not set). ``communication_hook`` is the hook's name, empty without one. ``initial_bucket_bytes``
    are the buckets of the first step and ``bucket_bytes`` those of all others, in the order in which DDP sends them, as
    DDP itself reports them.
    ``sync_batch_norm``: batch norm takes its statistics from all ranks (``SyncBatchNorm``).
    ``whole_buckets``: the workload has a tensor for each of these buckets, as what is in them is not known.
    ``own_collectives`` are those that the script asks for itself in most steps, outside of backward, and
    ``own_allreduce_bytes`` the sizes of the allreduces and barriers among them: these have a price.
    ``sparse_gradient_bytes`` are those of parameters whose gradients are sparse, as if these were whole.
    ``sharded_optimizer``: the optimizer is a ``ZeroRedundancyOptimizer``.
    ``gradients``: when these have memory of their own beside DDP's buckets (empty: not known).
    ``joins``: the script trains within ``Join``, so that ranks may have uneven inputs.
    ``recomputes``: backward computes activations again (``torch.utils.checkpoint``).
    ``units``: the script calls ``fully_shard`` in place of DDP; each unit is a layer of the workload, in their order.
    ``replicas``: by a mesh of two dimensions, as many groups of neighbours have a copy of the parameters each (HSDP).
    ``all_reduce_deferred``: their shards are added up over them in the last micro-batch alone
    (``set_requires_all_reduce``), and not behind each reduce-scatter.
    ``frozen_bytes`` are those of parameters that units gather, and do not train.
    ``parameters_sha256`` is a digest of the names, shapes and types of what is trained, in their order, and
    ``optimizer`` the name of what trains it and of the arrays that it keeps (empty: not known).
    """

    torch: str
    devices: int
    accumulate: int = 1
    deferred: bool = True
    reduces: tuple[int, ...] = ()
    late_flag: bool = False
    bucket_cap_bytes: int | None = None
    bucket_caps_bytes: tuple[int, ...] = ()
    find_unused_parameters: bool = False
    static_graph: bool = False
    communication_hook: str = ""
    initial_bucket_bytes: tuple[int, ...] = ()
    bucket_bytes: tuple[int, ...] = ()
    whole_buckets: bool = False
    sync_batch_norm: bool = False
    units: tuple[ShardedUnit, ...] = ()
    own_collectives: int = 0
    own_allreduce_bytes: tuple[int, ...] = ()
    sparse_gradient_bytes: int = 0
    sharded_optimizer: bool = False
    gradients: GradientMemory = ""
    replicas: int = 1
    all_reduce_deferred: bool = False
    joins: bool = False
    frozen_bytes: int = 0
    recomputes: bool = False
    parameters_sha256: str = ""
    optimizer: str = ""

    def __post_init__(self) -> None:
        for key in ("devices", "accumulate", "replicas"):
            if getattr(self, key) < 1:
                raise ConfigError(f"ddp has {key} {getattr(self, key)}", allowed="1 or more")
        buckets = (*self.bucket_caps_bytes, *self.initial_bucket_bytes, *self.bucket_bytes)
        if any(not 0 <= each < self.accumulate for each in self.reduces):
            raise ConfigError(
                f"ddp reduces in {self.reduces}", allowed=f"micro-batches from 0 to {self.accumulate - 1}"
            )
        if min((0, self.bucket_cap_bytes or 0, *buckets, *self.own_allreduce_bytes)) < 0:
            raise ConfigError("ddp has a size below 0", allowed="sizes of 0 or more bytes")

    def reducing(self, accumulate: int) -> tuple[int, ...]:
        """Return which of so many micro-batches reduce gradients: the last one always, others as in the script."""
        if self.deferred:
            return (accumulate - 1,)
        others = self.reduces or range(self.accumulate)
        return tuple(each for each in range(accumulate) if each % self.accumulate in others or each == accumulate - 1)

    @property
    def bucket_rule(self) -> str:
        """The rule of the script's PyTorch; where its version is not known, that of the newest."""
        version = re.match(r"(\d+)\.(\d+)", self.torch)
        earlier = version is not None and tuple(map(int, version.groups())) < CAP_FOR_THE_FIRST_BUCKET_TOO
        return "ddp-2.3" if earlier else "ddp"

    @property
    def fusion_rule(self) -> str:
        """The rule that makes DDP's buckets of the workload's tensors, or the tensors that zero3 makes units of."""
        return "fsdp" if self.units else "per-tensor" if self.whole_buckets else self.bucket_rule

    @property
    def own_allreduces(self) -> str:
        """How many allreduces the script asks for itself, and of how many bytes, in words."""
        count, size = len(self.own_allreduce_bytes), format_size(sum(self.own_allreduce_bytes))
        return f"an allreduce ({size})" if count == 1 else f"{count} allreduces ({size} in all)"

    @property
    def wire_dtype(self) -> WireDtype | None:
        """What the communication hook sends gradients as; ``None``: as they are."""
        name = self.communication_hook.lower()
        return "bfloat16" if "bf16" in name else "float16" if "fp16" in name else None

    def unpriced(self, *, batch_norm: bool = False) -> tuple[str, ...]:
        """Sentences on what the script told DDP and no prediction contains; ``batch_norm``: its layers are known."""
        hook, sentences = self.communication_hook, []
        if hook and self.wire_dtype is None and hook != _DEFAULT_HOOK:
            sentences.append(
                f"the script's communication hook {hook} is not predicted: gradients are priced as a plain allreduce"
                " of all their bytes"
            )
        if self.late_flag:
            sentences.append(
                "the script sets require_backward_grad_sync, or enters no_sync(), between forward and backward: DDP has"
                " read it in forward, so that it is without effect in that backward"
            )
        if self.find_unused_parameters and not self.static_graph:
            sentences.append(
                "with find_unused_parameters DDP fills its buckets from the first layer on, which rule ddp does not"
            )
        if self.bucket_caps_bytes:
            sentences.append("bucket_cap_mb_list gives each bucket a size of its own, which rule ddp does not")
        if self.sync_batch_norm and not batch_norm:
            sentences.append("the script's SyncBatchNorm sends statistics of every batch norm, which are not predicted")
        if self.sparse_gradient_bytes:
            sentences.append(
                f"gradients of {format_size(self.sparse_gradient_bytes)} are sparse: DDP sends a batch's rows alone,"
                " and all rows are priced here, so that communication is predicted far too slow"
            )
        if self.frozen_bytes:
            sentences.append(
                f"units also gather {format_size(self.frozen_bytes)} of parameters that are not trained, which no"
                " prediction contains"
            )
        if self.joins:
            sentences.append(
                "the script trains within Join: steps in which a rank has no inputs left are not predicted, and each"
                " forward begins with an allreduce of 4 B"
            )
        if others := self.own_collectives - len(self.own_allreduce_bytes):
            what = "a collective" if others == 1 else f"{others} collectives"
            kind = ", such as those of clip_grad_norm_," if self.units else " other than allreduces,"
            sentences.append(f"the script asks for {what} of its own in each step{kind} which no prediction contains")
        return tuple(sentences)
