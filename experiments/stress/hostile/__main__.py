"""Attacks dpsim and counts what goes wrong.

``python -m dpsim.experiments.stress.hostile [--parts kills,readers,commands,connections] [--cases 50] [--seed 0]
[--output FOLDER]``. Without ``--cases``: 200 signals to processes of every kind of eleven commands, 20,000 damaged
inputs for the readers, 1,000 for the command line, and 1,000 connections to the port of running jobs. A file of the
user's that was changed or removed counts as wrong, too. With ``--output`` the counts are kept there as JSON, and an
interrupted part continues from them. Exits with 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from dpsim.errors import DpsimError, unknown
from dpsim.experiments.stress.hostile import commands, connections, kills, readers
from dpsim.experiments.stress.hostile.tally import Tally, tallied
from dpsim.launch.scratch import scratch

PARTS = {
    "kills": (kills.run, 200),
    "readers": (readers.run, 20_000),
    "commands": (commands.run, 1_000),
    "connections": (connections.run, 1_000),
}


def attack(part: str, cases: int | None, seed: int, output: Path | None) -> Tally:
    """Run ``cases`` cases of a part (None: its default). Raises ``ConfigError`` for an unknown part."""
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    run, default = PARTS[part]
    last = default if cases is None else cases
    file = None if output is None else output / f"{part}.json"
    with scratch("hostile") as folder:
        return tallied(part, seed, last, file, lambda first, add: run(first, last, seed, folder, add))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    wrong = 0
    try:
        for part in arguments.parts.split(","):
            begin_s = time.monotonic()
            tally = attack(part, arguments.cases, arguments.seed, arguments.output)
            print(f"{tally.text()}\n  {time.monotonic() - begin_s:.0f} s", flush=True)
            wrong += len(tally.wrong)
    except DpsimError as error:
        print(f"hostile: {error}", file=sys.stderr)
        return 2
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
