"""``python -m dpsim.experiments.accuracy`` measures how right predictions are, and how often their intervals hold.

Each of many sweeps profiles, calibrates, predicts and then measures; finished ones are kept with all raw samples, so
that a run that was cut off goes on where it stopped. The table has a line for each number that is promised.
"""

from __future__ import annotations

import time
from pathlib import Path

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.experiments import command, emulation, waiting
from dpsim.experiments.accuracy.declared import experiments
from dpsim.experiments.accuracy.derive import derive, run_sweeps, write_residuals
from dpsim.experiments.accuracy.page import into
from dpsim.experiments.quality.__main__ import measured
from dpsim.harness.sweep.check import checked
from dpsim.harness.sweep.packed import SUFFIX, read


def main() -> int:
    options = command.parser("accuracy", __doc__)
    options.add_argument("--output", type=Path, default=Path("reports/accuracy"), help="folder for the records")
    options.add_argument("--quick", action="store_true", help="a few rounds: 10 minutes instead of 60")
    options.add_argument("--no-run", action="store_true", help="only derive the table from the records that are there")
    options.add_argument("--check", action="store_true", help="only predict each record again, as report --check does")
    options.add_argument("--readme", type=Path, help="a file with marks, between which the short table is written")
    options.add_argument("--residuals", type=Path, help="a file for the residuals, as they come with dpsim")
    given = options.parse_args()
    begin_s, declared = time.monotonic(), experiments(quick=given.quick)

    def progress(line: str) -> None:
        command.tell(f"[{(time.monotonic() - begin_s) / 60:5.1f} min] {line}")

    def run() -> None:
        folder: Path = given.output
        if not given.no_run:
            for each in (emulation, waiting):
                if not (path := folder / f"{each.STUDY.name}.json").exists():
                    codec.write_record(path, each.STUDY.measure(each.CASES, progress))
            run_sweeps(declared, folder / "sweeps", progress)
            measured("quick" if given.quick else "full", folder / "quality", progress)
        derived = derive(folder, declared)
        if derived is None:
            options.error(f"{folder} has no finished sweep")
        if given.readme is not None:
            into(given.readme, derived.summary)
        if given.residuals is not None:
            write_residuals(given.residuals, declared, folder / "sweeps")
        print(derived.table)

    def check() -> None:
        for each in declared:
            if (path := given.output / "sweeps" / f"{each.name}{SUFFIX}").exists():
                found = checked(read(path))
                print(f"{each.name}: {found.verdict} (model {found.model_version}) {found.damage}".rstrip(), flush=True)
                if found.damage:
                    raise FileFormatError(f"{path} is damaged: {found.damage}")

    return command.ended("accuracy", check if given.check else run)


if __name__ == "__main__":
    raise SystemExit(main())
