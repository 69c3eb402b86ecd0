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

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.torch.script.probe.reproduce.report import RankStep
from dpsim.torch.script.reproduce.observation import Observed, Run
from dpsim.torch.script.reproduce.rounding import ALLOWANCE, EPSILON, mean_loss

SCHEMA = "dpsim.baseline/1"


class Baseline(Noun, frozen=True):
    """The first run of a script, step by step.

    ``losses`` are means over ranks and micro-batches; ``rounding`` is how far rounding alone had moved the loss by each
    step, in a training that went its own way with the noise of one rounding in every module's output. ``digests`` are
    of the parameters before each step and the gradients that its update got. ``environment`` is what bits depend on.
    """

    devices: int
    accumulate: int
    bucket_cap_bytes: float | None
    arguments: tuple[str, ...]
    losses: tuple[float | None, ...]
    rounding: tuple[float, ...]
    digests: tuple[str, ...]
    environment: Mapping[str, str]
    schema: str = SCHEMA

    @property
    def training(self) -> dict[str, object]:
        """What makes it another training."""
        return {
            "devices": self.devices,
            "micro-batches": self.accumulate,
            "bucket cap in bytes": self.bucket_cap_bytes,
            "arguments": " ".join(self.arguments),
        }


@dataclass(frozen=True)
class BaselineComparison:
    """A run held against its baseline: a sentence for the losses, and one for the bits."""

    differs: bool
    sentences: tuple[str, ...]


def baseline_of(first: Observed, noisy: Observed, nulls: Sequence[Observed], arguments: tuple[str, ...]) -> Baseline:
    """Return the baseline of the first run, which ``noisy`` repeats on its own way, and ``nulls`` step by step."""
    run, steps = first.run, min(first.steps, noisy.steps)
    losses = [mean_loss(first.step(number)) for number in range(steps)]

    def moved(number: int) -> float:
        """How far the noise moved the loss of a step, and at least one rounding of the loss itself."""
        others = [mean_loss(each.step(number)) for each in (noisy, *nulls) if number < each.steps]
        finite = [abs(each - losses[number]) for each in others if math.isfinite(each - losses[number])]
        return max([*finite, EPSILON * abs(losses[number]) if math.isfinite(losses[number]) else 0.0])

    return Baseline(
        devices=run.devices,
        accumulate=run.accumulate,
        bucket_cap_bytes=run.bucket_cap_bytes,
        arguments=arguments,
        losses=tuple(each if math.isfinite(each) else None for each in losses),
        rounding=tuple(accumulate(map(moved, range(steps)), max)),
        digests=tuple(_digest(first.step(number)) for number in range(steps)),
        environment=first.reports[0].environment,
    )


def noisy_run(first: Run) -> Run:
    """Return the run that goes its own way with the noise of roundings."""
    return Run(
        folder="null-free",
        devices=first.devices,
        bucket_cap_bytes=first.bucket_cap_bytes,
        accumulate=first.accumulate,
        wraps=first.wraps,
        running_norms=first.running_norms,
        null_seed=3,
        free=True,
    )


def read_baseline(path: Path, now: Run, arguments: tuple[str, ...]) -> Baseline:
    """Read a baseline, and check that it is of the training that begins with the run ``now``.

    Raises ``FileFormatError``, and ``ConfigError`` for one of another training.
    """
    saved = codec.read(path, Baseline, "baseline", SCHEMA)
    here = {
        "devices": now.devices,
        "micro-batches": now.accumulate,
        "bucket cap in bytes": now.bucket_cap_bytes,
        "arguments": " ".join(arguments),
    }
    if saved.training != here:
        differing = [f"{name}: {saved.training[name]} there, {here[name]} here" for name in here]
        different = [text for name, text in zip(here, differing, strict=True) if saved.training[name] != here[name]]
        raise ConfigError(
            f"the baseline {path} is of another training: {'; '.join(different)}",
            allowed="a baseline of the same first number of devices, micro-batches, bucket cap and arguments",
            remedy="make it anew: --output in place of --against (with pytest: --dpsim-update)",
        )
    return saved


def compare_with_baseline(now: Baseline, saved: Baseline) -> BaselineComparison:
    """Hold a run against its baseline."""
    steps = min(len(now.losses), len(saved.losses))
    for number in range(steps):
        before, after = saved.losses[number], now.losses[number]
        explained = max(now.rounding[number], saved.rounding[number])
        if before is None or after is None:
            if before is not after:
                given = ["not a number" if each is None else f"{each:.8g}" for each in (after, before)]
                return BaselineComparison(
                    True, (f"The loss of step {number + 1} is {given[0]}, in the baseline {given[1]}.",)
                )
        elif abs(after - before) > ALLOWANCE * explained:
            return BaselineComparison(
                True,
                (
                    f"The training is not that of the baseline: the loss of step {number + 1} is {after:.8g} in place of"
                    f" {before:.8g}; they differ by {abs(after - before):.2g} where rounding explains {explained:.1g}.",
                ),
            )
    losses = f"The losses of {steps} steps are those of the baseline within rounding."
    names = dict.fromkeys([*saved.environment, *now.environment])
    other = [
        f"{name} is {saved.environment.get(name) or 'not known'} there, {now.environment.get(name) or 'not known'} here"
        for name in names
        if saved.environment.get(name) != now.environment.get(name)
    ]
    if other:
        return BaselineComparison(False, (losses, f"Bits are not compared: {'; '.join(other)}."))
    for number in range(steps):
        if now.digests[number] != saved.digests[number]:
            changed = f"Its bits are others from step {number + 1} on, in an equal environment."
            return BaselineComparison(True, (losses, changed))
    return BaselineComparison(False, (losses.replace(" within rounding", ", to the bit"),))


def _digest(ranks: Sequence[RankStep]) -> str:
    """Return a digest of what rank 0 began a step with, and of the gradients that its update got."""
    content = codec.to_json([ranks[0].begun, ranks[0].final_hashes], indent=None)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
