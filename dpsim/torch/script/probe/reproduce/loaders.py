"""Data loaders of a script: batches of the global batch divided by the ranks, and which samples they hold. Loads torch.

The script's own samplers say which samples a rank gets. A loader's batch size is that of the first run times the ranks
of the first run, divided by the ranks of this one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.endings import Refused
from dpsim.torch.script.probe.reproduce.lines import sampler_line, script_line
from dpsim.torch.script.probe.reproduce.report import Loader, dealt, write_shards
from dpsim.torch.script.probe.reproduce.streams import Whole, root_index

Batch = tuple[int, int, tuple[int, ...], int]
"""Number of the loader, epoch, indices and size of the data set."""
_INDICES = "indices-{}-{}.json"
_RECENT = 4
"""Batches among which that of a forward pass is looked for."""
_MOST_SAMPLES = 2**21
"""Samples of an epoch up to which a rank's shard of it is kept."""


class Loaders:
    """The data loaders of a rank, in the order of their construction."""

    def __init__(self, run: Any, first: Any, folder: Path, first_folder: Path, rank: int) -> None:
        self._run, self._first, self._folder, self._first_folder = run, first, folder, first_folder
        self._rank = rank
        self._sizes: list[int] = []
        self._queues: dict[int, deque[Batch]] = {}
        self._shards: dict[int, tuple[Any, list[int], Iterator[Any]]] = {}
        self._training: set[int] = set()
        self.reports: list[Loader] = []
        self._recent: deque[tuple[Batch | None, list[Any]]] = deque(maxlen=_RECENT)
        self.loaded: Callable[[], None] = lambda: None
        """Called as the script gets a batch."""

    @property
    def used(self) -> tuple[Loader, ...]:
        """Those that gave batches: libraries replace a loader of the script by another with the same data."""
        return tuple(each for number, each in enumerate(self.reports) if number in self._queues)

    def size_of(self, own: int) -> int:
        """Return the batch size of the next loader, whose own is ``own``. Raises ``Refused``."""
        number = len(self._sizes)
        parts, parts_of_first = (run.devices * run.accumulate for run in (self._run, self._first))
        if parts != parts_of_first and not self._run.own_batches:
            sizes = json.loads((self._first_folder / "batch_sizes.json").read_text())
            global_batch = (sizes[number] if number < len(sizes) else own) * parts_of_first
            if global_batch % parts:
                raise Refused(
                    ConfigError(
                        f"the script's batches are of {global_batch} samples on all devices together",
                        allowed=f"a multiple of {parts}, the devices and micro-batches that they are divided among",
                        remedy="give other --devices or --accumulate, or the script another batch, after --",
                    )
                )
            own = global_batch // parts
        self._sizes.append(own)
        if self._run == self._first and self._rank == 0:
            (self._folder / "batch_sizes.json").write_text(json.dumps(self._sizes))
        return own

    def batches(self, loader: Any, sampler: Any) -> Iterator[Any]:
        """Yield the batches of indices of an epoch, noting the samples of each, or in their place those asked for."""
        number, epoch = loader.dpsim_number, loader.dpsim_epoch
        loader.dpsim_epoch += 1
        queue = self._queues.setdefault(number, deque())
        forced = self._forced(number, epoch) if self._run.same_samples else None
        drawn = self._noted(number, loader.dataset, iter(sampler)) if epoch == 0 else iter(sampler)
        for count, indices in enumerate(drawn):
            if are_indices(indices):
                if forced is not None and count < len(forced):
                    indices = [Whole(each) for each in forced[count]]
                if self._run.permuted:
                    indices = random.Random(f"{self._run.null_seed},{count}").sample(list(indices), len(indices))
                known = tuple(root_index(loader.dataset, index)[0] for index in indices)
                size = len(root_index(loader.dataset, indices[0])[1]) if indices else 0
                queue.append((number, epoch, known, size))
                self._write(number, epoch, known)
            else:
                queue.append((number, epoch, (), 0))
            yield indices

    def _noted(self, number: int, dataset: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a loader's first epoch, and keep their samples."""
        shard: list[int] = []
        self._shards[number] = dataset, shard, batches
        for indices in batches:
            if are_indices(indices):
                shard += (root_index(dataset, index)[0] for index in indices)
            yield indices

    def write_shards(self) -> None:
        """Draw what is left of the first epoch of each loader that gave training batches, and write this rank's shards.

        The script must have ended. A shard is left out whose sampler does not end, raises, or draws no indices.
        """
        shards, sizes = {}, {}
        for number in sorted(self._training & self._shards.keys()):
            dataset, shard, batches = self._shards[number]
            if _is_whole(dataset, shard, batches):
                shards[number], sizes[number] = shard, _length(dataset)
        write_shards(self._folder, self._rank, shards, sizes)

    def _write(self, number: int, epoch: int, indices: tuple[int, ...]) -> None:
        if self._run == self._first:
            with open(self._folder / _INDICES.format(number, self._rank), "a", encoding="utf-8") as file:
                file.write(json.dumps([epoch, indices]) + "\n")

    def _forced(self, number: int, epoch: int) -> list[Sequence[int]]:
        """The batches of an epoch that this rank gets in place of its own: its parts of the first run's.

        A global batch is dealt out to the ranks, and what each gets is cut into its micro-batches.
        """
        ranks = []
        for rank in range(self._first.devices):
            path = self._first_folder / _INDICES.format(number, rank)
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            ranks.append([batch for at, batch in map(json.loads, lines) if at == epoch])
        batches = [list(itertools.chain(*parts)) for parts in zip(*ranks)]
        before, count = (1, 1) if self._run.own_batches else (self._first.accumulate, self._run.accumulate)
        steps = [list(itertools.chain(*batches[at : at + before])) for at in range(0, len(batches), before)]
        own = [dealt(tuple(step), self._rank, self._run.devices) for step in steps]
        return [
            of_step[part * len(of_step) // count : (part + 1) * len(of_step) // count]
            for of_step in own
            for part in range(count)
        ]

    def got(self, iterator: Any, batch: Any) -> None:
        """Note that the script has got ``batch``, the next one of an iterator."""
        queue = self._queues.get(getattr(iterator._index_sampler, "number", -1))
        self._recent.append((queue.popleft() if queue else None, _tensors(batch)))
        self.loaded()

    def batch_of(self, inputs: Any) -> Batch | None:
        """Return the batch that ``inputs`` of a training step are of: that with most of their tensors, else the last.

        Accelerate's loaders get the batch after the one that they give, to know the last of an epoch.
        """
        wanted = _tensors(inputs)

        def shared(batch: tuple[Batch | None, list[Any]]) -> int:
            return sum(any(_same(each, other) for other in wanted) for each in batch[1])

        batch: Batch | None = max(reversed(self._recent), key=shared, default=(None, []))[0]
        if batch is not None:
            self._training.add(batch[0])
        return batch


class _Watched:
    """What gives a loader its batches of indices, and is asked by nobody but its iterators."""

    def __init__(self, loaders: Loaders, loader: Any, sampler: Any) -> None:
        self._loaders, self._loader, self._sampler = loaders, loader, sampler
        self.number = loader.dpsim_number

    def __iter__(self) -> Iterator[Any]:
        return self._loaders.batches(self._loader, self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def install(loaders: Loaders) -> None:
    """Let every ``DataLoader`` take its batch size from ``loaders`` and tell it its samples."""
    initialise, following = DataLoader.__init__, _BaseDataLoaderIter.__next__
    signature = inspect.signature(initialise)
    index_sampler = DataLoader._index_sampler.fget

    @functools.wraps(initialise)
    def sized(self: Any, *arguments: Any, **keywords: Any) -> None:
        bound = signature.bind(self, *arguments, **keywords)
        given, sampler = bound.arguments, bound.arguments.get("batch_sampler")
        if sampler is None and given.get("batch_size", 1) is not None:
            given["batch_size"] = loaders.size_of(int(given.get("batch_size", 1)))
        elif isinstance(sampler, BatchSampler) and isinstance(vars(sampler).get("batch_size"), int):
            sampler.batch_size = loaders.size_of(sampler.batch_size)
        initialise(*bound.args, **bound.kwargs)
        object.__setattr__(self, "dpsim_number", len(loaders.reports))
        object.__setattr__(self, "dpsim_epoch", 0)
        loaders.reports.append(_described(self, script_line()))

    def watched(self: Any) -> Any:
        return _Watched(loaders, self, index_sampler(self))

    @functools.wraps(following)
    def counted(self: Any) -> Any:
        batch = following(self)
        loaders.got(self, batch)
        return batch

    DataLoader.__init__, _BaseDataLoaderIter.__next__ = sized, counted
    DataLoader._index_sampler = property(watched)


def _is_whole(dataset: Any, shard: list[int], batches: Iterator[Any]) -> bool:
    """Draw what is left of a shard; whether its sampler ended, and drew indices alone."""
    with contextlib.suppress(Exception):  # the script's sampler may raise anything after its end
        for indices in batches:
            if not are_indices(indices) or len(shard) > _MOST_SAMPLES:
                return False
            shard += (root_index(dataset, index)[0] for index in indices)
        return True
    return False


def are_indices(indices: Any) -> bool:
    """Whether a sampler has given a batch of indices, rather than keys of another kind."""
    return isinstance(indices, (list, tuple)) and all(isinstance(index, int) for index in indices)


def _tensors(batch: Any) -> list[Any]:
    """The tensors of a batch, which may also be a mapping that PyTorch does not know, as Transformers has."""
    leaves = torch.utils._pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.dim()]


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or copies."""
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def _described(loader: Any, line: str) -> Loader:
    batches = loader.batch_sampler  # one without a sampler divides batches in a way of its own, as Accelerate's does
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    size = 0 if isinstance(loader.dataset, IterableDataset) else _length(loader.dataset)
    return Loader(
        batch_size=int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0),
        data_size=size,
        sampler_size=0 if sampler is None else _length(sampler),
        sampler=type(batches if sampler is None else sampler).__name__,
        line=sampler_line(sampler) or line,
    )


def _length(sized: Sequence[Any]) -> int:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return 0
