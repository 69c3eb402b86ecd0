"""A difference between two runs that rounding does not explain: where it is, and of which class. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dpsim.torch.script.probe.reproduce.report import RankStep
from dpsim.torch.script.reproduce.observation import Observed
from dpsim.torch.script.reproduce.rounding import EPSILON, LOSS, NARROW_EPSILON, Rounding

REPEATED = "a sampler that repeats"
PADDED = "a sampler that pads"
SEEDS = "seeds by rank"
SHARES = "means of unequal shares"
SCALE = "a sum in place of a mean"
BUFFERS = "buffers that are not synchronised"
OVERWRITTEN = "a bucket written while it is sent"
MISSING = "a missing gradient"
OWN_NORM = "a norm of each rank's own"
APART = "ranks that come apart"
REDUCED_NARROW = "a reduction in 16 bits"
SCALED_TWICE = "a loss scaled twice"
CLIPPED_SCALED = "clipping before unscale_"
NOT_UNSCALED = "gradients that stay scaled"
OVERFLOW = "overflow decided by each rank"
LOST = "parameters updated in 16 bits"
NARROW_NORMS = "norms kept in 16 bits"
CLEARED = "gradients cleared in each micro-batch"
CHANGED = "gradients clipped in each micro-batch"
TOO_FAST = "a schedule that runs too fast"
OWN_LOSS = "a loss of each rank's own samples"
NOT_A_NUMBER = "a loss that is not a number"
RANDOM = "random by design"
OTHER_SAMPLES = "other samples"
UNKNOWN = "no class of mistake that dpsim knows"

SAMPLES = "the samples"
_OF_SAMPLES = (REPEATED, PADDED, OTHER_SAMPLES)
NO_MISTAKE = (RANDOM, OTHER_SAMPLES)
"""What makes runs incomparable, and is no mistake."""


@dataclass(frozen=True)
class Finding:
    """The first difference of a run that rounding does not explain: its step (from 1), tensor, class and reason.

    ``difference`` and ``rounding`` are parts of the tensor's own size (None where values were not compared). ``line``
    is that which made the tensor's module, or the sampler where samples are the matter ("": not known).
    """

    run: str
    step: int
    tensor: str
    kind: str
    because: str
    difference: float | None = None
    rounding: float | None = None
    line: str = ""

    @property
    def is_mistake(self) -> bool:
        """Whether something is wrong, rather than not comparable."""
        return self.kind not in NO_MISTAKE

    @property
    def sentence(self) -> str:
        """Where, by how much and why."""
        text = f"step {self.step} on {self.run}, {self.tensor}"
        if self.difference is not None:
            text += f", differs by {self.difference:.2g} of its size"
        if self.rounding is not None:
            text += f" where rounding explains {self.rounding:.1g}"
        return f"{text}, because {self.because} (class: {self.kind})."

    @property
    def origin(self) -> str:
        """Where the script makes the tensor's module, or the sampler; empty if that is not known."""
        what = "sampler" if self.tensor.startswith(SAMPLES) else "module"
        return f" The {what} is made in {self.line}." if self.line else ""


def sampler_line(run: Observed) -> str:
    """Return the line that made the sampler of the loader that gave batches; empty if there are several loaders."""
    loaders = run.reports[0].loaders
    return loaders[0].line if len(loaders) == 1 else ""


@dataclass(frozen=True)
class Step:
    """A step of the first run and of another one."""

    first: Observed
    other: Observed
    rounding: Rounding
    number: int

    @property
    def ours(self) -> tuple[RankStep, ...]:
        """The ranks of the first run."""
        return self.first.step(self.number)

    @property
    def theirs(self) -> tuple[RankStep, ...]:
        """The ranks of the other run."""
        return self.other.step(self.number)

    @property
    def names(self) -> list[str]:
        """The parameters in the order in which backward reaches them."""
        known = dict.fromkeys((*self.first.reports[0].parameters, *self.other.reports[0].parameters))
        return list(known)

    def epsilon(self, name: str) -> float:
        """Return the distance of the numbers of a parameter, as a part of them."""
        return NARROW_EPSILON.get(self.other.reports[0].narrow.get(name, ""), EPSILON)

    def found(self, tensor: str, kind: str, because: str, **compared: float) -> Finding:
        """Return a finding in this step."""
        line = sampler_line(self.other) if kind in _OF_SAMPLES else self._module_line(tensor)
        return Finding(self.other.run.name, self.number + 1, tensor, kind, because, line=line, **compared)

    def _module_line(self, tensor: str) -> str:
        """The line that made the module of a parameter or buffer."""
        return self.other.reports[0].lines.get(tensor.rpartition(".")[0], "") if tensor != LOSS else ""
