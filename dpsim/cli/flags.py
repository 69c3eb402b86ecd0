"""The flags that several commands share, each with one meaning, and the reading of comma-separated lists."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from cyclopts import Parameter

from dpsim.errors import ConfigError

T = TypeVar("T")

Model = Annotated[str | None, Parameter(help="cnn or mlp, or with widths: cnn:16,32,64, mlp:512,256, mlp:64x20.")]
DataSet = Annotated[str | None, Parameter(name="--dataset", help="digits, or synthetic:HxWxC,classes=K,train=N.")]
Devices = Annotated[str | None, Parameter(help="Number of devices (MPI ranks), or nodes x devices of a node: 2x4.")]
DevicesList = Annotated[str | None, Parameter(help="Numbers of devices: 1,2,4, or layouts: 2x4.")]
GlobalBatch = Annotated[int | None, Parameter(help="Samples a step, over all devices.")]
LocalBatches = Annotated[str | None, Parameter(name="--local-batch", help="Samples on a device at once: 8,16,32.")]
Accumulate = Annotated[int | None, Parameter(help="Micro-batches a step on each device.")]
FusionRule = Annotated[
    str | None, Parameter(help="tarantella (the default), horovod, ddp, per-tensor, one or mg-wfbp.")
]
Threshold = Annotated[
    str | None,
    Parameter(name="--fusion-threshold", help="Like 64KiB, 25MB; 0: one bucket a tensor; inf: one a step."),
]
Thresholds = Annotated[
    str | None,
    Parameter(name="--fusion-threshold", help="Like 0,32KiB,1MiB,inf; 0: one bucket a tensor; inf: one a step."),
]
Algorithm = Annotated[
    str | None, Parameter(help="mpi, ring, recursive-doubling, halving-doubling, direct or hierarchical.")
]
Algorithms = Annotated[
    str | None,
    Parameter(
        name="--algorithm", help="List of mpi, ring, recursive-doubling, halving-doubling, direct, hierarchical."
    ),
]
Overlap = Annotated[str | None, Parameter(help="auto, off, inline, poll or thread.")]
WireDtype = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    Parameter(name="--wire-dtype", help="What gradients are sent as; sums are in float32 [as they are]."),
]
Network = Annotated[
    str | None, Parameter(help="node (this machine as it is), or paced:LATENCY,BANDWIDTH like paced:50us,1gbit.")
]
Networks = Annotated[str | None, Parameter(name="--network", help="Networks to compare: node,paced:50us,1gbit.")]
Steps = Annotated[int | None, Parameter(help="Steps to train, instead of epochs.")]
Epochs = Annotated[int | None, Parameter(help="Passes over the training samples.")]
Seed = Annotated[int | None, Parameter(help="Seed of initialisation and shuffling.")]
LearningRate = Annotated[float | None, Parameter(help="SGD's learning rate.")]
Momentum = Annotated[float | None, Parameter(help="SGD's momentum.")]
WeightDecay = Annotated[float | None, Parameter(help="SGD's weight decay.")]
Json = Annotated[
    bool, Parameter(negative="", show_default=False, help="Print one JSON object on stdout, progress on stderr.")
]


def listed(flag: str, text: str | None, read: Callable[[str], T]) -> tuple[T, ...] | None:
    """``text`` split at its commas, each part read; None stays None. Raises ``ConfigError``."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} is {text!r}", allowed="values separated by single commas")
    return tuple(read(part) for part in parts)


def whole(flag: str) -> Callable[[str], int]:
    """A reader of whole numbers of 1 or more, for ``listed``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}", allowed="whole numbers of 1 or more")
        return int(text)

    return read


def layout(text: str) -> tuple[int, str]:
    """(devices, layout) of what ``--devices`` was given: ``8`` or ``2x4``. Raises ``ConfigError``."""
    from dpsim.layout import parse_devices

    try:
        return parse_devices(text)
    except ConfigError as error:
        raise ConfigError(f"--{error.given}", allowed=error.allowed) from error


def devices_or_layout(text: str) -> int | str:
    """What ``--devices`` was given as the number that it is, or the layout; for ``listed``."""
    devices, of_nodes = layout(text)
    return of_nodes or devices


def usual_algorithm(algorithm: str | None, network: str | None, wire_dtype: str | None) -> str | None:
    """The algorithm that was named; else the one that what was given asks for: a 16-bit wire, or a network's own."""
    from dpsim.machine import Network
    from dpsim.wire_dtype import SIXTEEN_BITS

    if algorithm is not None:
        return algorithm
    if wire_dtype in SIXTEEN_BITS:
        return "direct"
    return None if network is None else Network.parse(network).usual_algorithm


def networks(text: str | None) -> tuple[str, ...] | None:
    """``node,paced:50us,1gbit`` as its two networks: a paced one has a comma of its own."""
    if text is None:
        return None
    parts = re.findall(r"paced:[^,]*,[^,]*|[^,]+", text)
    if not parts:
        raise ConfigError(f"--network is {text!r}", allowed="node, or paced:LATENCY,BANDWIDTH, or several of them")
    return tuple(part.strip() for part in parts)


def given(**flags: object) -> dict[str, object]:
    """The flags that were given: what was not keeps its default where it is defined."""
    return {name: value for name, value in flags.items() if value is not None}


def writable(path: Path | None, *, folder: bool = False) -> None:
    """Refuse an output path that cannot be written, before the work and not after it. Raises ``ConfigError``."""
    if path is None:
        return
    reason = ""
    if path.exists() and path.is_dir() != folder:
        reason = "it is not a folder" if folder else "it is a folder"
    else:
        parent = path if folder else path.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            reason = f"{parent} is not a folder"
        else:
            try:
                tempfile.TemporaryFile(dir=parent).close()
            except OSError as error:
                reason = error.strerror or str(error)
    if reason:
        what = "a folder" if folder else "a file"
        raise ConfigError(
            f"cannot write --output {path}: {reason}",
            allowed=f"{what} in a place that you may write to",
            remedy="choose another one with --output",
        )
