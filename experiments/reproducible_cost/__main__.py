"""``python -m dpsim.experiments.reproducible_cost`` times reproducible training against the plain one.

In each case every mode trains a replica of its own on pinned ranks, and they take turns of a few steps in random
order. It prints medians, ratios to the plain step with 95 % intervals, and the plain step's ratio to itself (A/A).
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
    parser.add_argument("--model", default="*", help="models to time, such as 'resnet*' (all)")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--global-batch", type=int, nargs="+", help="global batches to time (all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--output", type=Path, help="folder for the record and the report")
    arguments = parser.parse_args()
    selected = [
        case
        for case in cases()
        if fnmatch.fnmatch(case.model, arguments.model)
        and case.devices in arguments.devices
        and (arguments.global_batch is None or case.global_batch in arguments.global_batch)
    ]
    if not selected:
        parser.error(f"no case fits; there are {', '.join(sorted({case.model for case in cases()}))}")
    measured_from, measured = stamp(), []
    try:
        for case in selected:
            task = {"case": codec.to_builtins(case), "seconds": arguments.seconds}
            results = on_ranks(
                "dpsim.experiments.reproducible_cost.measure:measure", task, devices=case.devices, pin=True
            )
            measured.append(Measured(case=case, step_s={name: tuple(steps) for name, steps in results.items()}))
            print("\n".join(lines(measured[-1])), flush=True)
        record = CostRecord(
            environment=environment(), measured_from=measured_from, measured_until=stamp(), measured=tuple(measured)
        )
        if arguments.output is not None:
            print(f"report: {write(arguments.output, record)}")
    except DpsimError as error:
        print(f"reproducible_cost: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
