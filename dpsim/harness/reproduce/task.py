"""What the ranks of a reproduction are asked, and what they answer. Loads no MPI."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.records.reproduce import Configuration, DriftInputs, Reproduction, Trajectory


class Task(Noun, frozen=True):
    """Trainings, one after another, each on the first ranks of the job.

    ``files`` are where rank 0 keeps arrays of each, empty for nowhere.

    With ``until`` each ends after so many steps (its own number), and its file says what that step did to every
    sample; without, its file has the final parameters and what a prediction of drift is held against.
    """

    reproduction: Reproduction
    configurations: tuple[Configuration, ...]
    files: tuple[str, ...]
    until: tuple[int, ...] = ()


class RunOutcome(Noun, frozen=True):
    """One configuration's outcome; ``basis`` on one device, for a mode whose bits depend on how it is run."""

    trajectory: Trajectory
    ranks_agree: bool
    basis: DriftInputs | None = None
