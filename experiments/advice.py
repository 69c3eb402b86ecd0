"""``python -m dpsim.experiments.advice`` compares the ranking of ``advise`` with measured steps, case by case.

Each case is profiled and calibrated, ``advise`` ranks the strategies, and then the best plan of each one that is said
to fit is trained in turns with the others. A case holds where the plan that is advised is the fastest of them or
at most 3 % slower, and where none that is said to fit allocates more memory than there is. The fastest is chosen on
other rounds than it is timed on: the quickest of several plans that take as long is one that was lucky.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, DpsimError
from dpsim.experiments import command
from dpsim.harness.sweep.experiment import experiment_of_plans
from dpsim.harness.sweep.pairing import pair
from dpsim.harness.sweep.scores import regret
from dpsim.harness.sweep.sweep import measure
from dpsim.model.advise import advise
from dpsim.progress import Progress
from dpsim.records.sweep import Environment
from dpsim.setting import Grid, setting_of
from dpsim.study.environment import environment
from dpsim.study.inputs import Needed, prepare
from dpsim.units import format_size

TOLERANCE = 0.03
_SECONDS = 6.0
_PREPARED = (("data-parallel", 1), ("zero3", 1), ("pipeline", 2), ("pipeline", 8))
_SLOW, _SLOWER = "paced:50us,1gbit", "paced:200us,200mbit"


class Case(Noun, frozen=True):
    """A training on devices of a network; ``memory_bytes`` are those of a device (0: as many as it takes)."""

    model: str
    network: str = "node"
    devices: int = 2
    compute: str = "real"
    global_batch: int = 256
    memory_bytes: int = 0

    @property
    def title(self) -> str:
        emulated = ", emulated computation" * (self.compute == "emulated")
        memory = f", {format_size(self.memory_bytes)} each" if self.memory_bytes else ""
        return f"{self.model} at {self.global_batch}, {self.devices} devices, {self.network}{emulated}{memory}"


CASES = (
    *(Case(model=model) for model in ("mlp:64x4", "mlp:256x8", "cnn")),
    *(Case(model=model, network=_SLOW) for model in ("mlp:64x4", "mlp:256x8", "cnn")),
    Case(model="mlp:256x8", network=_SLOWER),
    *(
        Case(model=model, network=network, devices=4, compute="emulated", global_batch=512)
        for model, network in (("mlp:256x8", _SLOW), ("mlp:256x8", _SLOWER), ("cnn", _SLOW))
    ),
    *(Case(model="mlp:256x8", network=network, memory_bytes=9 * 2**20) for network in ("node", _SLOW)),
)


class Ranked(Noun, frozen=True):
    """The best plan of a strategy, its predicted step, the measured ones, and the memory that a device allocated."""

    strategy: str
    accumulate: int
    predicted_s: float
    step_s: tuple[float, ...]
    memory_bytes: int

    @property
    def median_s(self) -> float:
        return float(np.median(self.step_s))


class Outcome(Noun, frozen=True):
    """What came of a case: the plans that are said to fit, the advised one first.

    ``cost``: how much longer its step is than the fastest one's, over that (``scores.regret``).
    """

    case: Case
    ranked: tuple[Ranked, ...]
    cost: float

    @property
    def fits(self) -> bool:
        limit = self.case.memory_bytes
        return not limit or all(each.memory_bytes <= limit for each in self.ranked)

    @property
    def holds(self) -> bool:
        return self.cost <= TOLERANCE and self.fits


class AdviceRecord(Noun, frozen=True):
    """All cases of one run."""

    environment: Environment
    outcomes: tuple[Outcome, ...]
    schema: str = "dpsim.advice/1"


def outcome(case: Case, progress: Progress) -> Outcome:
    """Advise for a case, and measure what is advised."""
    progress(case.title)
    common = {name: getattr(case, name) for name in ("model", "network", "devices", "compute", "global_batch")}
    rows = [common | {"strategy": strategy, "accumulate": count} for strategy, count in _PREPARED]
    needed = Needed(
        settings=tuple(map(setting_of, rows)),
        environment=environment(),
        dataset="digits",
        seed=0,
        overlaps=("poll", "thread"),
        seconds=_SECONDS,
    )
    known = prepare(needed, progress)
    workload, machine = known.workloads[0], known.machines[0]
    if case.memory_bytes:
        machine = msgspec.structs.replace(machine, memory_bytes=case.memory_bytes)
    advice = advise(workload, machine, Grid.of(devices=case.devices, global_batch=case.global_batch))
    fitting = [each for each in advice.choices if each.memory.fits is not False]
    base = {"model": case.model, "network": case.network, "compute": case.compute}
    experiment = experiment_of_plans("advice", [each.plan for each in fitting], **base)
    experiment = msgspec.structs.replace(experiment, budget_s=_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        swept = measure(experiment, Path(folder) / "measured", progress)
    pairs, _ = pair(swept.predictions, swept.results)
    measured = [next(each for each in pairs if each.setting.plan == candidate.plan) for candidate in fitting]
    ranked = tuple(
        Ranked(
            candidate.plan.strategy,
            candidate.plan.accumulate,
            candidate.step_s,
            each.samples(),
            max(run.memory_bytes for run in each.runs),
        )
        for candidate, each in zip(fitting, measured, strict=True)
    )
    return Outcome(case, ranked, regret(measured, 0).mean)


def lines(of_case: Outcome) -> list[str]:
    """Return a line for a case, and one for each of its plans."""
    verdict = "holds" if of_case.holds else "does not hold"
    shown = [f"{of_case.case.title}: the advised one is {of_case.cost:.1%} slower than the fastest; {verdict}"]
    for each in of_case.ranked:
        shown.append(
            f"  {each.strategy}, {each.accumulate} micro-batches: predicted {1e3 * each.predicted_s:.2f} ms, measured"
            f" {1e3 * each.median_s:.2f} ms, {format_size(each.memory_bytes)}"
        )
    return shown


def outcomes(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Measure cases, print each one's lines as it ends, and say which ones could not be measured."""
    for each in cases:
        try:
            measured = outcome(each, command.tell)
        except DpsimError as error:
            print(f"{each.title}: not measured. {error}", flush=True)
            continue
        print("\n".join(lines(measured)), flush=True)
        yield measured


def main() -> int:
    options = command.parser("advice", __doc__)
    options.add_argument("--cases", default="", help=f"numbers of cases, like 1,2,3 (all {len(CASES)})")
    options.add_argument("--output", type=Path, help="file for the record (.json)")
    given = options.parse_args()

    def run() -> None:
        numbers = given.cases.split(",") if given.cases else [str(number + 1) for number in range(len(CASES))]
        known = {str(number + 1): case for number, case in enumerate(CASES)}
        if unknown := [number for number in numbers if number not in known]:
            raise ConfigError(f"case {', '.join(unknown)}", allowed=f"1 to {len(CASES)}, with commas between")
        measured = tuple(outcomes([known[number] for number in numbers]))
        if given.output is not None:
            codec.write(given.output, AdviceRecord(environment(), measured))
        print(f"{sum(each.holds for each in measured)} of {len(numbers)} cases hold.")

    return command.ended("advice", run)


if __name__ == "__main__":
    raise SystemExit(main())
