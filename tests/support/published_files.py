"""The committed machine and workload files, and the ``dpsim predict`` command that reads one of each."""

from __future__ import annotations

from pathlib import Path

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
WORKLOAD = EXPERIMENTS / "machines" / "googlenet_k80.toml"
MACHINE = EXPERIMENTS / "machines" / "k80_10gbe.toml"
PREDICT = ("predict", "--workload", str(WORKLOAD), "--machine", str(MACHINE))
