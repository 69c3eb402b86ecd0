"""What is recorded of a script's steps: seconds by part, and the bytes that live in one. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["whole", "forward", "gradients"]
MODES: tuple[Mode, ...] = ("whole", "forward", "gradients")
"""What a step is timed for: as a whole, or with a hook on every module, or with a hook on every gradient."""


@dataclass
class RecordedStep:
    """One synchronising step: seconds by part, summed over its micro-batches; those of ``reductions`` synchronised.

    In ``all_reductions`` of these FSDP added up shards over several replicas (0: there is one). In ``late_flags`` of
    them the script said whether to synchronise when DDP had already read it, in forward.

    ``step_s`` lasts from its first forward to the next step's. ``last_backward_s`` is the backward that synchronised.
    ``delayed_s``: the training thread could run and had no core (0 where that is not known).
    ``loss_s`` lies between forward and backward. ``recomputed_s`` are those of the last backward in which it computes
    forward again, for ``torch.utils.checkpoint``. ``module_s`` has the forward seconds from the start of one module to
    the start of the next, and ``ready_s`` the seconds from the start of that backward until the gradient of each
    parameter (by position) was final. ``own_collectives`` are those that the script asks for outside of backward:
    the bytes of each allreduce, and None for each other one.
    """

    mode: Mode | None
    start_s: float
    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    last_backward_s: float = 0.0
    loss_s: float = 0.0
    recomputed_s: float = 0.0
    update_s: float = 0.0
    input_s: float = 0.0
    delayed_s: float = 0.0
    micro_batches: int = 0
    reductions: tuple[int, ...] = (0,)
    all_reductions: int = 0
    late_flags: int = 0
    local_batch: int = 1
    own_collectives: tuple[int | None, ...] = ()
    module_s: dict[str, float] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepMemory:
    """What lives at most in a step beside parameters, gradients, optimizer state and DDP's buckets, in bytes.

    ``activation_bytes``: while a micro-batch goes forward and back, with its input; ``update_bytes``: in an update.
    ``saved_bytes`` is what autograd keeps until backward, by module. ``copied_bytes`` are copies of parameters in other
    types among them, as autocast makes them, which are no part of ``activation_bytes``: no batch makes them larger.
    ``again_bytes`` is what modules save only while backward computes their forward again, and ``without_bytes`` what
    ``activation_bytes`` would be if it did not. ``entered_bytes`` are those of the inputs of each block.
    """

    activation_bytes: int
    update_bytes: int
    saved_bytes: Mapping[str, int]
    copied_bytes: Mapping[str, int]
    gradients: Literal["kept", "released", "buckets", ""]
    again_bytes: Mapping[str, int] = field(default_factory=dict)
    without_bytes: int = 0
    entered_bytes: Mapping[str, int] = field(default_factory=dict)
