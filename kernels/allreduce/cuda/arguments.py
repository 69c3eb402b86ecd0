"""The arguments of an allreduce on a GPU: checked, and as addresses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpsim.errors import ConfigError, unknown
from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, SIZE, THREADS, lanes_of
from dpsim.kernels.allreduce.cuda.launch import MOST_BLOCKS, Codes, Mode, Watch, flag_words
from dpsim.kernels.allreduce.tree import PartialSums

MODES = ("one-launch", "flags", "split")
NAMES = {"uint16": "bfloat16"} | {name: name for name in ("float16", "float32", "float64")}
"""Which numbers an array of a NumPy dtype holds."""


def address_of(array: Any) -> int:
    """Return where a device array begins; in the simulator a NumPy array, or numba's stand-in for a device array."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None and SIMULATED:
        interface = array.__array_interface__
    if interface is None:
        raise ConfigError(
            f"an array of type {type(array).__name__}", allowed="arrays in device memory (__cuda_array_interface__)"
        )
    strides = interface.get("strides")
    if len(interface["shape"]) != 1 or (strides is not None and strides[0] != np.dtype(interface["typestr"]).itemsize):
        raise ConfigError(
            f"an array of shape {interface['shape']} and strides {strides}", allowed="contiguous 1-D arrays"
        )
    return int(interface["data"][0])


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``version.make``, as ``launch`` describes them."""

    name: str
    arrays: tuple[Any, ...]
    sums: PartialSums
    rank: int | None = None
    mode: Mode = "one-launch"
    flags: Sequence[Any] | None = None
    scale: float = 1.0
    compression: Codes | None = None
    most_blocks: int = MOST_BLOCKS
    watch: Watch | None = None
    each_sum: bool = False

    @property
    def dtype(self) -> str:
        return NAMES[str(self.arrays[0].dtype)]

    @property
    def length(self) -> int:
        return int(self.arrays[0].shape[0])

    @property
    def ranks(self) -> int:
        return len(set(self.sums.owners))

    @property
    def scope(self) -> str | None:
        """How far the flags of a kernel that waits inside reach; None if it does not wait."""
        return {"one-launch": "gpu", "flags": "sys", "split": None}[self.mode]

    @property
    def apart(self) -> bool:
        """Whether ranks are processes that wait for each other outside kernels."""
        return self.mode == "split" and self.rank is not None

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where each partial sum begins."""
        return tuple(map(address_of, self.arrays))

    @property
    def results(self) -> tuple[int, ...]:
        """Where each rank's result begins."""
        return tuple(self.addresses[self.sums.of(rank)[0]] for rank in range(self.ranks))

    def number(self, value: float) -> Any:
        """Return a number in the type that the arrays are added in."""
        return np.float64(value) if self.dtype == "float64" else np.float32(value)

    def elements(self, *others: tuple[int, int], lanes: int | None = None) -> tuple[int, int, int]:
        """Return (single elements before the packs, packs of ``lanes``, all single elements).

        A pack begins at a multiple of 16 bytes in every partial sum and in ``others``, pairs of an address and the size
        of a number in bytes. If there is no such element, all are single.
        """
        lanes = lanes or lanes_of(self.dtype)
        streams = [(address, SIZE[self.dtype]) for address in self.addresses] + list(others)
        for head in range(min(lanes, self.length)):
            if all((address + head * size) % 16 == 0 for address, size in streams):
                packs = (self.length - head) // lanes
                return head, packs, self.length - packs * lanes
        return self.length, 0, self.length

    def check(self) -> None:
        """Raise ``ConfigError`` if the arguments do not fit together."""
        if self.mode not in MODES:
            raise unknown("mode", self.mode, MODES)
        self._check_arrays("arrays", self.arrays, len(self.sums.owners), str(self.arrays[0].dtype))
        if str(self.arrays[0].dtype) not in NAMES:
            raise ConfigError(
                f"arrays of {self.arrays[0].dtype}", allowed="float16, uint16 (bfloat16), float32, float64"
            )
        self._check_ranks()
        if self.name != "two-shot" and self.compression is not None:
            raise ConfigError(f"{self.name} with compression", allowed="two-shot")
        if self.each_sum and (self.name != "two-shot" or (self.compression is None and SIZE[self.dtype] != 2)):
            raise ConfigError(
                f"{self.name} on {self.dtype} with every sum of two rounded",
                allowed="two-shot with compression, or on numbers of 16 bits",
            )
        if self.compression is not None:
            self._check_compression(self.compression)

    def _check_arrays(self, what: str, arrays: Sequence[Any], count: int, dtype: str) -> None:
        if len(arrays) != count:
            raise ConfigError(f"{len(arrays)} arrays as {what}", allowed=str(count))
        for array in arrays:
            if str(array.dtype) != dtype or tuple(array.shape) != (self.length,):
                raise ConfigError(
                    f"{array.dtype} {list(array.shape)} among {what}",
                    allowed=f"{dtype} [{self.length}], as the first array",
                )
            if address_of(array) % array.dtype.itemsize:
                raise ConfigError(f"{what} at an address that is no multiple of {array.dtype.itemsize}")

    def _check_ranks(self) -> None:
        if self.mode != "split" and self.ranks > THREADS:
            raise ConfigError(f"{self.ranks} ranks that wait inside a kernel", allowed=f"1 to {THREADS}")
        if self.rank is not None and not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank {self.rank}", allowed=f"0 to {self.ranks - 1}, or None: all of them")
        if (self.mode == "one-launch" and self.rank is not None) or (self.mode == "flags" and self.rank is None):
            ranks = "one rank" if self.rank is not None else "all ranks"
            raise ConfigError(
                f"mode {self.mode!r} for {ranks} of this process",
                allowed="one-launch: all ranks (rank=None); flags: one rank; split: both",
            )
        if SIMULATED and self.mode == "one-launch":
            raise ConfigError("mode 'one-launch' in numba's simulator", allowed="split, flags")
        if self.mode == "flags":
            flags = self.flags or ()
            if self.most_blocks < 1:
                raise ConfigError(f"most_blocks is {self.most_blocks}", allowed="1 or more, the same on every rank")
            words = flag_words(self.ranks, self.most_blocks)
            if len(flags) != self.ranks or any(str(f.dtype) != "uint32" or f.shape[0] < words for f in flags):
                raise ConfigError(
                    "mode 'flags' without flags of every rank", allowed=f"an array of uint32 [{words}] a rank"
                )

    def _check_compression(self, compression: Codes) -> None:
        if self.dtype != "float32" or compression.dtype not in ("float16", "bfloat16"):
            raise ConfigError(
                f"compression to {compression.dtype} for {self.dtype}", allowed="float16, bfloat16 for float32"
            )
        exact = compression.scale > 0 and math.frexp(compression.scale)[0] == 0.5
        if not exact or not (
            2.0**-64 <= compression.scale <= 1 if compression.dtype == "float16" else compression.scale == 1
        ):
            raise ConfigError(
                f"compression to {compression.dtype} with scale {compression.scale}",
                allowed="1 for bfloat16; a power of two from 2^-64 to 1 for float16",
            )
        self._check_arrays("codes", compression.arrays, len(self.arrays), "uint16")
