"""A script's data loaders: their time, and batches of another size. Loads torch."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.endings import Refused
from dpsim.torch.script.probe.steps import RecordedStep


def replace_batch_size(local_batch: int) -> set[int]:
    """Let every ``DataLoader`` that forms batches by a ``batch_size`` form them of ``local_batch`` samples.

    Returns a set that will hold the samples of those loaders that have fewer. One of them that drops its last batch
    would give none at all: it ends the script.
    """
    initialise, iterate = DataLoader.__init__, DataLoader.__iter__
    signature = inspect.signature(initialise)
    too_few: set[int] = set()

    @functools.wraps(initialise)
    def resized(*arguments: Any, **keywords: Any) -> None:
        bound = signature.bind(*arguments, **keywords)
        forms_batches = bound.arguments.get("batch_size", 1) is not None
        if forms_batches and bound.arguments.get("batch_sampler") is None:
            bound.arguments["batch_size"] = local_batch
        initialise(*bound.args, **bound.kwargs)

    @functools.wraps(iterate)
    def checked(self: Any) -> Any:
        try:
            samples = len(self.sampler)
        except TypeError:  # it does not know how many
            return iterate(self)
        if self.batch_size == local_batch and samples < local_batch:
            too_few.add(samples)
            if self.drop_last:
                raise Refused(_too_large(local_batch, samples))
        return iterate(self)

    DataLoader.__init__, DataLoader.__iter__ = resized, checked
    return too_few


def _too_large(local_batch: int, samples: int) -> ConfigError:
    return ConfigError(
        f"--local-batch {local_batch} is more than the data: a rank has {samples} samples",
        allowed=f"batches of at most {samples}",
        remedy="leave the larger ones out, or give the script more data",
    )


def check_one_batch(recorded: Sequence[RecordedStep], name: str) -> None:
    """Raises ``ConfigError`` unless half of the recorded steps, or more, have batches of the same size."""
    counts = Counter(step.local_batch for step in recorded)
    ((_, steps),) = counts.most_common(1)
    if 2 * steps < len(recorded):
        sizes = ", ".join(map(str, sorted(counts)[:5])) + (", ..." if len(counts) > 5 else "")
        raise ConfigError(
            f"{name} trains on batches of {len(counts)} sizes: {sizes} samples",
            allowed="batches of the same size in at least half of the steps, as a workload is of a local batch",
            remedy="let it train on batches of equal size, such as a DataLoader's with batch_size and drop_last=True",
        )


def check_local_batch(recorded: Sequence[RecordedStep], request: Any, too_few: Collection[int] = ()) -> None:
    """Raises ``ConfigError`` unless the model was called with as many samples as the request asks for.

    ``too_few`` are the samples of the data loaders that have fewer than that.
    """
    counts = Counter(step.local_batch for step in recorded)
    ((samples, _),) = counts.most_common(1)
    if request.local_batch is None or samples == request.local_batch:
        return
    if samples in too_few:
        raise _too_large(request.local_batch, samples)
    given = f"with --local-batch {request.local_batch}, {request.name} still trains on {samples} samples at once"
    if request.function:
        raise ConfigError(given, allowed="a function that gives a batch of as many samples as its argument says")
    raise ConfigError(
        given,
        allowed="a script whose batches come from a torch.utils.data.DataLoader that has a batch_size",
        remedy="it has none, or makes its batches in another way: leave --local-batch out, and give the batch to the"
        " script itself, after --",
    )


def loading(loader: Any, local_batch: int) -> tuple[int, float]:
    """Return how many processes load data, and the seconds that one takes for a sample: of two batches the faster."""
    if loader is None or loader._num_workers == 0:
        return 0, 0.0
    fetcher = dataloader._DatasetKind.create_fetcher(
        loader._dataset_kind, loader._dataset, loader._auto_collation, loader._collate_fn, loader._drop_last
    )
    times = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _, indices in zip(range(2), loader._index_sampler):
        began_s = perf_counter()
        fetcher.fetch(indices)
        times.append(perf_counter() - began_s)
    torch.set_num_threads(threads)
    return loader._num_workers, min(times, default=0.0) / local_batch
