"""``profile``: forward and backward time of every layer against the local batch, on this machine; a Workload."""

from __future__ import annotations

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.launch.jobs import on_ranks
from dpsim.machine import ComputeSlowdown
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.workload import Workload


class ProfileConfig(Noun, frozen=True):
    """What to profile: a model on a data set at some local batches.

    ``concurrent`` holds pairs (devices, local batch) at which to measure how much slower the same computation is when
    so many devices of this machine compute at once. ``plan`` says how one device computes; its ``leaves`` count those
    of the largest local batch, and a smaller one has its share of them. ``seconds`` bounds the measuring.
    """

    model: str = "cnn"
    dataset: str = "digits"
    local_batches: tuple[int, ...] = (8, 16, 32, 64)
    concurrent: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    seconds: float = 4.0
    plan: Plan = Plan(devices=1, global_batch=1, fusion_rule="one")

    def __post_init__(self) -> None:
        if not self.local_batches or min(self.local_batches) < 1:
            raise ConfigError(f"local batches {list(self.local_batches)}", allowed="one or more sizes of 1 or more")

    def leaves_of(self, local_batch: int) -> int:
        """Leaves of a local batch: its share of all leaves, and one at least where there are any."""
        leaves = self.plan.leaves
        return min(leaves, max(1, round(leaves * local_batch / max(self.local_batches))))


class Profile(Noun, frozen=True):
    """A workload, how much slower several devices compute at once, and the uncertainty of the mean of later times."""

    workload: Workload
    compute_slowdown: tuple[ComputeSlowdown, ...] = ()
    relative_uncertainty: float | None = None


def profile(config: ProfileConfig, progress: Progress) -> Workload:
    """Profile a model on this machine and return the workload. Raises ``ConfigError``."""
    ranks = max([devices for devices, _ in config.concurrent], default=1)
    plain = on_ranks(
        "dpsim.harness.profile.on_ranks:profile_on_ranks",
        dict(codec.to_builtins(config)),
        devices=ranks,
        progress=progress,
        pin=True,
    )
    return codec.decode(plain, Profile, "profile").workload
