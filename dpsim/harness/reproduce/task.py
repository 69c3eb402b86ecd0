"""What the ranks of a reproduction receive and return. Loads no MPI."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.records.reproduce import Configuration, DriftInputs, Reproduction, Trajectory


class Task(Noun, frozen=True):
    """Trainings, one after another, each on the first ranks of the job.

    ``files`` are where rank 0 saves arrays of each training (empty: nowhere). Without ``until`` a file has the final
    parameters, and the batch-norm means with which predicted drift is compared. With ``until`` each training ends after
    its own number of steps, and its file is the dump of that last step.
    """

    reproduction: Reproduction
    configurations: tuple[Configuration, ...]
    files: tuple[str, ...]
    until: tuple[int, ...] = ()


class RunOutcome(Noun, frozen=True):
    """The outcome of one configuration. ``drift_inputs`` are measured on one device, in modes without a promise."""

    trajectory: Trajectory
    ranks_agree: bool
    drift_inputs: DriftInputs | None = None
