"""The versions for NVIDIA GPUs. Importing this loads no CUDA: versions do when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A prepared allreduce of device arrays: a call compiles, converts and allocates nothing.

    Each of ``stages`` takes the stream to run on. Between two stages every rank must have finished the one before; how
    (a host barrier after synchronising the stream) is the caller's business. One stage: the kernel synchronises itself.
    """

    stages: tuple[Callable[[Any], None], ...]
