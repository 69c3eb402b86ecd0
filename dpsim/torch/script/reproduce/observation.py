"""What is asked of the ranks that run a script for a comparison, and what each says of its steps. Loads no torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.units import format_size

IntArray = NDArray[np.int64]
Tensors = dict[str, NDArray[np.floating]]
"""Values of tensors by their names: at most ``MOST_VALUES`` of each, taken at equal distances."""

MOST_VALUES = 2**16
REQUEST = "request.json"
_META, _REPORT, _SHARDS, _SIZES = "meta", "report-{}.json", "shards-{}.npz", "sizes-{}.npz"


class Run(Noun, frozen=True):
    """One run of the script on ``devices`` ranks.

    In a run with ``null_seed`` every module's output gets the noise of a rounding, and where it is ``permuted`` samples
    change their order within a rank's batches. With ``same_samples`` the ranks get the samples of the first run, dealt
    out in turn. With ``own_batches`` loaders keep the batch size that the script gives them, for it divides the batches
    itself. With ``own_seeds`` PyTorch begins with another random state on each rank, as it does in processes of their
    own; otherwise ranks begin with the same.
    """

    folder: str
    devices: int
    bucket_cap_bytes: float | None = None
    null_seed: int = 0
    permuted: bool = False
    same_samples: bool = False
    own_batches: bool = False
    own_seeds: bool = False

    @property
    def name(self) -> str:
        """``2 devices``, the bucket cap where one is given, and whether it is a null."""
        cap = "" if self.bucket_cap_bytes is None else f" with a bucket cap of {format_size(self.bucket_cap_bytes)}"
        null = f" ({self.null_seed}. null)" if self.null_seed else ""
        return f"{self.devices} device{'s' if self.devices > 1 else ''}{cap}{null}"


class RunsRequest(Noun, frozen=True):
    """Runs of a script one after the other, so many steps each; the first is the one that all begin their steps from.

    ``first_is_there``: its files are there already.
    """

    script: str
    arguments: tuple[str, ...]
    steps: int
    runs: tuple[Run, ...]
    first_is_there: bool = False


class MicroBatch(Noun, frozen=True):
    """The samples of a forward pass: hashes of their rows, and their indices in a data set of ``data_size`` samples.

    Without indices (``data_size`` 0) the batch came from no data loader with a data set of known size.
    """

    rows: tuple[int, ...]
    epoch: int = 0
    indices: tuple[int, ...] = ()
    data_size: int = 0


class Loader(Noun, frozen=True):
    """A data loader: its batch size, the samples of its data set and of its sampler (0: not known)."""

    batch_size: int
    data_size: int = 0
    sampler_size: int = 0
    sampler: str = ""


class RankReport(Noun, frozen=True):
    """What a rank says at its end.

    ``parameters`` are their names in the order in which backward reaches them, ``local_norms`` the batch norms that use
    a rank's own samples, ``switched`` the kinds of random numbers that were drawn from one stream a sample. DDP or FSDP
    is the ``wrapper``.
    """

    ended: bool = False
    error: tuple[str, str, str] | None = None
    steps: int = 0
    parameters: tuple[str, ...] = ()
    local_norms: tuple[str, ...] = ()
    switched: tuple[str, ...] = ()
    hook: str = ""
    wrapper: str = "DDP"
    loaders: tuple[Loader, ...] = ()


class _Meta(Noun, frozen=True):
    loss: float
    micro_batches: tuple[MicroBatch, ...]
    begun: dict[str, int]
    buffers_seen: dict[str, int]
    settings: dict[str, float]
    final_hashes: dict[str, int]
    draws: bool
    bypassed: bool


@dataclass
class RankStep:
    """A step of one rank.

    ``loss`` is the mean over its micro-batches. ``begun`` are hashes of all parameters before the state of the first
    run was loaded, ``buffers_seen`` those of the buffers that forward got. Gradients are ``local`` before they are
    reduced, ``reduced`` after backward, and ``final`` as the optimizer gets them (also ``final_hashes``); ``buffers``
    have their values after the step. ``settings`` are the optimizers' (learning rates). ``draws``: random numbers were
    drawn that could not be switched to one stream a sample. ``bypassed``: the step was of gradients of a wrapped model
    whose own forward was not called.
    """

    loss: float = 0.0
    micro_batches: list[MicroBatch] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    buffers_seen: dict[str, int] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    final_hashes: dict[str, int] = field(default_factory=dict)
    draws: bool = False
    bypassed: bool = False
    local: Tensors = field(default_factory=dict)
    reduced: Tensors = field(default_factory=dict)
    final: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples in all micro-batches."""
        return sum(len(each.rows) for each in self.micro_batches)


_KINDS = ("local", "reduced", "final", "buffers")


def write_step(folder: Path, rank: int, number: int, step: RankStep) -> None:
    """Write a step, the ``number``-th from 0, of a rank of the run in ``folder``."""
    meta = _Meta(
        loss=step.loss,
        micro_batches=tuple(step.micro_batches),
        begun=step.begun,
        buffers_seen=step.buffers_seen,
        settings=step.settings,
        final_hashes=step.final_hashes,
        draws=step.draws,
        bypassed=step.bypassed,
    )
    arrays = {f"{kind}|{name}": values for kind in _KINDS for name, values in getattr(step, kind).items()}
    arrays[_META] = np.frombuffer(msgspec.msgpack.encode(meta), dtype=np.uint8)  # JSON has no NaN
    with open(folder / f"step-{number}-{rank}.npz", "wb") as file:
        np.savez(file, **arrays)


def read_step(folder: Path, rank: int, number: int) -> RankStep:
    """Read what ``write_step`` wrote."""
    with np.load(folder / f"step-{number}-{rank}.npz") as saved:
        arrays = dict(saved)
    meta = msgspec.msgpack.decode(arrays.pop(_META).tobytes(), type=_Meta)
    step = RankStep(**msgspec.structs.asdict(meta) | {"micro_batches": list(meta.micro_batches)})
    for name, values in arrays.items():
        kind, _, tensor = name.partition("|")
        getattr(step, kind)[tensor] = values
    return step


def write_shards(folder: Path, rank: int, shards: Mapping[int, IntArray], sizes: Mapping[int, int]) -> None:
    """Write the indices that a rank gets in the first epoch of each loader, and the sizes of the loaders' data sets."""
    for name, values in ((_SHARDS, shards), (_SIZES, sizes)):
        with open(folder / name.format(rank), "wb") as file:
            arrays: dict[str, Any] = {str(number): np.asarray(value) for number, value in values.items()}
            np.savez(file, **arrays)


def write_report(folder: Path, rank: int, report: RankReport) -> None:
    """Write what a rank says at its end."""
    codec.write(folder / _REPORT.format(rank), report)


def read_reports(folder: Path, devices: int) -> list[RankReport | None]:
    """Read what each rank said at its end; None of one that died without."""
    paths = [folder / _REPORT.format(rank) for rank in range(devices)]
    return [
        codec.decode(codec.read_raw(path, "report"), RankReport, "report") if path.exists() else None for path in paths
    ]


@dataclass(frozen=True)
class Observed:
    """A run that has ended, in its folder."""

    run: Run
    folder: Path
    reports: tuple[RankReport, ...]

    @property
    def steps(self) -> int:
        """The steps that every rank has finished."""
        return min(report.steps for report in self.reports)

    @functools.lru_cache(maxsize=4)  # noqa: B019 - a comparison reads a step a few times, and goes on to the next
    def step(self, number: int) -> tuple[RankStep, ...]:
        """Return a step of every rank."""
        return tuple(read_step(self.folder, rank, number) for rank in range(self.run.devices))

    @functools.cached_property
    def shards(self) -> dict[int, tuple[list[IntArray], list[int]]]:
        """Each rank's indices of the first epoch and the size of its data set, by the number of the loader.

        Loaders that gave training batches on all ranks, and whose epoch is known.
        """
        kinds: list[list[dict[str, IntArray]]] = [[], []]
        for name, ranks in zip((_SHARDS, _SIZES), kinds, strict=True):
            for rank in range(self.run.devices):
                path = self.folder / name.format(rank)
                if not path.exists():
                    return {}
                with np.load(path) as saved:
                    ranks.append(dict(saved))
        indices, sizes = kinds
        names = set.intersection(*(set(rank) for rank in indices))
        return {
            int(name): ([rank[name] for rank in indices], [int(rank[name]) for rank in sizes])
            for name in sorted(names, key=int)
        }


def dealt(global_batch: tuple[int, ...], rank: int, devices: int) -> tuple[int, ...]:
    """Return the samples of a global batch that a rank gets where they are dealt out in turn."""
    return global_batch[rank::devices]


def hashes_differ(ranks: tuple[Mapping[str, int], ...]) -> list[str]:
    """Return the names whose hashes are not the same on all ranks."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return [name for name in names if len({rank.get(name) for rank in ranks}) > 1]
