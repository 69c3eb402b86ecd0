"""``Runtime``: who trains a setting: dpsim, or PyTorch's DistributedDataParallel (DDP), and how DDP communicates."""

from __future__ import annotations

from typing import Literal, get_args

from dpsim.errors import ConfigError
from dpsim.machine import NODE
from dpsim.plan import Plan

Runtime = Literal["dpsim", "torch-ddp-gloo", "torch-ddp-mpi", "torch-ddp-nccl"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
"""``torch-ddp-gloo`` is DDP with gloo's own allreduces, ``torch-ddp-mpi`` DDP with a communication hook that reduces
each bucket over dpsim's MPI transports, ``torch-ddp-nccl`` DDP with NCCL's allreduces, on one GPU a rank."""
LIBRARIES: dict[Runtime, str] = {"torch-ddp-gloo": "gloo", "torch-ddp-nccl": "nccl"}
"""The runtimes that communicate by a library of their own, and the algorithm that stands for it."""
DDP_OVERLAPS: dict[Runtime, tuple[str, ...]] = {
    "torch-ddp-gloo": ("thread",),
    "torch-ddp-mpi": ("inline", "thread"),
    "torch-ddp-nccl": ("thread",),
}
"""When DDP communicates: gloo has threads of its own and NCCL a stream; a hook waits, or has a thread do it."""


def check_runtime(runtime: Runtime, plan: Plan, network: str, compute: str) -> None:
    """Refuse what PyTorch's DDP does not do, or not in this way. Raises ``ConfigError``."""
    if runtime == "dpsim":
        return
    allowed: list[tuple[str, object, tuple[object, ...]]] = [
        ("fusion_rule", plan.fusion_rule, ("ddp",)),
        ("overlap", plan.overlap, DDP_OVERLAPS[runtime] if plan.devices > 1 else (*DDP_OVERLAPS[runtime], "off")),
        ("strategy", plan.strategy, ("data-parallel",)),
        ("leaves", plan.leaves, (0,)),
        ("layout", plan.layout, ("",)),
        ("wire_dtype", plan.wire_dtype, (None,)),
        ("compute_dtype", plan.compute_dtype, ("float32",)),
        ("compute", compute, ("real",)),
    ]
    if runtime in LIBRARIES:
        allowed += [("network", network, (NODE,)), ("algorithm", plan.algorithm, (LIBRARIES[runtime],))]
    elif network == NODE:
        allowed += [("algorithm", plan.algorithm, ("mpi",))]
    for name, value, values in allowed:
        if value not in values:
            raise ConfigError(
                f"{name} is {value} with the runtime {runtime}",
                allowed=", ".join("none" if each in (None, "") else str(each) for each in values),
                remedy=f"choose one of these for {name}, or another runtime",
            )
