"""``explain_traces``: says where the time of the steps goes that traces of PyTorch's profiler show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from dpsim.model.explanation import Explanation, Part, summed, without_parts
from dpsim.model.observed import Steps, observed_parts
from dpsim.torch.script.kineto.others import Others
from dpsim.torch.script.kineto.ranks import observed_traces

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
    observed, others = observed_traces(paths)
    steps = Steps(observed)
    parts, other = observed_parts(steps), others[steps.typical]
    notes = tuple[str, ...]()
    if other.on_device:
        notes = (f"other collectives than DDP's allreduces ran, which computation may hide: {other.text}",)
    elif other.counts:
        parts = _with_others(parts, other)
    return summed(
        paths[0].name,
        f"{len(paths)} rank" + "s" * (len(paths) > 1),
        float(steps.step_s.mean()),
        parts,
        f"{len(steps.step_s)} steps of {len(paths)} trace" + "s" * (len(paths) > 1),
        remedies=tuple(without_parts(parts)),
        notes=(*notes, *(_ONE if len(paths) == 1 else ()), *_ALWAYS),
    )


def _with_others(parts: list[Part], other: Others) -> list[Part]:
    """The parts with one for other collectives, whose time in forward, backward and update is no computation."""
    own = next(part for part in parts if part.kind == "computation")
    inside_s = min(other.inside_s, own.seconds)
    less = {name: getattr(own, name) - inside_s for name in ("seconds", "low_s", "high_s")}
    taken_s = other.taken_s
    others_part = Part(kind="other collectives", seconds=taken_s, low_s=taken_s, high_s=taken_s, text=other.text)
    return [*(replace(own, **less) if part is own else part for part in parts), others_part]
