"""``profile``: forward and backward time of every layer against the local batch, on this machine; a Workload."""

from __future__ import annotations

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.launch.jobs import on_ranks
from dpsim.machine import ComputeSlowdown, Speed
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import BatchNormMode
from dpsim.progress import Progress
from dpsim.workload import Workload


class ProfileConfig(Noun, frozen=True):
    """What to profile: a model on a data set at some local batches.

    ``crowd`` names device counts at which to measure, too, how much slower the same computation is when so
    many devices of this machine compute at once, as (devices, local batch). ``leaves`` are those of the largest local
    batch, the global one of one device; a smaller one has its share of them.
    """

    model: str = "cnn"
    dataset: str = "digits"
    local_batches: tuple[int, ...] = (8, 16, 32, 64)
    optimizer: Optimizer = Sgd()
    crowd: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    seconds: float = 4.0
    batch_norm: BatchNormMode = "local"
    leaves: int = 0

    def __post_init__(self) -> None:
        if not self.local_batches or min(self.local_batches) < 1:
            raise ConfigError(f"local batches {list(self.local_batches)}", allowed="one or more sizes of 1 or more")

    def leaves_of(self, local_batch: int) -> int:
        """Leaves of a local batch: the part of all leaves that it is of the largest, one or more if there are any."""
        return min(self.leaves, max(1, round(self.leaves * local_batch / max(self.local_batches))))


class Profile(Noun, frozen=True):
    """A workload at the machine's full speed, how much slower it computes beside others of its kind, and the speeds."""

    workload: Workload
    compute_slowdown: tuple[ComputeSlowdown, ...] = ()
    speed: tuple[Speed, ...] = ()


def profile(config: ProfileConfig, progress: Progress) -> Workload:
    """Profile a model on this machine; the workload as it may be saved. Raises ``ConfigError``."""
    most = max([devices for devices, _ in config.crowd], default=1)
    found = on_ranks(
        "dpsim.harness.profile.on_ranks:profile_on_ranks",
        dict(codec.to_builtins(config)),
        devices=most,
        progress=progress,
        pin=True,
    )
    return codec.decode(found, Profile, "profile").workload
