"""Lets a script's data loaders give batches of another size. Loads torch."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import Any

from torch.utils.data import DataLoader

from dpsim.errors import ConfigError
from dpsim.torch_ddp.record import Recorder
from dpsim.torch_ddp.request import ScriptRequest


def replace_batch_size(local_batch: int) -> None:
    """Let every ``DataLoader`` that forms batches by a ``batch_size`` form them of ``local_batch`` samples."""
    initialise = DataLoader.__init__
    signature = inspect.signature(initialise)

    @functools.wraps(initialise)
    def resized(*arguments: Any, **keywords: Any) -> None:
        bound = signature.bind(*arguments, **keywords)
        forms_batches = bound.arguments.get("batch_size", 1) is not None
        if forms_batches and bound.arguments.get("batch_sampler") is None:
            bound.arguments["batch_size"] = local_batch
        initialise(*bound.args, **bound.kwargs)

    DataLoader.__init__ = resized


def check_local_batch(recorder: Recorder, request: ScriptRequest) -> None:
    """Raises ``ConfigError`` unless the model was called with as many samples as the request asks for."""
    counts = Counter(step.local_batch for step in recorder.steps)
    ((samples, _),) = counts.most_common(1)
    if request.local_batch is None or samples == request.local_batch:
        return
    given = f"with --local-batch {request.local_batch}, {request.name} still trains on {samples} samples at once"
    if request.function:
        raise ConfigError(given, allowed="a function that gives a batch of as many samples as its argument says")
    raise ConfigError(
        given,
        allowed="a script whose batches come from a torch.utils.data.DataLoader that has a batch_size",
        remedy="it has none, or makes its batches in another way: leave --local-batch out, and give the batch to the"
        " script itself, after --",
    )
