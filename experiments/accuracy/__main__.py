"""``python -m dpsim.experiments.accuracy`` measures how right predictions are, and how often their intervals hold.

Each of many sweeps profiles, calibrates, predicts and then measures; finished ones are kept with all raw samples, so
that a run that was cut off goes on where it stopped. The table has a line for each number that is promised.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dpsim import codec
from dpsim.errors import DpsimError
from dpsim.experiments import emulation, waiting
from dpsim.experiments.accuracy import declared, store
from dpsim.experiments.accuracy.lines import Line, emulation_lines, lines, waiting_lines
from dpsim.experiments.accuracy.quality import quality_lines, study
from dpsim.experiments.accuracy.table import into, markdown
from dpsim.harness.measurement.environment import environment
from dpsim.records.comparison import Comparison

EMULATION, WAITING = "emulation.json", "waiting.json"


def _emulation(path: Path) -> Iterator[Line]:
    if path.exists():
        yield from emulation_lines(codec.read(path, emulation.EmulationRecord, "record of emulation", emulation.SCHEMA))


def _waiting(path: Path) -> Iterator[Line]:
    if path.exists():
        yield from waiting_lines(codec.read(path, waiting.WaitingRecord, "record of waiting", waiting.SCHEMA))


def _processor(comparisons: dict[str, Comparison]) -> str:
    """The processors on which the sweeps ran."""
    calibrated = {point.calibrated_on.split(",")[0] for each in comparisons.values() for point in each.points}
    return " and ".join(sorted(calibrated - {""})) or environment().processor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.accuracy", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("reports/accuracy"), help="folder for the records")
    parser.add_argument("--quick", action="store_true", help="a few rounds: 10 minutes instead of 60")
    parser.add_argument("--no-run", action="store_true", help="only derive the table from the records that are there")
    parser.add_argument("--readme", type=Path, help="a file with marks, between which the table is written")
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
        comparisons = dict(store.finished(experiments, arguments.output / "sweeps"))
        measured = (
            *lines(comparisons),
            *_emulation(arguments.output / EMULATION),
            *_waiting(arguments.output / WAITING),
            *quality_lines(arguments.output / "quality"),
        )
        if not measured:
            parser.error(f"{arguments.output} has no finished sweep")
        finished = f"; {len(comparisons)} of {len(experiments)} sweeps have finished"
        table = markdown(measured, _processor(comparisons), finished)
        codec.write_text(arguments.output / "report.md", f"# How right the predictions are\n\n{table}\n")
        if arguments.readme is not None:
            into(arguments.readme, table)
    except DpsimError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
