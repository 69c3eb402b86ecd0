"""``explain_traces``: says where the time of the steps goes that traces of PyTorch's profiler show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpsim.model.explanation import Explanation, summed, without_parts
from dpsim.model.observed import Steps, observed_parts
from dpsim.torch_ddp.kineto.ranks import observed_traces

_ONE = (
    "One trace cannot tell waiting for a slower rank from communication, which has both: give a trace of each rank",
)
_ALWAYS = (
    "Traces do not say how long a thread was without a core, nor what a rank computes alone; dpsim profile --from TRACE"
    " and dpsim predict say what other buckets, batches and links would gain",
)


def explain_traces(paths: Sequence[Path]) -> Explanation:
    """Return where the time of the mean step goes that the traces show, one of each rank. Raises ``FileFormatError``.

    The profiler itself makes steps longer, which counts as what it delays.
    """
    steps = Steps(observed_traces(paths))
    parts = observed_parts(steps)
    return summed(
        paths[0].name,
        f"{len(paths)} rank" + "s" * (len(paths) > 1),
        float(steps.step_s.mean()),
        parts,
        f"{len(steps.step_s)} steps of {len(paths)} trace" + "s" * (len(paths) > 1),
        remedies=tuple(without_parts(parts)),
        notes=(*(_ONE if len(paths) == 1 else ()), *_ALWAYS),
    )
