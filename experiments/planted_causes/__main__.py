"""``python -m dpsim.experiments.planted_causes`` plants causes of slowness in a training; ``explain`` has to find them.

Each case trains ``job.py`` with a cause whose size is drawn at random and that ``explain`` is not told. What it costs
is timed apart, without dpsim: the same training under torchrun with the cause and without, or, of a small
batch, what a line through its step and that of a larger batch leaves for no samples at all. Over an emulated link the
steps are those of dpsim's ranks. Prints the causes that were named, and the planted one's size beside it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from dpsim.codec import Noun
from dpsim.experiments import command
from dpsim.harness.explain.script import ScriptToExplain, explain_script, observe
from dpsim.launch.child_process import child
from dpsim.model.observed import Steps
from dpsim.progress import Progress

_JOB = Path(__file__).with_name("job.py")
_DEVICES, _COUNT, _TURNS = 2, 30, 3
_BUSY = "while True: pass"


class Case(Noun, frozen=True):
    """A training: arguments of the job with the cause and without, its network, and busy processes beside it."""

    name: str
    causes: tuple[str, ...]
    planted: tuple[str, ...]
    clean: tuple[str, ...] = ()
    network: str = "node"
    busy: int = 0
    larger_batch: int = 0


class Found(Noun, frozen=True):
    """What ``explain`` said of a case: the causes that it named, and the seconds of the first planted one.

    Where it did not name that, they are those of the cause that it named first. ``truth_s`` was timed.
    """

    case: Case
    causes: tuple[str, ...]
    seconds: float
    step_s: float
    truth_s: float

    @property
    def error(self) -> float:
        """Explained over true seconds, minus 1."""
        return self.seconds / self.truth_s - 1


def cases(seed: int) -> list[Case]:
    """Return the cases, their sizes drawn by the seed."""
    draw = random.Random(seed)
    sleep, load = (f"{draw.uniform(0.1, 0.3):.3f}" for _ in range(2))
    link = f"paced:{draw.uniform(0.5, 3):.2f}ms,{draw.uniform(150, 500):.0f}mbit"
    layers, batch, length = draw.randint(150, 400), draw.randint(1, 4), draw.randint(80, 200)
    busy = draw.randint(1, 3)
    slow = ("--slow-rank", str(draw.randrange(_DEVICES)), "--sleep", sleep)
    few = ("--layers", str(layers), "--width", "64", "--batch-size", "64")
    short = ("--sequence", str(length), "--width", "64", "--batch-size")
    return [
        Case(name="slow rank", causes=("slowest rank",), planted=slow),
        Case(name="slow loader", causes=("input",), planted=("--load", load)),
        Case(name="slow link", causes=("communication",), planted=(), network=link),
        Case(name="tiny buckets", causes=("small buckets",), planted=(*few, "--bucket-cap-mb", "0.0001"), clean=few),
        Case(name="contention", causes=("contention",), planted=(), busy=busy),
        Case(
            name="small batch",
            causes=("small batch",),
            planted=(*short, str(batch)),
            clean=(*short, str(batch + 8)),
            larger_batch=batch + 8,
        ),
        Case(name="two causes", causes=("slowest rank", "input"), planted=(*slow, "--load", load)),
        Case(name="healthy", causes=(), planted=()),
    ]


def found(case: Case, report: Progress) -> Found:
    """Let ``explain`` find the causes of a case, and time what the first one costs."""
    report(f"{case.name}: explain")
    with _busy(case.busy):
        explained = explain_script(
            ScriptToExplain(script=str(_JOB), arguments=case.planted, devices=_DEVICES, network=case.network), report
        )
    report(f"{case.name}: timing")
    causes = explained.causes
    return Found(
        case=case,
        causes=tuple(each.kind for each in causes),
        seconds=min(causes, key=lambda each: (each.kind,) != case.causes[:1]).seconds if causes else 0.0,
        step_s=explained.step_s,
        truth_s=_truth_s(case),
    )


def _truth_s(case: Case) -> float:
    """What the first cause costs: with it less without it, the median of each, timed in turns."""
    if not case.causes:
        return 0.0
    turns = [(_step_s(case), _step_s(case, clean=True)) for _ in range(_TURNS)]
    planted_s, clean_s = map(float, np.median(turns, axis=0))
    if case.larger_batch:  # what the samples take, by the line through both batches
        batch = int(case.planted[-1])
        clean_s = (clean_s - planted_s) * batch / (case.larger_batch - batch)
    return planted_s - clean_s


def _step_s(case: Case, *, clean: bool = False) -> float:
    """The mean step of a training, timed by itself."""
    arguments = case.clean if clean else case.planted
    if case.network != "node":
        network = "node" if clean else case.network
        planted = ScriptToExplain(script=str(_JOB), arguments=arguments, devices=_DEVICES, network=network)
        return float(Steps(observe(planted)).step_s.mean())
    if case.name == "two causes" and clean:
        arguments = case.planted[4:]  # its first cause is the slow rank
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_DEVICES), str(_JOB))
    with _busy(0 if clean else case.busy):
        ended = subprocess.run(
            [*torchrun, "--count", str(_COUNT), *arguments], stdout=subprocess.PIPE, text=True, check=True
        )
    return float(json.loads(ended.stdout.split()[-1]))


@contextmanager
def _busy(processes: int) -> Iterator[None]:
    """So many processes that compute beside the training."""
    with ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(child([sys.executable, "-c", _BUSY]))
        yield


def line(found: Found) -> str:
    """Return what is printed of a case."""
    case = found.case
    named = ", ".join(found.causes) or "none"
    if not case.causes:
        return f"{case.name}: causes named: {named}; step {found.step_s * 1e3:.0f} ms"
    return (
        f"{case.name}: causes named: {named}; {case.causes[0]} {found.seconds * 1e3:.1f} ms, timed "
        f"{found.truth_s * 1e3:.1f} ms ({found.error:+.1%}); step {found.step_s * 1e3:.0f} ms"
    )


def main() -> int:
    """Run the cases that the command line names; the exit code."""
    options = command.parser("planted_causes", __doc__)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="(at random)")
    options.add_argument("--case", action="append", default=[], help="only this case; may be repeated")
    given = options.parse_args()

    def run() -> None:
        print(f"seed {given.seed}", flush=True)
        for case in cases(given.seed):
            if not given.case or case.name in given.case:
                print(line(found(case, command.tell)), flush=True)

    return command.ended("planted_causes", run)


if __name__ == "__main__":
    sys.exit(main())
