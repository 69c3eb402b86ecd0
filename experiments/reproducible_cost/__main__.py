"""``python -m dpsim.experiments.reproducible_cost`` times reproducible training against the plain one.

For each case every mode trains a replica of its own on real ranks, pinned; they take turns of a few steps in random
order. Printed: medians, ratios to the plain step with their 95 % intervals, and the plain step's ratio to itself (A/A).
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from dpsim import codec
from dpsim.errors import DpsimError
from dpsim.experiments.reproducible_cost.cases import CostRecord, Measured, cases
from dpsim.experiments.reproducible_cost.show import lines, write
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.launch.jobs import on_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.reproducible_cost", description=__doc__)
    parser.add_argument("--model", default="*", help="those that match, such as 'resnet*' (all)")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--global-batch", type=int, nargs="+", help="those alone (all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--output", type=Path, help="folder for the record and the report")
    told = parser.parse_args()
    chosen = [
        case
        for case in cases()
        if fnmatch.fnmatch(case.model, told.model)
        and case.devices in told.devices
        and (told.global_batch is None or case.global_batch in told.global_batch)
    ]
    if not chosen:
        parser.error(f"no case fits; there are {', '.join(sorted({case.model for case in cases()}))}")
    begun, measured = stamp(), []
    try:
        for case in chosen:
            argument = {"case": codec.to_builtins(case), "seconds": told.seconds}
            found = on_ranks(
                "dpsim.experiments.reproducible_cost.measure:measure", argument, devices=case.devices, pin=True
            )
            measured.append(Measured(case=case, step_s={name: tuple(steps) for name, steps in found.items()}))
            print("\n".join(lines(measured[-1])), flush=True)
        record = CostRecord(
            environment=environment(), measured_from=begun, measured_until=stamp(), measured=tuple(measured)
        )
        if told.output is not None:
            print(f"report: {write(told.output, record)}")
    except DpsimError as error:
        print(f"reproducible_cost: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
