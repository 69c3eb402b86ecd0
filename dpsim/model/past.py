"""The residuals of this machine's own past studies: one file for each type of machine, beside the compiled kernels.

They are only kept here: ``residuals`` makes of them the factor by which ``interval`` widens the next predictions.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import DpsimError
from dpsim.kernels import cache
from dpsim.machine import Machine
from dpsim.model.residuals import MODEL, SCHEMA, Residual, Residuals, widths

MOST_STUDIES = 100
"""Of older ones the machine may be another by now."""


def folder() -> Path | None:
    """Return where the files are: ``$DPSIM_STUDIES_DIR``, else beside the compiled kernels; None without a place."""
    if own := os.environ.get("DPSIM_STUDIES_DIR"):
        return Path(own)
    kernels = cache.folder()
    return None if kernels is None else kernels.parent / "studies"


def load(processor: str, cores: int) -> tuple[Residual, ...]:
    """Return the residuals of past studies on a type of machine. A file that cannot be read counts as none."""
    path = _path(_measured_on(processor, cores))
    if path is None:
        return ()
    try:
        return codec.read(path, Residuals, "residuals", SCHEMA).residuals
    except (DpsimError, OSError):
        return ()


def add(processor: str, cores: int, new: Sequence[Residual]) -> None:
    """Keep the residuals of a finished study; one that is kept already is not kept twice."""
    measured_on = _measured_on(processor, cores)
    path = _path(measured_on)
    if path is None:
        return
    with contextlib.suppress(OSError, DpsimError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            residuals = load(processor, cores)
            studies = {residual.study for residual in residuals}
            every = (*residuals, *(residual for residual in new if residual.study not in studies))
            latest = {*list(dict.fromkeys(residual.study for residual in every))[-MOST_STUDIES:]}
            within = tuple(residual for residual in every if residual.study in latest)
            codec.write_record(path, Residuals(measured_on=measured_on, residuals=within))


def with_past_studies(machine: Machine) -> Machine:
    """Return a calibrated machine with what past studies on this type of machine say of predictions made beforehand.

    One that does not say what was measured of its speed, or whose widths are assumed already, stays as it is:
    published tables or a person say what is known of it, and none of the past studies is of such a machine.
    """
    if machine.relative_uncertainty is None or "interval_widths" in machine.assumed:
        return machine
    past = load(machine.calibrated_on.partition(",")[0], machine.cores)
    return msgspec.structs.replace(machine, interval_widths=widths(past, "beforehand"))


def _measured_on(processor: str, cores: int) -> str:
    return f"{processor}, {cores} cores"


def _path(measured_on: str) -> Path | None:
    """The file of a type of machine and of this version of the model."""
    place = folder()
    key = hashlib.sha256(measured_on.encode()).hexdigest()[:16]
    return None if place is None else place / f"studies-{MODEL}-{key}.json"
