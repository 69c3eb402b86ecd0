"""What a Python program calls outside a job of ranks: the readers of files, and a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpsim import machine, workload
from dpsim.progress import Progress, no_progress

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.records.sweep import Experiment
    from dpsim.report.saved import SavedResult
    from dpsim.workload import Workload


def read_workload(path: Path | str) -> Workload:
    """Read a workload file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return workload.read(path)


def read_machine(path: Path | str) -> Machine:
    """Read a machine file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return machine.read(path)


def sweep(experiment: Experiment | Path | str, folder: Path | str, progress: Progress = no_progress) -> SavedResult:
    """Run a sweep into ``folder``, or continue it where it stopped, and return its result.

    ``experiment`` is the file that declares it, or the experiment itself. Raises ``ConfigError`` and
    ``CommunicationError``.
    """
    from dpsim.harness.load import KINDS
    from dpsim.harness.sweep.sweep import sweep as run
    from dpsim.records.sweep import read_experiment
    from dpsim.report.saved import SavedResult

    declared = read_experiment(experiment) if isinstance(experiment, (Path, str)) else experiment
    return SavedResult(KINDS["sweep"], run(declared, Path(folder), progress))
