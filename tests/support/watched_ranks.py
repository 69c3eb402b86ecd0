"""Records of ranks as ``dpsim explain -- COMMAND`` reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from dpsim.model.observed import ObservedStep
from dpsim.torch.script.script_record import ReducedParameter
from dpsim.torch.script.watched import WatchedRank

LAYERS, SIZE, BACKWARD_S, LOSS_S, STEPS = 8, 1 << 20, 0.080, 0.002, 12


def a_rank(rank: int, *, late_s: float = 0.0, exposed_s: float = 0.040, **changes: Any) -> WatchedRank:
    """A rank that computes for 100 ms of each step, and more by ``late_s``; then all wait for the slowest."""
    steps, began_s = [], 5.0
    for _ in range(STEPS):
        computed_s, ended_s = began_s + 0.100 + late_s, began_s + 0.100 + exposed_s
        steps.append(
            ObservedStep(
                began_s=began_s,
                computed_s=computed_s,
                ended_s=max(ended_s, computed_s),
                forward_s=0.015,
                backward_s=BACKWARD_S,
                update_s=0.005,
                input_s=0.0,
            )
        )
        began_s = steps[-1].ended_s
    parameters = tuple(
        ReducedParameter(
            name=f"{number}.weight",
            module=str(number),
            shape=(SIZE,),
            dtype="float32",
            batch_norm_channels=0,
            size_bytes=4 * SIZE,
            device="cpu",
            sparse=False,
        )
        for number in range(LAYERS)
    )
    ready_s = [LOSS_S + BACKWARD_S * (LAYERS - number) / LAYERS for number in range(LAYERS)]
    record = WatchedRank(
        rank=rank,
        ranks=2,
        ranks_here=2,
        reason="",
        script="train.py",
        model="Sequential",
        torch="2.13.0",
        device="cpu",
        cores=64,
        threads=1,
        backend="gloo",
        steps=tuple(steps),
        last_backward_s=(BACKWARD_S,) * STEPS,
        loss_s=(LOSS_S,) * STEPS,
        ready_ns=(tuple(int(seconds * 1e9) for seconds in ready_s),) * STEPS,
        local_batch=16,
        accumulate=1,
        parameters=parameters,
        rebuilt=" ".join(str(number) for number in reversed(range(LAYERS))),
        initial_bucket_bytes=str(4 * SIZE * LAYERS),
        communication_hook="",
        bucket_cap_bytes=100 << 20,
        bucket_caps_bytes=(),
        find_unused_parameters=False,
        static_graph=False,
        joins=False,
        state_bytes=0,
        optimizer_slots=0,
        input_workers=0,
        own_s=0.001,
    )
    return msgspec.structs.replace(record, **changes)
