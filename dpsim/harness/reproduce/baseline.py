"""The baseline of a script: its losses with what rounding explains of them, and the digests of its bits.

A later run is held against it. Losses are compared everywhere, within rounding; bits where the environment is equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from msgspec.structs import replace

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.torch.script.probe.reproduce.report import RankStep
from dpsim.torch.script.reproduce.observation import Observed, Run
from dpsim.torch.script.reproduce.rounding import ALLOWANCE, EPSILON, mean_loss

SCHEMA = "dpsim.baseline/1"


class Baseline(Noun, frozen=True):
    """The first run of a script, step by step.

    ``training`` is what makes it another training. ``losses`` are means over ranks and micro-batches; ``rounding`` is
    how far rounding alone had moved the loss by each step, in a training that went its own way with the noise of one
    rounding in every module's output. ``digests`` are of the parameters before each step and the gradients that its
    update got. ``environment`` is what bits depend on.
    """

    training: Mapping[str, str]
    losses: tuple[float | None, ...]
    rounding: tuple[float, ...]
    digests: tuple[str, ...]
    environment: Mapping[str, str]
    schema: str = SCHEMA


@dataclass(frozen=True)
class BaselineComparison:
    """A run held against its baseline: a sentence for the losses, and one for the bits."""

    differs: bool
    sentences: tuple[str, ...]


def baseline_of(first: Observed, noisy: Observed, nulls: Sequence[Observed], training: Mapping[str, str]) -> Baseline:
    """Return the baseline of the first run, which ``noisy`` repeats on its own way, and ``nulls`` step by step."""
    steps = min(first.steps, noisy.steps)
    losses = [mean_loss(first.step(number)) for number in range(steps)]

    def moved(number: int) -> float:
        """How far the noise moved the loss of a step, and at least one rounding of the loss itself."""
        others = [mean_loss(each.step(number)) for each in (noisy, *nulls) if number < each.steps]
        finite = [abs(each - losses[number]) for each in others if math.isfinite(each - losses[number])]
        return max([*finite, EPSILON * abs(losses[number]) if math.isfinite(losses[number]) else 0.0])

    return Baseline(
        training=training,
        losses=tuple(each if math.isfinite(each) else None for each in losses),
        rounding=tuple(accumulate(map(moved, range(steps)), max)),
        digests=tuple(_digest(first.step(number)) for number in range(steps)),
        environment=first.reports[0].environment,
    )


def noisy_run(first: Run) -> Run:
    """Return the run that goes its own way with the noise of roundings."""
    return replace(first, folder="null-free", null_seed=3, free=True)


def read_baseline(path: Path, training: Mapping[str, str]) -> Baseline:
    """Read a baseline, and check that it is of this training.

    Raises ``FileFormatError``, and ``ConfigError`` for one of another training.
    """
    saved = codec.read(path, Baseline, "baseline", SCHEMA)
    if differing := _differing(saved.training, training):
        raise ConfigError(
            f"the baseline {path} is of another training: {differing}",
            allowed="a baseline of the same first run, type and arguments",
            remedy="make it anew: --output in place of --against (with pytest: --dpsim-update)",
        )
    return saved


def _differing(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return what differs, in words; empty if nothing does."""
    names = [name for name in dict.fromkeys([*there, *here]) if there.get(name) != here.get(name)]
    return "; ".join(
        f"{name} {there.get(name, 'not known')} there, {here.get(name, 'not known')} here" for name in names
    )


def compare_with_baseline(now: Baseline, saved: Baseline) -> BaselineComparison:
    """Hold a run against its baseline."""
    steps = min(len(now.losses), len(saved.losses))
    for number in range(steps):
        if difference := _other_loss(now, saved, number):
            return BaselineComparison(True, (difference,))
    losses = f"The losses of {steps} steps are those of the baseline within rounding."
    if other := _differing(saved.environment, now.environment):
        return BaselineComparison(False, (losses, f"Bits are not compared: {other}."))
    for number in range(steps):
        if now.digests[number] != saved.digests[number]:
            changed = f"Its bits are others from step {number + 1} on, in an equal environment."
            return BaselineComparison(True, (losses, changed))
    return BaselineComparison(False, (f"The {steps} steps are those of the baseline to the bit.",))


def _other_loss(now: Baseline, saved: Baseline, number: int) -> str:
    """Return how the loss of a step differs from the baseline's by more than rounding; empty if it does not."""
    here, there = now.losses[number], saved.losses[number]
    given = ["not a number" if each is None else f"{each:.8g}" for each in (here, there)]
    difference = (
        f"The training is not that of the baseline: the loss of step {number + 1} is {given[0]}, and was {given[1]}"
    )
    if here is None or there is None:
        return "" if here is there else f"{difference}."
    explained, apart = max(now.rounding[number], saved.rounding[number]), abs(here - there)
    if apart <= ALLOWANCE * explained:
        return ""
    return f"{difference}; they are {apart:.2g} apart where rounding explains {explained:.1g}."


def _digest(ranks: Sequence[RankStep]) -> str:
    """Return a digest of what rank 0 began a step with, and of the gradients that its update got."""
    content = codec.to_json([ranks[0].begun, ranks[0].final_hashes], indent=None)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
