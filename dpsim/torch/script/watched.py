"""What the ranks of a watched job have written down, and what it says: their steps, and the ``Workload`` they trained.

Loads no torch. ``dpsim.torch.script.probe.watched`` writes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dpsim import processor
from dpsim.model.observed import Observed, ObservedRank, ObservedStep, Steps
from dpsim.torch.script.probe.steps import RecordedStep
from dpsim.torch.script.recorded import Recorded, workload_of
from dpsim.torch.script.script_record import DdpRecord, numbers
from dpsim.workload import Workload


class WatchedRank(DdpRecord, frozen=True, kw_only=True):
    """The record of one rank.

    ``run`` is the same for all ranks of one attempt of a job. ``reason`` says why watching ended early; it is empty
    where it did not, or where the job itself ended. Each step has the seconds of its synchronising backward until the
    last gradient (``last_backward_s``), the nanoseconds from the end of forward until each gradient was ready
    (``ready_ns``), and the seconds from there to that backward (``loss_s``). The process has ``cores`` and
    computes with ``threads``. ``own_s`` is what watching took, from the making of its hooks to its record. Where the
    model has ``units`` of FSDP, there are the sizes of its gathers and reduce-scatters, and nothing of its parameters.
    """

    rank: int
    ranks: int
    ranks_here: int
    reason: str
    script: str
    model: str
    cores: int
    threads: int
    backend: str
    steps: tuple[ObservedStep, ...]
    last_backward_s: tuple[float, ...]
    loss_s: tuple[float, ...]
    ready_ns: tuple[tuple[int, ...], ...]
    local_batch: int
    accumulate: int
    optimizer_slots: int | None
    input_workers: int
    own_s: float
    run: str = ""
    units: int = 0
    gather_bytes: tuple[int, ...] = ()
    reduce_scatter_bytes: tuple[int, ...] = ()
    sharded_optimizer: bool = False

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """The sizes of DDP's buckets, or of FSDP's units."""
        return numbers(self.initial_bucket_bytes) if self.units else super().bucket_bytes

    @property
    def computes_on_every_core(self) -> bool:
        """Whether the ranks compute on all cores, so that an allreduce takes away some of what backward has."""
        return self.device == "cpu" and self.cores < self.ranks_here * (self.threads + 1)


def observed(ranks: Sequence[WatchedRank]) -> Observed:
    """Return the steps that all ranks have, in the order of the ranks."""
    count = min(len(each.steps) for each in ranks)
    return Observed(
        ranks=tuple(
            ObservedRank(
                steps=each.steps[:count],
                bucket_bytes=each.bucket_bytes,
                local_batch=each.local_batch,
                accumulate=each.accumulate,
                units=each.units,
                gather_bytes=each.gather_bytes,
                reduce_scatter_bytes=each.reduce_scatter_bytes,
            )
            for each in sorted(ranks, key=lambda each: each.rank)
        )
    )


def watched_workload(ranks: Sequence[WatchedRank], steps: Steps) -> Workload:
    """Return what the typical rank trains, with its times as they were seen beside all other ranks.

    Where the forward of each module was not seen, the first one has it all: no allreduce is under way then.
    """
    rank = sorted(ranks, key=lambda each: each.rank)[steps.typical]
    parameters = rank.recorded_parameters
    first: dict[str, int] = {}
    for index, parameter in enumerate(parameters):
        first.setdefault(parameter.module, index)
    return workload_of(
        Recorded(
            name=f"{rank.model} of {rank.script}",
            source=f"dpsim explain: medians of {len(rank.steps)} steps of {rank.ranks} ranks on {rank.device},"
            f" PyTorch {rank.torch}",
            parameters=parameters,
            first_parameter=first,
            buckets=rank.buckets,
            steps=(*map(_whole, rank.steps, rank.last_backward_s, [rank] * len(rank.steps)), _gradients(rank)),
            ddp=rank.settings(devices=rank.ranks, accumulate=rank.accumulate, sharded_optimizer=rank.sharded_optimizer),
            state_bytes=rank.state_bytes,
            optimizer_slots=rank.optimizer_slots,
            input_workers=rank.input_workers,
            device=rank.device_name or processor.model(),
        )
    )


def _whole(step: ObservedStep, last_backward_s: float, rank: WatchedRank) -> RecordedStep:
    return RecordedStep(
        mode="whole",
        start_s=step.began_s,
        step_s=step.computed_s - step.began_s,
        last_backward_s=last_backward_s,
        micro_batches=rank.accumulate,
        local_batch=rank.local_batch,
        **{name: getattr(step, name) for name in ("forward_s", "backward_s", "update_s", "input_s", "delayed_s")},
    )


def _gradients(rank: WatchedRank) -> RecordedStep:
    """A step that has the median moment of each gradient; one that never came has none."""
    loss_s = statistics.median(rank.loss_s)
    moments_s = [statistics.median(moments) * 1e-9 for moments in zip(*rank.ready_ns, strict=True)]
    whole = _whole(rank.steps[0], statistics.median(rank.last_backward_s), rank)
    whole.mode = "gradients"
    whole.ready_s = {index: max(seconds - loss_s, 0.0) for index, seconds in enumerate(moments_s) if seconds > 0}
    return whole
