"""The command of an experiment that measures cases, prints a line for each, and may write its record to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import DpsimError
from dpsim.progress import Progress

Record = TypeVar("Record", bound=Noun)


def run(
    name: str, description: str | None, measure: Callable[[Progress], Record], lines: Callable[[Record], list[str]]
) -> int:
    """Measure as ``python -m dpsim.experiments.NAME [--output FILE]`` and return the exit code: 2 after an error."""
    parser = argparse.ArgumentParser(prog=f"python -m dpsim.experiments.{name}", description=description)
    parser.add_argument("--output", type=Path, help="file for the record (.json)")
    arguments = parser.parse_args()
    try:
        record = measure(lambda line: print(line, file=sys.stderr, flush=True))
        if arguments.output is not None:
            codec.write(arguments.output, record)
    except DpsimError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(record)))
    return 0
