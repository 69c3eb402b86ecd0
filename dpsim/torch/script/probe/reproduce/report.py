"""What each rank of a script says of its steps and at its end, and the files that it writes. Loads no torch."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MOST_VALUES = 2**16
MICRO_BATCHES = "{accumulate}"
"""What stands in a script's arguments for the number of micro-batches."""
REQUEST = "request.json"
REPORT, STEP, SHARDS = "report-{}.json", "step-{}-{}", "shards-{}"
"""Files by the rank, a step by its number and the rank."""
KINDS = ("local", "parts", "reduced", "final", "buffers")
"""The tensors of a step; a part is of a micro-batch: ``NUMBER NAME``."""
Values = Any
"""Values of a tensor: where they are written their format and bytes, where they are read an array."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples of a forward pass: hashes of their rows, and their indices in a data set of ``data_size`` samples.

    Without indices (``data_size`` 0) the batch came from no data loader with a data set of known size.
    """

    rows: tuple[int, ...]
    epoch: int = 0
    indices: tuple[int, ...] = ()
    data_size: int = 0


@dataclass(frozen=True)
class Loader:
    """A data loader: its batch size, the samples of its data set and of its sampler (0: not known).

    ``line`` is the line of the script that made its sampler or, where that is not known, the loader itself.
    """

    batch_size: int
    data_size: int = 0
    sampler_size: int = 0
    sampler: str = ""
    line: str = ""


@dataclass(frozen=True)
class RankReport:
    """What a rank says at its end.

    ``parameters`` are their names in the order in which backward reaches them, ``local_norms`` the batch norms that use
    a rank's own samples, ``switched`` the kinds of random numbers that were drawn from one stream a sample. DDP or FSDP
    is the ``wrapper``. ``narrow`` are the types of the model's parameters and buffers that have 16 bits, and
    ``narrow_norms`` those of layers that normalise. ``computes_in`` says what else has 16 bits, ``sent_as`` is the
    16-bit type that a policy names for reductions, and ``scales`` whether a scaler scales the losses. ``lines`` of the
    script made the modules of the model with these names. ``environment`` is what the bits depend on.
    """

    ended: bool = False
    error: tuple[str, str, str] | None = None
    steps: int = 0
    parameters: tuple[str, ...] = ()
    local_norms: tuple[str, ...] = ()
    switched: tuple[str, ...] = ()
    hook: str = ""
    wrapper: str = "DDP"
    narrow: Mapping[str, str] = field(default_factory=dict)
    narrow_norms: tuple[str, ...] = ()
    computes_in: tuple[str, ...] = ()
    sent_as: str = ""
    scales: bool = False
    loaders: tuple[Loader, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RankStep:
    """A step of one rank.

    ``loss`` is the mean over its micro-batches. ``begun`` are hashes of all parameters before the state of the first
    run was loaded, ``buffers_seen`` those of the buffers that forward got, and ``outside`` those of the tensors of
    other modules. Gradients are ``local`` before they are reduced, ``reduced`` after backward, and ``final`` as the
    optimizer gets them (also ``final_hashes``), by ``clipped`` smaller than before their norm was clipped; parameters
    that nothing wraps are not ``reduced``. ``buffers`` have their values after the step. ``settings`` are the
    optimizers' (learning rates). ``draws``: random numbers were drawn that could not be switched to one stream a
    sample. ``bypassed``: the step was of gradients of a wrapped model whose own forward was not called. ``gathers``:
    results of the model were gathered by a call that carries no gradient, and ``adds``: they were added so. ``scale``
    is the number by which a scaler scaled the loss, and ``skipped`` whether it skipped the update.
    ``lost`` are the parts of parameters of 16 bits that an update left as they were. Of several micro-batches ``parts``
    are what each adds to a gradient before it is reduced, by ``NUMBER NAME`` (DDP alone), and ``changed`` the least
    factor by which the script changes a gradient between two of them (0: it is cleared).
    """

    loss: float = 0.0
    micro_batches: list[MicroBatch] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    buffers_seen: dict[str, int] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    final_hashes: dict[str, int] = field(default_factory=dict)
    draws: bool = False
    bypassed: bool = False
    gathers: bool = False
    adds: bool = False
    scale: float = 1.0
    skipped: bool = False
    lost: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Values] = field(default_factory=dict)
    local: dict[str, Values] = field(default_factory=dict)
    reduced: dict[str, Values] = field(default_factory=dict)
    final: dict[str, Values] = field(default_factory=dict)
    buffers: dict[str, Values] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples in all micro-batches."""
        return sum(len(each.rows) for each in self.micro_batches)


def write_step(folder: Path, rank: int, number: int, step: RankStep) -> None:
    """Write a step, the ``number``-th from 0, of a rank of the run in ``folder``."""
    said = {name: value for name, value in vars(step).items() if name not in KINDS}
    said["micro_batches"] = [asdict(each) for each in step.micro_batches]
    arrays = {f"{kind}|{name}": values for kind in KINDS for name, values in getattr(step, kind).items()}
    _write(folder / STEP.format(number, rank), said, arrays)


def write_shards(folder: Path, rank: int, shards: Mapping[int, list[int]], sizes: Mapping[int, int]) -> None:
    """Write the indices that a rank gets in the first epoch of each loader, and the sizes of the loaders' data sets."""
    arrays = {str(number): ("i8", array("q", shard).tobytes()) for number, shard in shards.items()}
    _write(folder / SHARDS.format(rank), {str(number): size for number, size in sizes.items()}, arrays)


def _write(path: Path, said: Mapping[str, Any], arrays: Mapping[str, tuple[str, bytes]]) -> None:
    """Write a line of JSON, with the names, formats and bytes of the arrays that follow."""
    header = {"said": said, "arrays": [(name, kind, len(content)) for name, (kind, content) in arrays.items()]}
    with open(path, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.writelines(content for _, content in arrays.values())


def write_report(folder: Path, rank: int, report: RankReport) -> None:
    """Write what a rank says at its end."""
    path = folder / REPORT.format(rank)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
    partial.replace(path)


def dealt(global_batch: tuple[int, ...], rank: int, devices: int) -> tuple[int, ...]:
    """Return the samples of a global batch that a rank gets where they are dealt out in turn."""
    return global_batch[rank::devices]
