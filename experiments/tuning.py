"""``python -m dpsim.experiments.tuning SCRIPT...`` measures what following the advice of ``dpsim tune`` costs.

Each script is tuned on two ranks. Then DDP trains in turns with the default cap, the advised one, up to four from the
predicted fastest to the second slowest, and the advised local batch. The regret of the advised cap is its time per
sample over that of the best measured cap - 1, where the best is chosen on other rounds than it is timed on; so is that
of the advised batch over the default one. Scripts take no arguments.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpsim import codec
from dpsim.codec import Noun
from dpsim.experiments import command
from dpsim.harness.torch_ddp.experiment import script_experiment
from dpsim.harness.torch_ddp.tune import measure_advised, profiled, tune_here
from dpsim.harness.tuned import measured_regret
from dpsim.progress import Progress
from dpsim.records.sweep import Environment
from dpsim.report.tuning import cap_bytes, measured_records
from dpsim.report.words import percent
from dpsim.study.environment import environment

_CAPS = 4


class Outcome(Noun, frozen=True):
    """What came of a script: what was advised, its gain over the default, and the regrets of cap and batch.

    ``most`` is the largest measured gain of any cap, and ``noise`` the A/A difference.
    """

    script: str
    cap: str
    predicted_gain: float
    measured_gain: float
    most: float
    regret: float
    batch: float
    batch_regret: float
    noise: float


class TuningRecord(Noun, frozen=True):
    """All scripts of one run."""

    environment: Environment
    outcomes: tuple[Outcome, ...]
    schema: str = "dpsim.tuning/1"


def outcome(script: str, folder: Path, progress: Progress) -> Outcome:
    """Tune a script, and measure caps and batches; what ``folder`` holds is not done again. Raises ``ConfigError``."""
    declared = script_experiment(script, communication=("gloo",))
    known = profiled(declared, (), progress, may_write=False)
    tuned = tune_here(declared, known, folder, progress, may_write=False)[0].advised
    places = np.linspace(0, max(len(tuned.caps) - 2, 0), _CAPS)
    options = {tuned.default, tuned.advised, *(tuned.caps[round(place)] for place in places), tuned.batches[0]}
    plans = sorted({each.plan for each in options}, key=lambda plan: (plan != tuned.default.plan, plan.threshold_bytes))
    comparison = measure_advised(declared, known, plans, folder, progress, may_write=False)
    rows = {row["plan"]: row for row in measured_records(comparison, tuned)}
    advised = rows[tuned.advised.plan]
    return Outcome(
        script=Path(script).name,
        cap=cap_bytes(tuned.advised.plan),
        predicted_gain=advised["predicted_gain"],
        measured_gain=advised["gain"],
        most=max(row["gain"] for row in rows.values() if row["cap_alone"]),
        regret=measured_regret(comparison, tuned.caps, tuned.advised),
        batch=tuned.batches[0].plan.local_batch,
        batch_regret=measured_regret(comparison, tuned.batches, tuned.batches[0]),
        noise=advised["aa"],
    )


def lines(record: TuningRecord) -> list[str]:
    """Return a line for each script, and the median and the worst regret."""
    shown = [
        f"{each.script}: bucket cap {each.cap} (gain predicted {each.predicted_gain:.3f}, measured"
        f" {each.measured_gain:.3f}, at most {each.most:.3f}), regret {percent(each.regret)}; local batch"
        f" {each.batch:g}, regret {percent(each.batch_regret)}; A/A difference {percent(each.noise)}"
        for each in record.outcomes
    ]
    for what, regrets in (
        ("caps", [each.regret for each in record.outcomes]),
        ("batches", [each.batch_regret for each in record.outcomes]),
    ):
        shown.append(f"regret of {what}: {percent(float(np.median(regrets)))} median, {percent(max(regrets))} worst")
    return shown


def main() -> int:
    options = command.parser("tuning", __doc__)
    options.add_argument("scripts", nargs="+", metavar="SCRIPT", help="a script that trains with DDP")
    options.add_argument(
        "--output", type=Path, required=True, help="folder for the records; an interrupted run goes on"
    )
    given = options.parse_args()

    def run() -> None:
        folders = [(script, given.output / Path(script).stem) for script in given.scripts]
        record = TuningRecord(environment(), tuple(outcome(*each, command.tell) for each in folders))
        codec.write(given.output / "tuning.json", record)
        print("\n".join(lines(record)))

    return command.ended("tuning", run)


if __name__ == "__main__":
    raise SystemExit(main())
