"""What the rows of a script's profile describe: its workload. Loads no torch."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from dpsim.study.profile import BACKWARD_S, FORWARD_S, OVERHEAD_S, STEP_S, TICK_S, UPDATE_S, ProfileConfig
from dpsim.study.rows import ProfiledBatch, Rows
from dpsim.study.scatter import median_error
from dpsim.torch_ddp.tables import joined
from dpsim.workload import Workload

INPUT_S = "input_s_per_sample"


def computed_s(workload: Workload) -> float:
    """Seconds of a step on one device: everything but communication and waiting for input."""
    times = workload.times(workload.local_batches[0])
    accumulate = 1 if workload.ddp is None else workload.ddp.accumulate
    passes_s = float(times.forward_s.sum() + times.backward_s.sum())
    return accumulate * passes_s + workload.update_s + times.overhead_s


def script_workload(config: ProfileConfig, bare: Workload, rows: Rows, profile: int) -> Workload:
    """Return the workload that the rows of a script's profile describe; ``bare`` has the same layers.

    A time is the median over visits, scaled so that the parts of a step add up to the median step.
    """
    if config.times_given:
        return bare
    return joined([_at(batch, bare, rows, profile) for batch in sorted(config.local_batches)])


def _at(local_batch: int, bare: Workload, rows: Rows, profile: int) -> Workload:
    """The workload at one local batch."""
    case = ProfiledBatch(devices=1, local_batch=local_batch, profile=profile)

    def median(quantity: str, part: int = 0) -> float:
        return float(np.median(rows.values(case, quantity, part)))

    layers = tuple(
        replace(layer, forward_s=(median(FORWARD_S, number),), backward_s=(median(BACKWARD_S, number),))
        for number, layer in enumerate(bare.layers)
    )
    visits, load_s = len(rows.values(case, STEP_S)), median(INPUT_S)
    parts = replace(
        bare,
        local_batches=(local_batch,),
        layers=layers,
        update_s=median(UPDATE_S),
        overhead_s=median(OVERHEAD_S),
        overhead_per_sample_s=0.0,
        input_s_per_sample=load_s,
        input_workers=bare.input_workers if load_s else 1,
        input_prefetch=bare.input_prefetch and load_s > 0,
        relative_uncertainty=median_error(np.maximum(rows.values(case, STEP_S), TICK_S)),
        source=f"{bare.source}; times are medians of {visits} visits in turns",
    )
    scale = median(STEP_S) / max(computed_s(parts), TICK_S)
    return parts.slowed(scale)
