"""What the runs of a script came to: each against the first one, and all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpsim.harness.reproduce.baseline import Baseline
from dpsim.torch.script.reproduce.differences import UNKNOWN, Finding
from dpsim.torch.script.reproduce.observation import Run

_UNJUDGED = "(in float32 the script does not train)"
ONE_ORDER = (
    "every epoch has the same order of samples, on any number of devices: nothing calls set_epoch of the"
    " DistributedSampler"
)
_WORDS = {True: "Not rounding", False: "Not comparable"}


@dataclass(frozen=True)
class Compared:
    """A run against the first one: how many steps, how far its gradients were, its finding, and what is by design.

    ``samples`` are those of the first step on all ranks, ``largest`` is the largest difference of a reduced gradient or
    of the finding, in units of what rounding explains (None where no numbers were compared). From step
    ``no_number_from`` on the loss is ``no_number`` (nan, inf) in both runs (None: it is a number in the last step).
    """

    run: Run
    steps: int
    samples: int
    largest: float | None
    finding: Finding | None
    designs: tuple[str, ...]
    no_number_from: int | None = None
    no_number: str = ""

    @property
    def point(self) -> dict[str, Any]:
        """Return the flat record of this run."""
        finding = {} if self.finding is None else vars(self.finding) | {"is_mistake": self.finding.is_mistake}
        return {
            "run": self.run.name,
            "devices": self.run.devices,
            "bucket_cap_bytes": self.run.bucket_cap_bytes,
            "accumulate": self.run.accumulate,
            "in_float32": self.run.in_float32,
            "steps": self.steps,
            "global_batch": self.samples,
            "largest_difference_over_rounding": self.largest,
            "no_number_from_step": self.no_number_from,
            "finding": finding,
        }


@dataclass(frozen=True)
class Verdict:
    """What all runs came to. ``computes_in`` says what computes in 16 bits; later runs have the ``baseline``.

    ``notes`` are what no number of devices changes, and may be meant otherwise.
    """

    first: Run
    compared: tuple[Compared, ...]
    computes_in: tuple[str, ...] = ()
    baseline: Baseline | None = None
    notes: tuple[str, ...] = ()

    @property
    def finding(self) -> Finding | None:
        """The finding that is told.

        A mistake before what cannot be compared, one that has a class, an early step, and float32, which names better.
        """
        findings = [(each.finding, each.run) for each in self.compared if each.finding is not None]
        told = min(
            findings,
            key=lambda each: (not each[0].is_mistake, each[0].kind == UNKNOWN, each[0].step, not each[1].in_float32),
            default=None,
        )
        return None if told is None else told[0]

    @property
    def is_mistake(self) -> bool:
        """Whether the finding is a mistake."""
        return self.finding is not None and self.finding.is_mistake

    @property
    def designs(self) -> tuple[str, ...]:
        """What differs by design, and is no mistake."""
        return tuple(dict.fromkeys(design for each in self.compared for design in each.designs))

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        finding = self.finding
        if finding is not None:
            return f"{_WORDS[finding.is_mistake]}: {finding.sentence}{self._shown(finding.is_mistake)}{finding.origin}"
        if without := [each for each in self.compared if each.no_number_from is not None]:
            return self._without_numbers(min(without, key=lambda each: each.no_number_from or 0))
        steps = min(each.steps for each in self.compared)
        apart = ", apart from what differs by design" if self.designs else ""
        return f"The difference is rounding in all {steps} steps{apart}{self._judged}."

    @property
    def _judged(self) -> str:
        """The judgements of a script that computes in 16 bits."""
        if not self.computes_in:
            return ""
        in_float32 = "and in float32" if self._in_float32(self.compared) else _UNJUDGED
        return f", with {' and '.join(self.computes_in)} {in_float32}"

    def _shown(self, is_mistake: bool) -> str:
        """The judgements that show a mistake of a script that computes in 16 bits."""
        if not (self.computes_in and is_mistake):
            return ""
        as_it_is = f"with {' and '.join(self.computes_in)}"
        shows = {each.run.in_float32 for each in self.compared if each.finding is not None and each.finding.is_mistake}
        if not self._in_float32(self.compared):
            return f" It shows {as_it_is} {_UNJUDGED}."
        if shows == {False}:
            return f" It shows {as_it_is} alone, not in float32."
        if shows == {True}:
            return f" It shows in float32 alone, not {as_it_is}."
        return f" It shows {as_it_is}, and in float32."

    @staticmethod
    def _in_float32(compared: Sequence[Compared]) -> bool:
        return any(each.run.in_float32 for each in compared)

    def _without_numbers(self, compared: Compared) -> str:
        """The answer where the loss ends as no number on any number of devices."""
        step = compared.no_number_from or 1
        before = f"the difference is rounding in the {step - 1} before" if step > 1 else "no step can be compared"
        return (
            f"The loss is {compared.no_number} from step {step} on, on {self.first.name} too: it does not come from the"
            f" number of devices. Of {compared.steps} steps {before}."
        )
