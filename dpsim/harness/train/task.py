"""What the ranks of a training run are given. Loads no MPI."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.harness.train.config import TrainConfig
from dpsim.workload import Workload


class Costs(Noun, frozen=True):
    """What a fusion rule that needs costs is given: the profiled workload, and alpha-beta of an allreduce."""

    workload: Workload
    alpha_s: float
    beta_s_per_byte: float


class TrainTask(Noun, frozen=True):
    """A configuration, and the costs that were measured for it."""

    config: TrainConfig
    costs: Costs | None = None
