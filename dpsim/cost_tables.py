"""Tables of costs, of which a ``Machine`` consists: seconds of collectives against their size, and what slows down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from dpsim.algorithms import ALGORITHMS
from dpsim.codec import Noun
from dpsim.collective import FLAT, Collective, CollectiveKind, Layout, checked_layout
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError
from dpsim.uncertainty import check_uncertainty

_MOST_BYTES = 2**60
_MOST_DEVICES = 10**12
LEAST_SLOWDOWN = 0.5
"""The least factor of a compute slowdown: below it several devices would each compute twice as fast as one."""
FASTEST_MEMORY_BYTES_PER_S = 1e14
"""No device reads and writes its memory as fast: the fastest announced until 2026 (HBM4) does so at 2.2e13."""


def _check_devices(what: str, devices: int) -> None:
    if not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"{what} for {devices} devices", allowed=f"1 to {_MOST_DEVICES:.0e} devices")


def _check_table(what: str, sizes: tuple[int, ...], *columns: tuple[float, ...]) -> None:
    if not sizes or any(a >= b for a, b in itertools.pairwise((-1, *sizes, _MOST_BYTES + 1))):
        raise ConfigError(
            f"{what} has sizes_bytes {list(sizes)}", allowed="one or more sizes from 0 to 2^60, ascending"
        )
    for column in columns:
        if len(column) != len(sizes):
            raise ConfigError(f"{what} has {len(column)} times for {len(sizes)} sizes", allowed="one a size")
        if any(not math.isfinite(t) or t < 0 for t in column):
            raise ConfigError(f"{what} has times {list(column)}", allowed="finite seconds >= 0")


def _check_memory(what: str, table: AllreduceCost) -> None:
    """Refuse times in which no memory could read what a device puts in and write what it gets out.

    An allreduce reads and writes the whole array, each half of one does so with one of the two. A time of 0 was too
    short for a clock (``dpsim.model.cautions``).
    """
    moved = (2 if table.kind == "allreduce" else 1) * (0.5 if table.wire_dtype in SIXTEEN_BITS else 1.0)
    for size, time_s in zip(table.sizes_bytes, table.time_s, strict=True):
        if 0 < time_s < moved * size / FASTEST_MEMORY_BYTES_PER_S:
            raise ConfigError(
                f"{what} has {size} bytes in {time_s:.3g} s, which is faster than any memory",
                allowed=f"at least {moved * size / FASTEST_MEMORY_BYTES_PER_S:.3g} s: what reading and writing them"
                f" takes at {FASTEST_MEMORY_BYTES_PER_S / 1e12:.0f} TB/s",
                remedy="times are in seconds, sizes in bytes: correct the unit of one of them",
            )


def _check_factor(what: str, name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{what} has {name} {value}", allowed="a finite number > 0")


class AllreduceCost(Noun, frozen=True):
    """Seconds of one allreduce against its size, with nothing else running: measured, or published.

    ``kind`` says where it is not an allreduce, but one of the two halves of one, of as many bytes in all, an
    ordered sum, a message from one device to another, or a copy inside each device. ``layout`` is as in a ``Plan``.
    ``relative_uncertainty`` is one standard error of the times over them (``dpsim.uncertainty``; ``None``: not
    known). ``time_s`` are medians; ``p10_s`` and ``p90_s`` the 10 % and 90 % quantiles of the same times (empty:
    not known).
    """

    algorithm: str
    devices: int
    sizes_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    wire_dtype: str = "float32"
    layout: Layout = FLAT
    kind: CollectiveKind = "allreduce"
    relative_uncertainty: float | None = None
    p10_s: tuple[float, ...] = ()
    p90_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ALGORITHMS.find(self.algorithm)
        _check_devices(f"an allreduce table {self.algorithm!r}", self.devices)
        msgspec.structs.force_setattr(self, "layout", checked_layout(self.layout, self.devices))
        columns = [self.time_s, *(column for column in (self.p10_s, self.p90_s) if column)]
        _check_table(f"allreduce table {self.algorithm!r} at {self.devices} devices", self.sizes_bytes, *columns)
        check_uncertainty(f"allreduce table {self.algorithm!r}", relative_uncertainty=self.relative_uncertainty)
        _check_memory(f"{self.kind} table {self.algorithm!r} at {self.layout or self.devices} devices", self)

        if self.kind == "send" and self.devices != 2:
            raise ConfigError(
                f"a send table at {self.devices} devices", allowed="2 devices: the one that sends and the other one"
            )

    @property
    def collective(self) -> Collective:
        """The collective that was measured."""
        return _collective(self)


class FusionCosts(Noun, frozen=True):
    """By what a fusion rule that needs costs makes the buckets of a training: decided once, so that the same buckets
    are trained and priced, whatever is measured later.

    ``ready_s`` are the times at which backward makes each tensor final, in ready order; an allreduce of m bytes takes
    ``alpha_s + beta_s_per_byte * m``.
    """

    collective: Collective
    local_batch: float
    ready_s: tuple[float, ...]
    alpha_s: float
    beta_s_per_byte: float


IN_SHARED_MEMORY = ("one-shot", "two-shot")
BY_MESSAGES = ("mpi", "recursive-doubling", "halving-doubling", "direct", "ring")
"""What ``auto`` chooses from on ranks that share memory, and on ranks that do not."""


_CHANGE = 1.03


class Selection(Noun, frozen=True):
    """The fastest allreduce by size on ``devices``: what ``auto`` runs, in shared memory or by messages.

    ``algorithms[i]`` for arrays below ``below_bytes[i]``, the last one for all others.
    """

    devices: int
    algorithms: tuple[str, ...] = ("one-shot", "two-shot")
    below_bytes: tuple[int, ...] = (4097,)

    def __post_init__(self) -> None:
        _check_devices("a selection", self.devices)
        of_one_place = any(set(self.algorithms) <= set(names) for names in (IN_SHARED_MEMORY, BY_MESSAGES))
        if len(self.algorithms) != len(self.below_bytes) + 1 or not of_one_place:
            raise ConfigError(
                f"selection of {list(self.algorithms)} below {list(self.below_bytes)} bytes",
                allowed=f"{' and '.join(IN_SHARED_MEMORY)}, or else {', '.join(BY_MESSAGES)}; one more than sizes",
            )
        if any(a >= b for a, b in itertools.pairwise((0, *self.below_bytes))):
            raise ConfigError(
                f"a selection's below_bytes is {list(self.below_bytes)}", allowed="ascending sizes above 0"
            )

    def algorithm(self, size_bytes: int) -> str:
        """Return the algorithm for a message of that size."""
        return self.algorithms[sum(size_bytes >= bound for bound in self.below_bytes)]

    @property
    def by_messages(self) -> bool:
        """Whether it was measured on ranks that share no memory."""
        return self.algorithms[0] in BY_MESSAGES

    @staticmethod
    def fastest(devices: int, times_s: Mapping[int, Mapping[str, float]]) -> Selection:
        """Return the selection with the least product of times over the sizes, from ``times_s[size_bytes][algorithm]``.

        Each change of the algorithm counts as ``_CHANGE``, so that noise makes none. Between two sizes with different
        algorithms it changes in the middle, by ratio.
        """
        sizes = sorted(times_s)
        best: list[tuple[float, tuple[str, ...]]] = [(0.0, ())]
        for size in sizes:
            steps = [
                (cost + math.log(time_s) + math.log(_CHANGE) * (bool(names) and names[-1] != name), (*names, name))
                for name, time_s in times_s[size].items()
                for cost, names in best
            ]
            best = [min(step for step in steps if step[1][-1] == name) for name in times_s[size]]
        _, fastest = min(best)
        changes = [number for number in range(1, len(sizes)) if fastest[number] != fastest[number - 1]]
        return Selection(
            devices=devices,
            algorithms=tuple(fastest[number] for number in (0, *changes)),
            below_bytes=tuple(math.isqrt(sizes[number - 1] * sizes[number]) + 1 for number in changes),
        )

    @staticmethod
    def usual(devices: int) -> Selection:
        """Return the selection where nothing was measured. Two ranks never gain from reading everything twice."""
        return (
            Selection(devices=2, algorithms=("two-shot",), below_bytes=())
            if devices == 2
            else Selection(devices=devices)
        )


class OverlapCost(Noun, frozen=True):
    """One allreduce during a running backward: its time, and the compute time it takes away, against its size.

    With ``kind`` it is a reduce-scatter or an all-gather.

    ``poll_s`` is the compute time of one poll (mechanism ``poll``). Calibration leaves it 0, because the compute time
    that it measures contains the polls. ``relative_uncertainty`` is one standard error of ``time_s`` over it, and
    ``loss_relative_uncertainty`` that of ``compute_loss_s`` (``None``: not known). ``p10_s`` and ``p90_s`` are
    quantiles of the times whose median is ``time_s`` (empty: not known).
    """

    algorithm: str
    devices: int
    overlap: Literal["poll", "thread"]
    sizes_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    compute_loss_s: tuple[float, ...]
    poll_s: float = 0.0
    wire_dtype: str = "float32"
    layout: Layout = FLAT
    kind: CollectiveKind = "allreduce"
    relative_uncertainty: float | None = None
    loss_relative_uncertainty: float | None = None
    p10_s: tuple[float, ...] = ()
    p90_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        what = f"overlap table {self.algorithm!r}/{self.overlap!r} at {self.devices} devices"
        _check_devices(f"an overlap table {self.algorithm!r}/{self.overlap!r}", self.devices)
        msgspec.structs.force_setattr(self, "layout", checked_layout(self.layout, self.devices))
        quantiles = [column for column in (self.p10_s, self.p90_s) if column]
        _check_table(what, self.sizes_bytes, self.time_s, self.compute_loss_s, *quantiles)
        if not (math.isfinite(self.poll_s) and self.poll_s >= 0):
            raise ConfigError(f"{what} has poll_s {self.poll_s}", allowed="finite seconds >= 0")
        check_uncertainty(
            what,
            relative_uncertainty=self.relative_uncertainty,
            loss_relative_uncertainty=self.loss_relative_uncertainty,
        )

    @property
    def collective(self) -> Collective:
        """The allreduce that was measured."""
        return _collective(self)


def _collective(table: AllreduceCost | OverlapCost) -> Collective:
    return Collective(
        algorithm=table.algorithm,
        devices=table.devices,
        layout=table.layout,
        wire_dtype=table.wire_dtype,
        kind=table.kind,
    )


class ComputeSlowdown(Noun, frozen=True):
    """The ratio by which computation slows down when this many devices of a node compute at once (1 = not).

    A step's computation takes ``factor`` times as long as on one device, and ``added_s`` more whatever the batch: what
    communication leaves cold in the caches, and what the devices wait for the slowest. ``half_width`` is half of the
    factor's 95 % interval over the factor; 0 where it is not known.
    """

    devices: int
    factor: float
    half_width: float = 0.0
    added_s: float = 0.0

    def __post_init__(self) -> None:
        what = f"a compute slowdown at {self.devices} devices"
        _check_devices("a compute slowdown", self.devices)
        _check_factor(what, "factor", self.factor)
        if self.factor < LEAST_SLOWDOWN:
            raise ConfigError(
                f"{what} has factor {self.factor}: computation would be {1 / self.factor:.3g} times as fast",
                allowed=f"{LEAST_SLOWDOWN} or more; 1 is no slower than one device alone",
            )
        if not (math.isfinite(self.half_width) and self.half_width >= 0):
            raise ConfigError(f"{what} has half_width {self.half_width}", allowed="a finite number >= 0")
        if not (math.isfinite(self.added_s) and self.added_s >= 0):
            raise ConfigError(f"{what} has added_s {self.added_s}", allowed="finite seconds >= 0")
