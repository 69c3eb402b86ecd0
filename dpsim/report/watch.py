"""What ``dpsim explain`` saw of a job: where a step's time goes, the bucket cap, and the line to paste."""

from __future__ import annotations

from dpsim.frameworks import FRAMEWORKS
from dpsim.model.watch import CapGain, Watched
from dpsim.units import ITEM_BYTES, format_duration, format_size

_FROM_THE_JOB = "as predicted from the job's own gradients and allreduces, over all latencies that these may have"


def advice(seen: Watched) -> list[str]:
    """Return the sentence of the bucket cap and the line to paste, if there is one."""
    sizes = seen.ranks[0].bucket_bytes
    buckets = f"{len(sizes)} {'unit' if seen.ranks[0].units else 'bucket'}{'s' * (len(sizes) != 1)}"
    if not seen.caps:
        why = seen.untuned or "its allreduces end with backward"
        return [f"No bucket cap is advised for its {buckets}: {why}."]
    best = seen.advised
    if best is None:
        first = seen.caps[0]
        return [
            f"Leave the bucket cap ({buckets}): the best other one, {format_size(first.cap_bytes)}, gains"
            f" {_range(first)}, {_FROM_THE_JOB}."
        ]
    item_bytes = ITEM_BYTES.get(seen.ranks[0].parameters[0].dtype, 4)
    return [
        f"Set the bucket cap to {format_size(best.cap_bytes)} ({best.buckets} buckets in place of {len(sizes)}): the"
        f" step gains {_range(best)}, {_FROM_THE_JOB}.",
        FRAMEWORKS.find("ddp").line(best.cap_bytes, item_bytes),
    ]


def logged(seen: Watched) -> dict[str, float | str]:
    """Return the numbers and texts for the job's own logger, by name; a slow rank and a cap only if there is one."""
    seconds = {part.kind: part.seconds for part in seen.explained.parts}
    values: dict[str, float | str] = {
        "dpsim/exposed_ms": 1e3 * seconds["communication"],
        "dpsim/waiting_ms": 1e3 * seconds["slowest rank"],
        "dpsim/advice": " ".join(advice(seen)),
    }
    if seen.slow_rank is not None:
        values["dpsim/slow_rank"] = seen.slow_rank
    if seen.advised is not None:
        values["dpsim/advised_bucket_cap_mb"] = seen.advised.cap_bytes / 2**20
    return values


def _range(gain: CapGain) -> str:
    low, high = (f"{each - 1:.1%}" for each in (gain.low, gain.high))
    return low if low == high else f"{low} to {high}"


def headline(seen: Watched) -> str:
    """Return the title: the job, its ranks, its step."""
    of = seen.explained
    first = seen.ranks[0]
    return (
        f"dpsim explain: {of.name} on {of.devices} ({first.backend}, {first.device}), {of.method},"
        f" {format_duration(of.step_s)} each"
    )
