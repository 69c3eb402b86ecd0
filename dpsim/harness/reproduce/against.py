"""A reproduction held against a saved one, on the same machine type: a digest belongs to one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dpsim.errors import ConfigError
from dpsim.harness.measurement.environment import environment
from dpsim.harness.reproduce.difference import first_difference
from dpsim.nn.kernel_table import committed
from dpsim.records.reproduce import Configuration, ReproduceRecord, Reproduction, SavedComparison, Trajectory, read
from dpsim.records.sweep import Environment

BIT_VARIABLES = ("OPENBLAS_", "OMP_", "MKL_", "NUMBA_")
"""Beginnings of the names of variables that may change bits."""
_TRAINING = ("model", "dataset", "steps", "global_batch", "optimizer", "seed", "wire_dtype")


def machine_type(here: Environment) -> dict[str, str]:
    """What a digest belongs to: processor, BLAS with its architecture, library versions, and variables."""
    variables = {name: value for name, value in here.variables.items() if name.startswith(BIT_VARIABLES)}
    versions = {"NumPy": here.numpy, "numba": here.numba, "MPI": here.mpi}
    return {"processor": here.processor, "BLAS": here.blas, **versions, **variables}


def check_comparable(path: Path, reproduction: Reproduction, *, across_machines: bool) -> ReproduceRecord:
    """The saved record, if a comparison with it would mean something; before anything runs.

    Raises ``FileFormatError``; ``ConfigError`` for another training, and for another machine type without
    ``across_machines``.
    """
    saved = read(path)
    differing = [
        f"{name} is {getattr(saved.reproduction, name)!r} there, {getattr(reproduction, name)!r} here"
        for name in _TRAINING
        if getattr(saved.reproduction, name) != getattr(reproduction, name)
    ]
    if differing:
        raise ConfigError(
            f"the run in {path} is another training: {'; '.join(differing)}",
            allowed="a saved run of the same model, data, batch, optimizer, seed, steps and wire dtype",
            remedy="give the flags that it was made with",
        )
    if not pairs(saved, reproduction):
        raise ConfigError(
            f"the run in {path} has nothing that this one has, for batch norm {', '.join(reproduction.batch_norms)}"
            f" with {reproduction.leaves} leaves",
            allowed="a mode and leaves that both have, or without leaves the same configurations",
            remedy="give the --batch-norm and --leaves that it was made with",
        )
    other = _other_machine(saved, environment(), committed().digest)
    if other and not across_machines:
        raise ConfigError(
            f"the run in {path} was made on another machine type: {'; '.join(other)}",
            allowed="the same processor, BLAS architecture, OPENBLAS_* and OMP_* variables, library versions and"
            " kernel table: a digest belongs to one",
            remedy="make it again here, or compare all the same with --across-machines",
        )
    return saved


def pairs(saved: ReproduceRecord, reproduction: Reproduction) -> list[tuple[Configuration, Configuration]]:
    """(saved, here) of what should be the same: one pair for a mode with leaves, else each configuration itself."""
    there = [run.configuration for run in saved.runs]
    found: list[tuple[Configuration, Configuration]] = []
    promised: set[tuple[str, int]] = set()
    for one in reproduction.configurations():
        mode = (one.batch_norm, one.leaves)
        same = [other for other in there if (other.batch_norm, other.leaves) == mode]
        if not one.promised:
            found += [(other, one) for other in same if other == one]
        elif same and mode not in promised:
            promised.add(mode)
            found.append((same[0], one))
    return found


def against(record: ReproduceRecord, saved: ReproduceRecord, path: Path) -> ReproduceRecord:
    """The record with its comparison with a saved one."""
    chosen = [pair for pair in pairs(saved, record.reproduction) if _trajectory(record, pair[1]) is not None]
    differences = []
    for there, here in chosen:
        before, after = _trajectory(saved, there), _trajectory(record, here)
        differences.append(first_difference(before, after) if before and after else None)
    beside = SavedComparison(
        path=str(path),
        compared=tuple(here for _, here in chosen),
        differences=tuple(differences),
        across_machines=tuple(_other_machine(saved, record.environment, record.kernel_table)),
    )
    return msgspec.structs.replace(record, saved_comparison=beside)


def _trajectory(record: ReproduceRecord, configuration: Configuration) -> Trajectory | None:
    found = (run.trajectory for run in record.runs if run.configuration == configuration)
    number = next(found, None)
    return None if number is None else record.trajectories[number]


def _other_machine(saved: ReproduceRecord, here: Environment, kernel_table: str) -> list[str]:
    then, now = machine_type(saved.environment), machine_type(here)
    if saved.kernel_table:  # older records do not name it
        then, now = then | {"kernel table": saved.kernel_table}, now | {"kernel table": kernel_table}
    return [
        f"{name} is {then.get(name, 'not set')} there, {now.get(name, 'not set')} here"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
