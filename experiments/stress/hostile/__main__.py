"""Attacks dpsim and counts what goes wrong.

``python -m dpsim.experiments.stress.hostile [--parts kills,readers,commands,connections] [--cases 50] [--seed 0]
[--output FOLDER]``. Without ``--cases``: 200 signals to processes of every kind of eleven commands, 20,000 damaged
inputs for the readers, 1,000 for the command line, and 1,000 connections to the port of running jobs. A file of the
user's that was changed or removed counts as wrong, too. With ``--output`` the counts are kept there as JSON, and an
interrupted part continues from them. Exits with 1 if anything went wrong.
"""

from __future__ import annotations

import sys

from dpsim.experiments.stress.hostile import commands, connections, kills, readers
from dpsim.experiments.stress.tally import Part, main

PARTS = {
    "kills": Part(kills.run, 200),
    "readers": Part(readers.run, 20_000),
    "commands": Part(commands.run, 1_000),
    "connections": Part(connections.run, 1_000),
}

if __name__ == "__main__":
    sys.exit(main("hostile", __doc__, PARTS))
