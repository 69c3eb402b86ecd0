"""``DdpSettings``: what a script told PyTorch's DistributedDataParallel (DDP), and the buckets that DDP made."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.errors import ConfigError


class DdpSettings(Noun, frozen=True):
    """How a script trained, as far as it decides communication.

    ``torch`` is PyTorch's version (empty: not known), ``devices`` the world size that the script was given,
    ``accumulate`` its micro-batches a step (``no_sync``). ``bucket_cap_bytes`` is ``bucket_cap_mb`` in bytes
    (``None``: not set) and ``bucket_caps_bytes`` is ``bucket_cap_mb_list``, one size for each bucket (empty: not set).
    ``communication_hook`` is the hook's name, empty without one. ``initial_bucket_bytes`` are the buckets of the first
    step and ``bucket_bytes`` those of all others, in the order in which DDP sends them, as DDP itself reports them.
    ``sync_batch_norm``: batch norm takes its statistics from all ranks (``SyncBatchNorm``).
    ``whole_buckets``: the workload has a tensor for each of these buckets, as what is in them is not known.
    """

    torch: str
    devices: int
    accumulate: int = 1
    bucket_cap_bytes: int | None = None
    bucket_caps_bytes: tuple[int, ...] = ()
    find_unused_parameters: bool = False
    static_graph: bool = False
    communication_hook: str = ""
    initial_bucket_bytes: tuple[int, ...] = ()
    bucket_bytes: tuple[int, ...] = ()
    whole_buckets: bool = False
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        for key in ("devices", "accumulate"):
            if getattr(self, key) < 1:
                raise ConfigError(f"ddp has {key} {getattr(self, key)}", allowed="1 or more")
        if (
            min(
                (0, self.bucket_cap_bytes or 0, *self.bucket_caps_bytes, *self.initial_bucket_bytes, *self.bucket_bytes)
            )
            < 0
        ):
            raise ConfigError("ddp has a size below 0", allowed="sizes of 0 or more bytes")
