"""Where a training runs: on the CPU, or on GPUs, in whose memory CUDA kernels reduce the gradients."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, get_args

from dpsim.algorithms import NCCL
from dpsim.errors import ConfigError, unknown
from dpsim.wire_dtype import SIXTEEN_BITS

if TYPE_CHECKING:
    from dpsim.machine import Network

Backend = Literal["cpu", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)

CUDA_VERSIONS = {
    "auto": "two-shot",
    "one-shot": "one-shot",
    "two-shot": "two-shot",
    "direct": "two-shot",
    "ring": "ring",
    "halving-doubling": "halving-doubling",
}
"""The algorithms of a plan that the CUDA kernels have, and by which version (``dpsim.kernels.allreduce``).

``auto`` is two-shot but for small arrays between GPUs that reach each other's memory (``dpsim.comm.cuda.peer_memory``).
Between GPUs that do not reach each other's memory there is one, whatever the name: that of ``dpsim.comm.cuda.staged``.
"""

SIXTEEN_BIT_VERSION = "two-shot"
"""The version that sends gradients as 16 bits."""

LAYERS_VARIABLE = "DPSIM_GPU_LAYERS"
"""With ``cupy`` in it the layers of a network are computed on GPUs by CuPy alone, without kernels of this project."""


def layers_by_kernels() -> bool:
    """Return whether kernels of this project compute layers on GPUs. Raises ``ConfigError`` for an unknown value."""
    value = os.environ.get(LAYERS_VARIABLE, "")
    if value not in ("", "cupy"):
        raise ConfigError(
            f"{LAYERS_VARIABLE}={value}",
            allowed="cupy; without the variable, kernels of dpsim compute convolutions and batch norms on GPUs",
            remedy=f"{LAYERS_VARIABLE}=cupy, or unset {LAYERS_VARIABLE}",
        )
    return not value


def check_backend(
    backend: str,
    algorithm: str,
    network: Network,
    leaves: int = 0,
    strategy: str = "data-parallel",
    wire_dtype: str | None = None,
) -> None:
    """Refuse what a backend cannot do. Raises ``ConfigError``."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "cpu":
        return
    layers_by_kernels()
    if network.emulated:
        raise ConfigError(
            f"backend 'cuda' on {network.token}: its kernels use the memory of GPUs, not an emulated network",
            allowed="--network node",
            remedy="leave --network out, or use --backend cpu",
        )
    if strategy != "data-parallel":
        raise ConfigError(
            f"strategy {strategy} on backend 'cuda', whose kernels add up whole gradients",
            allowed="strategy data-parallel on it",
            remedy="leave --strategy out, or use --backend cpu",
        )
    if algorithm == NCCL and leaves:
        raise ConfigError(
            "algorithm nccl with leaves: NCCL adds in an order that changes with the number of GPUs",
            allowed=f"{', '.join(CUDA_VERSIONS)} in reproducible training",
            remedy="leave --algorithm out: between machines NCCL then moves gradients, and dpsim's kernel adds them",
        )
    if algorithm == NCCL and wire_dtype in SIXTEEN_BITS:
        raise ConfigError(
            f"algorithm nccl with wire dtype {wire_dtype}: NCCL would add in 16 bits",
            allowed=f"{', '.join(CUDA_VERSIONS)} with 16 bits, which add in float32",
            remedy="leave --algorithm out",
        )
    if algorithm not in (*CUDA_VERSIONS, NCCL):
        raise ConfigError(
            f"algorithm {algorithm!r} has no CUDA kernel",
            allowed=", ".join((*CUDA_VERSIONS, NCCL)),
            remedy="choose one of them with --algorithm (auto is the usual one), or use --backend cpu",
        )
    if wire_dtype in SIXTEEN_BITS and CUDA_VERSIONS[algorithm] != SIXTEEN_BIT_VERSION:
        raise ConfigError(
            f"algorithm {algorithm!r} with wire dtype {wire_dtype} on backend 'cuda': its kernel sends no 16 bits",
            allowed=", ".join(name for name, version in CUDA_VERSIONS.items() if version == SIXTEEN_BIT_VERSION),
            remedy="leave --algorithm out, or use --backend cpu",
        )
