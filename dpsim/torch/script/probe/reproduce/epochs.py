"""Which samples a script's samplers give in each epoch, in batches of the script's own size. Loads torch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpsim.torch.script.probe.reproduce.loaders import Loaders, are_indices
from dpsim.torch.script.probe.reproduce.streams import root_index

_MOST_BATCHES = 2**16
"""Batches of an epoch up to which it is drawn to its end."""


@dataclass
class _Epoch:
    """One pass of a loader: its batches so far, and where the following ones come from."""

    loader: Any
    source: Iterator[Any]
    batches: list[tuple[int, ...]] = field(default_factory=list)
    by_index: bool = True

    def following(self) -> Any:
        """Return the next batch as the sampler gives it, and note its samples. Raises ``StopIteration``."""
        indices = next(self.source)
        self.by_index = self.by_index and are_indices(indices)
        dataset = self.loader.dataset
        self.batches.append(tuple(root_index(dataset, each)[0] for each in indices) if self.by_index else ())
        return indices

    def is_whole(self) -> bool:
        """Draw what is left, for which the script must have ended; whether the sampler ended."""
        with contextlib.suppress(Exception):  # the script's sampler may raise anything after its end
            while self.by_index and len(self.batches) < _MOST_BATCHES:
                try:
                    self.following()
                except StopIteration:
                    return True
        return False


class Epochs(Loaders):
    """The data loaders of a rank, with all that their samplers draw."""

    def __init__(self, rank: int, devices: int) -> None:
        run = SimpleNamespace(devices=devices)
        super().__init__(run, run, Path(), Path(), rank)
        self._epochs: list[_Epoch] = []

    def size_of(self, own: int) -> int:
        """Return the script's own batch size."""
        return own

    def batches(self, loader: Any, sampler: Any) -> Iterator[Any]:
        """Yield the batches of indices of an epoch, noting the samples of each."""
        number = loader.dpsim_number
        queue = self._queues.setdefault(number, deque())
        queue.clear()  # of an epoch that the script left early
        drawn = _Epoch(loader, iter(sampler))
        self._epochs.append(drawn)
        at = len(self._epochs) - 1
        while True:
            try:
                indices = drawn.following()
            except StopIteration:
                return
            queue.append((number, at, (len(drawn.batches) - 1,), 0))
            yield indices

    def trained(self, inputs: Any) -> list[int]:
        """Return the number of the epoch, and of the batch in it, that ``inputs`` of a training step are of."""
        batch = self.batch_of(inputs)
        return [] if batch is None else [batch[1], *batch[2]]

    def written(self) -> list[dict[str, Any]]:
        """Return all epochs for JSON, those that gave training batches drawn to their end."""
        return [
            {
                "batches": each.batches if each.by_index else [],
                "whole": each.loader.dpsim_number in self._training and each.is_whole(),
                "drops": any(
                    getattr(part, "drop_last", False)
                    for part in (each.loader.batch_sampler, getattr(each.loader, "sampler", None))
                ),
            }
            for each in self._epochs
        ]
