"""``python -m dpsim.experiments.accuracy`` measures how right predictions are, and how often their intervals hold.

Each of many sweeps profiles, calibrates, predicts and then measures; finished ones are kept with all raw samples, so
that a run that was cut off goes on where it stopped. The table has a line for each number that is promised.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dpsim import codec
from dpsim.errors import DpsimError
from dpsim.experiments import emulation, waiting
from dpsim.experiments.accuracy import declared, store
from dpsim.experiments.accuracy.derive import EMULATION, WAITING, derive
from dpsim.experiments.accuracy.quality import study
from dpsim.experiments.accuracy.table import into


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.accuracy", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("reports/accuracy"), help="folder for the records")
    parser.add_argument("--quick", action="store_true", help="a few rounds: 10 minutes instead of 60")
    parser.add_argument("--no-run", action="store_true", help="only derive the table from the records that are there")
    parser.add_argument("--readme", type=Path, help="a file with marks, between which the short table is written")
    arguments = parser.parse_args()
    begin_s = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{(time.monotonic() - begin_s) / 60:5.1f} min] {line}", file=sys.stderr, flush=True)

    experiments = declared.experiments(quick=arguments.quick)
    try:
        if not arguments.no_run:
            if not (arguments.output / EMULATION).exists():
                codec.write(arguments.output / EMULATION, emulation.measure(emulation.CASES, progress))
            if not (arguments.output / WAITING).exists():
                codec.write(arguments.output / WAITING, waiting.measure(waiting.CASES, progress))
            store.run(experiments, arguments.output / "sweeps", progress)
            study(arguments.output / "quality", progress, quick=arguments.quick)
        derived = derive(arguments.output, experiments)
        if derived is None:
            parser.error(f"{arguments.output} has no finished sweep")
        if arguments.readme is not None:
            into(arguments.readme, derived.summary)
    except DpsimError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    print(derived.table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
