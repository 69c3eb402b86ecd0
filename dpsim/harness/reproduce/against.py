"""Compares a reproduction with a saved one; between types of machines a difference is shown and not held against it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dpsim.errors import ConfigError
from dpsim.fields import Decides, deciding
from dpsim.harness.reproduce.difference import first_difference
from dpsim.plan import Plan
from dpsim.records.reproduce import ReproduceRecord, Reproduction, SavedComparison, Trajectory, promised, read
from dpsim.records.sweep import Environment
from dpsim.setting import Setting

BIT_VARIABLES = ("OPENBLAS_", "OMP_", "MKL_", "NUMBA_")
"""Prefixes of the environment variables that may change bits."""
_COMPARED_APART = ("batch_norms", "leaves")
"""Modes are trainings of their own: those that both runs have are compared."""


def machine_type(environment: Environment) -> dict[str, str]:
    """Return what a digest depends on: processor, BLAS with its architecture, library versions, and variables."""
    variables = {name: value for name, value in environment.variables.items() if name.startswith(BIT_VARIABLES)}
    versions = {"NumPy": environment.numpy, "numba": environment.numba, "MPI": environment.mpi}
    return {"processor": environment.processor, "BLAS": environment.blas, **versions, **variables}


def check_comparable(path: Path, reproduction: Reproduction) -> ReproduceRecord:
    """Read a saved record and check, before anything runs, that it is of the same training.

    Raises ``FileFormatError``, ``ConfigError``.
    """
    saved = read(path)
    names = [name for name in deciding(Decides.BITS, Reproduction, Plan, Setting) if name not in _COMPARED_APART]
    differing = [
        f"{name} is {getattr(saved.reproduction, name)!r} there, {getattr(reproduction, name)!r} here"
        for name in names
        if getattr(saved.reproduction, name) != getattr(reproduction, name)
    ]
    if differing:
        raise ConfigError(
            f"the run in {path} is another training: {'; '.join(differing)}",
            allowed=f"a saved run of the same {', '.join(name.replace('_', ' ') for name in names)}",
            remedy="give the flags that it was made with",
        )
    if not pairs(saved, reproduction):
        raise ConfigError(
            f"the run in {path} has no configuration to compare with, for batch norm "
            f"{', '.join(reproduction.batch_norms)} with {reproduction.leaves} leaves",
            allowed="the same batch norm and leaves; without leaves also the same configurations",
            remedy="give the --batch-norm and --set leaves that it was made with",
        )
    return saved


def pairs(saved: ReproduceRecord, reproduction: Reproduction) -> list[tuple[Plan, Plan]]:
    """Return (saved, current) plans to compare: one pair for a mode with leaves, else equal plans."""
    pairs: list[tuple[Plan, Plan]] = []
    compared: set[tuple[str, int]] = set()
    for current in reproduction.plans():
        mode = (current.batch_norm, current.leaves)
        same_mode = [run.plan for run in saved.runs if (run.plan.batch_norm, run.plan.leaves) == mode]
        if not promised(current):
            pairs += [(other, current) for other in same_mode if other == current]
        elif same_mode and mode not in compared:
            compared.add(mode)
            pairs.append((same_mode[0], current))
    return pairs


def compare_with_saved(record: ReproduceRecord, saved: ReproduceRecord, path: Path) -> ReproduceRecord:
    """Return the record with its comparison with the saved one in ``path``."""
    trained = [
        (current, first_difference(expected, actual))
        for before, current in pairs(saved, record.reproduction)
        if (expected := _trajectory(saved, before)) is not None and (actual := _trajectory(record, current)) is not None
    ]
    comparison = SavedComparison(
        path=str(path),
        compared=tuple(plan for plan, _ in trained),
        differences=tuple(difference for _, difference in trained),
        across_machines=tuple(_other_machine(saved, record.environment, record.kernel_table)),
    )
    return msgspec.structs.replace(record, saved_comparison=comparison)


def _trajectory(record: ReproduceRecord, plan: Plan) -> Trajectory | None:
    return next((record.trajectories[run.trajectory] for run in record.runs if run.plan == plan), None)


def _other_machine(saved: ReproduceRecord, environment: Environment, kernel_table: str) -> list[str]:
    before, now = machine_type(saved.environment), machine_type(environment)
    if saved.kernel_table:  # older records do not have it
        before, now = before | {"kernel table": saved.kernel_table}, now | {"kernel table": kernel_table}
    return [
        f"{name} is {before.get(name, 'not set')} there, {now.get(name, 'not set')} here"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
