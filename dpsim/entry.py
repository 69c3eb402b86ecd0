"""What a Python program calls outside a job of ranks: the readers of files, a prediction, and a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from dpsim.arguments import PredictionSettings, shows
from dpsim.errors import ConfigError
from dpsim.machine import read as read_machine_file
from dpsim.progress import Progress, no_progress
from dpsim.workload import read as read_workload_file

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model import Prediction
    from dpsim.plan import Plan
    from dpsim.records.sweep import Experiment
    from dpsim.report.saved import SavedResult
    from dpsim.workload import Workload


def read_workload(path: Path | str) -> Workload:
    """Read a workload file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return read_workload_file(path)


def read_machine(path: Path | str) -> Machine:
    """Read a machine file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return read_machine_file(path)


@shows(PredictionSettings)
def predict(
    workload: Workload | Path | str,
    machine: Machine | Path | str,
    plan: Plan | None = None,
    *,
    devices: int | str | None = None,
    threshold: float | None = None,
    ledger: bool = False,
    **settings: Unpack[PredictionSettings],
) -> Prediction:
    """Predict one step; workload and machine may be files.

    With ``devices`` (8, or a layout: "2x4"), ``threshold`` in bytes and the other ``settings`` that
    ``dpsim.model.predict_points`` takes, the defaults are those of ``dpsim predict``. A ``plan`` is predicted as it is
    written. With ``ledger`` the prediction is kept, to be scored by a run of it (docs/ledger.md). Raises
    ``ConfigError`` and ``FileFormatError``.
    """
    from dpsim.dates import stamp
    from dpsim.model import for_prediction
    from dpsim.model import ledger as kept
    from dpsim.model.points import plan_one, rows_of_plans
    from dpsim.setting import Grid

    known_workload = read_workload(workload) if isinstance(workload, (Path, str)) else workload
    known_machine = read_machine(machine) if isinstance(machine, (Path, str)) else machine
    if isinstance(machine, (Path, str)):
        known_machine = for_prediction(known_workload, known_machine)
    if plan is None and devices is not None:
        grid = Grid.of(devices=devices, fusion_threshold_bytes=threshold, **settings)
        plan, _ = plan_one(known_workload, known_machine, grid)
    elif plan is None or devices is not None or threshold is not None or settings:
        raise ConfigError(
            "neither a plan nor devices" if plan is None else "a plan and other settings",
            allowed="a dpsim.Plan alone, or devices=8 and other settings",
            remedy='write it like dpsim.predict("w.json", "m.json", devices=8, global_batch=64)',
        )
    (row,) = rows_of_plans(known_workload, known_machine, [plan])
    if ledger:
        kept.keep("python", [row], stamp(), {"workload": known_workload, "machine": known_machine})
    return row.prediction


def sweep(experiment: Experiment | Path | str, folder: Path | str, progress: Progress = no_progress) -> SavedResult:
    """Run a sweep into ``folder``, or continue it where it stopped, and return its result.

    ``experiment`` is the file that declares it, or the experiment itself. Where the program that calls this registered
    algorithms, rules or strategies, the ranks run its file too, up to ``if __name__ == "__main__"``. Raises
    ``ConfigError`` and ``CommunicationError``.
    """
    from dpsim.harness.load import KINDS
    from dpsim.harness.sweep.sweep import sweep as run
    from dpsim.launch.program import on_ranks_too
    from dpsim.records.sweep import read_experiment
    from dpsim.report.saved import SavedResult

    declared = read_experiment(experiment) if isinstance(experiment, (Path, str)) else experiment
    with on_ranks_too():
        return SavedResult(KINDS["sweep"], run(declared, Path(folder), progress))
