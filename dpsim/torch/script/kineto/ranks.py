"""``observed_traces``: traces of PyTorch's profiler of some ranks in, the steps that these took out, on one clock."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from dpsim.errors import ConfigError
from dpsim.model.observed import Observed, ObservedRank, ObservedStep
from dpsim.torch.script.kineto.events import open_trace, read_events
from dpsim.torch.script.kineto.marks import collect
from dpsim.torch.script.kineto.others import Others, others_of
from dpsim.torch.script.kineto.steps import TracedStep, steps_of
from dpsim.units import ITEM_BYTES


def observed_traces(paths: Sequence[Path], local_batch: int = 1) -> tuple[Observed, tuple[Others, ...]]:
    """Return what the traces show of their ranks' steps, a rank a trace, and of other collectives than DDP's.

    Their clocks differ. All ranks leave the allreduces of a step together, so each clock is moved by the median
    difference of these moments from the first trace's. Raises ``FileFormatError`` for what is no trace of DDP, and
    ``ConfigError`` for traces of different steps.
    """
    traced, others = zip(*map(traced_steps, paths), strict=True)
    counts = [len(steps) for steps in traced]
    buckets = [steps[-1].buckets for steps in traced]
    if len(set(counts)) > 1 or len(set(buckets)) > 1:
        what = f"{', '.join(map(str, counts))} steps" if len(set(counts)) > 1 else "different buckets"
        raise ConfigError(
            f"traces of {what} ({', '.join(path.name for path in paths)})",
            allowed="traces of the same steps of one training, one of each rank",
            remedy="give the same torch.profiler.schedule on all ranks",
        )
    shifts_s = [
        statistics.median(own.communicated_s - one.communicated_s for own, one in zip(steps, traced[0], strict=True))
        for steps in traced
    ]
    return Observed(ranks=tuple(_rank(*each, local_batch) for each in zip(traced, shifts_s, strict=True))), others


def traced_steps(path: Path) -> tuple[list[TracedStep], Others]:
    """Return the steps of a trace, and what other collectives took in them. Raises ``FileFormatError``."""
    marks = collect(path.name, read_events(open_trace(path), {}))
    return steps_of(path.name, marks), others_of(marks)


def _rank(steps: Sequence[TracedStep], shift_s: float, local_batch: int) -> ObservedRank:
    """The steps after the first, each from the end of the backward before; the update before it is its own."""
    sizes = tuple(bucket.elements * ITEM_BYTES[bucket.dtype] for bucket in steps[-1].buckets)
    return ObservedRank(
        steps=tuple(
            ObservedStep(
                began_s=before.communicated_s - shift_s,
                computed_s=step.backward_began_s + step.last_backward_s - shift_s,
                ended_s=step.communicated_s - shift_s,
                forward_s=step.forward_s,
                backward_s=step.backward_s,
                update_s=before.update_s,
                input_s=step.input_s,
                ready_s=tuple(step.backward_began_s + ready_s - shift_s for ready_s in step.bucket_ready_s),
            )
            for before, step in itertools.pairwise(steps)
        ),
        bucket_bytes=sizes,
        local_batch=local_batch,
        accumulate=steps[-1].micro_batches,
    )
