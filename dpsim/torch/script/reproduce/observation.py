"""What is asked of the ranks that run a script for a comparison, and what they have written. Loads no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.torch.script.probe.reproduce.report import KINDS, REPORT, SHARDS, STEP, RankReport, RankStep
from dpsim.units import format_size

IntArray = NDArray[np.int64]
Tensors = dict[str, NDArray[np.floating]]
"""Values of tensors by their names: at most ``report.MOST_VALUES`` of each, taken at equal distances."""


class Run(Noun, frozen=True):
    """One run of the script on ``devices`` ranks.

    In a run with ``null_seed`` every module's output gets the noise of a rounding, and where it is ``permuted`` samples
    change their order within a rank's batches. With ``same_samples`` the ranks get the samples of the first run, dealt
    out in turn. With ``own_batches`` loaders keep the batch size that the script gives them, for it divides the batches
    itself. With ``own_seeds`` PyTorch begins with another random state on each rank, as it does in processes of their
    own; otherwise ranks begin with the same. With ``in_float32`` autocast and policies cast to float32
    and not to 16 bits; ``without_scaler`` losses are not scaled. With ``overflow`` the last rank's first gradients are
    infinite. A step has ``accumulate`` micro-batches: the script is told so where its arguments have ``{accumulate}``,
    or each pass of its loop is one (``wraps``). Where runs differ in that batch norm takes ``running_norms``.
    A ``free`` run begins its first step alone from the state of the first run, and the others from its own.
    """

    folder: str
    devices: int
    bucket_cap_bytes: float | None = None
    null_seed: int = 0
    permuted: bool = False
    same_samples: bool = False
    own_batches: bool = False
    own_seeds: bool = False
    in_float32: bool = False
    without_scaler: bool = False
    overflow: bool = False
    accumulate: int = 1
    wraps: bool = False
    running_norms: bool = False
    free: bool = False

    @property
    def parts(self) -> int:
        """The parts into which a global batch is divided: devices times micro-batches."""
        return self.devices * self.accumulate

    @property
    def name(self) -> str:
        """``2 devices``, the bucket cap where one is given, and how it differs from the script as it is."""
        cap = "" if self.bucket_cap_bytes is None else f" with a bucket cap of {format_size(self.bucket_cap_bytes)}"
        null = f" ({self.null_seed}. null)" if self.null_seed else ""
        changed = f"{' in float32' if self.in_float32 else ''}{' without its scaler' if self.without_scaler else ''}"
        changed += ", one of which overflows" if self.overflow else ""
        plural = "" if self.accumulate == 1 else "es"
        micro = f", {self.accumulate} micro-batch{plural}" if self.running_norms else ""
        return f"{self.devices} device{'s' if self.devices > 1 else ''}{micro}{cap}{changed}{null}"


class RunsRequest(Noun, frozen=True):
    """Runs of a script one after the other, so many steps each; the first is the one that all begin their steps from.

    ``first_is_there``: its files are there already. With ``autocast`` all of it runs under autocast to that type.
    """

    script: str
    arguments: tuple[str, ...]
    steps: int
    runs: tuple[Run, ...]
    first_is_there: bool = False
    autocast: str = ""


def read_step(folder: Path, rank: int, number: int) -> RankStep:
    """Read what ``report.write_step`` wrote; the loss and backward's gradients as they would be without a scaler."""
    said, arrays = _read(folder / STEP.format(number, rank))
    tensors: dict[str, Tensors] = {kind: {} for kind in KINDS}
    for name, values in arrays.items():
        kind, _, tensor = name.partition("|")
        tensors[kind][tensor] = values / (said["scale"] if kind in ("local", "reduced") else 1.0)
    return codec.convert(said | tensors | {"loss": said["loss"] / said["scale"]}, RankStep)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a line of JSON, and the arrays that follow."""
    header, _, content = path.read_bytes().partition(b"\n")
    read = json.loads(header)
    arrays, begin = {}, 0
    for name, kind, size in read["arrays"]:
        arrays[name] = np.frombuffer(content, dtype=f"<{kind}", count=size // int(kind[1:]), offset=begin)
        begin += size
    return read["said"], arrays


def read_reports(folder: Path, devices: int) -> list[RankReport | None]:
    """Read what each rank said at its end; None of one that died without."""
    paths = [folder / REPORT.format(rank) for rank in range(devices)]
    return [codec.convert(codec.read_raw(path, "report"), RankReport) if path.exists() else None for path in paths]


@dataclass(frozen=True, eq=False)
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
    def _headers(self) -> list[dict[str, Any]]:
        """What rank 0 says of each step, without the values of tensors."""
        headers = []
        for number in range(self.steps):
            with open(self.folder / STEP.format(number, 0), "rb") as file:
                headers.append(json.loads(file.readline())["said"])
        return headers

    @property
    def settings(self) -> list[dict[str, float]]:
        """The settings of rank 0's optimizers in each step."""
        return [header["settings"] for header in self._headers]

    @property
    def epochs(self) -> list[list[tuple[int, ...]]]:
        """The batches of rank 0 by their epochs, those that came from a data set of known size."""
        epochs: dict[int, list[tuple[int, ...]]] = {}
        for header in self._headers:
            for batch in header["micro_batches"]:
                if batch["data_size"]:
                    epochs.setdefault(batch["epoch"], []).append(tuple(batch["indices"]))
        return [epochs[epoch] for epoch in sorted(epochs)]

    @functools.cached_property
    def shards(self) -> dict[int, tuple[list[IntArray], list[int]]]:
        """Each rank's indices of the first epoch and the size of its data set, by the number of the loader.

        Loaders that gave training batches on all ranks, and whose epoch is known.
        """
        ranks: list[tuple[dict[str, Any], dict[str, IntArray]]] = []
        for rank in range(self.run.devices):
            path = self.folder / SHARDS.format(rank)
            if not path.exists():
                return {}
            ranks.append(_read(path))
        names = set.intersection(*(set(indices) for _, indices in ranks))
        return {
            int(name): ([indices[name] for _, indices in ranks], [sizes[name] for sizes, _ in ranks])
            for name in sorted(names, key=int)
        }


def hashes_differ(ranks: tuple[Mapping[str, int], ...]) -> list[str]:
    """Return the names whose hashes are not the same on all ranks."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return [name for name in names if len({rank.get(name) for rank in ranks}) > 1]
