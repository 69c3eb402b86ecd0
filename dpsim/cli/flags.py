"""The flags that several commands share, each with one meaning, and the reading of comma-separated lists."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from cyclopts import Parameter

from dpsim import backend
from dpsim.algorithms import ALGORITHMS, RUNNABLE, algorithms_in
from dpsim.cli.outputs import writable as writable
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.registry import listed as named

T = TypeVar("T")
_MOST_DIGITS = 18
_RUNNABLE = algorithms_in(*RUNNABLE)

Model = Annotated[
    str | None,
    Parameter(
        help="cnn, mlp or resnet20; with widths: cnn:16,32,64, mlp:512,256, mlp:64x20; with settings: "
        "resnet20:norm=group (batch, layer, instance, group or none), mlp:512,dropout=0.2, cnn:crop=4,flip=0.5."
    ),
]
AnyModel = Annotated[
    str | None,
    Parameter(
        name="--model",
        help="A built-in model (cnn, mlp:512,256, resnet20:norm=group ...; see dpsim train --help) or your own: "
        "FILE.py, whose function model(input_shape, classes) returns a Replica; FILE.py:NAME for another function.",
    ),
]
DataSet = Annotated[
    str | None,
    Parameter(
        name="--dataset",
        help="digits, synthetic:HxWxC,classes=K,train=N, cifar10:DIR, mnist:DIR, fashion-mnist:DIR, npz:FILE"
        " or npy:X.npy,Y.npy.",
    ),
]
Devices = Annotated[str | None, Parameter(help="Number of devices (MPI ranks), or nodes x devices of a node: 2x4.")]
DevicesList = Annotated[str | None, Parameter(help="Numbers of devices: 1,2,4, or layouts: 2x4.")]
GlobalBatch = Annotated[int | None, Parameter(help="Samples per step, over all devices.")]
LocalBatches = Annotated[str | None, Parameter(name="--local-batch", help="Samples on a device at once: 8,16,32.")]
Accumulate = Annotated[int | None, Parameter(help="Micro-batches per step on each device.")]
FusionRule = Annotated[str | None, Parameter(help=f"{named(FUSION_RULES)} (tarantella).")]
FusionRules = Annotated[
    str | None, Parameter(name="--fusion-rule", help=f"List of {named(FUSION_RULES)} (tarantella).")
]
Cycle = Annotated[str | None, Parameter(help="Horovod's cycle, with --fusion-rule horovod, like 5ms (1ms).")]
Threshold = Annotated[
    str | None,
    Parameter(name="--fusion-threshold", help="Like 64KiB, 25MB; 0: one bucket per tensor; inf: one per step."),
]
Thresholds = Annotated[
    str | None,
    Parameter(name="--fusion-threshold", help="Like 0,32KiB,1MiB,inf; 0: one bucket per tensor; inf: one per step."),
]
Algorithm = Annotated[
    str | None,
    Parameter(help=f"{named(_RUNNABLE)} (on a node auto: in shared memory, by size; else ring)."),
]
Algorithms = Annotated[str | None, Parameter(name="--algorithm", help=f"List of {named(_RUNNABLE)}.")]
PricedAlgorithms = Annotated[str | None, Parameter(name="--algorithm", help=f"List of {named(ALGORITHMS)}.")]
Overlap = Annotated[str | None, Parameter(help="auto, off, inline, poll or thread.")]
WireDtype = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    Parameter(
        name="--wire-dtype", help="Number format of gradients in messages; default: the tensor's own. Sums use float32."
    ),
]
Network = Annotated[
    str | None, Parameter(help="node (this machine as it is), or paced:LATENCY,BANDWIDTH like paced:50us,1gbit.")
]
Networks = Annotated[str | None, Parameter(name="--network", help="Networks to compare: node,paced:50us,1gbit.")]
Steps = Annotated[int | None, Parameter(help="Steps to train, instead of epochs.")]
Epochs = Annotated[int | None, Parameter(help="Passes over the training samples (20, unless --steps is given).")]
Seed = Annotated[int | None, Parameter(help="Seed of initialisation and shuffling.")]
LearningRate = Annotated[float | None, Parameter(help="Learning rate (sgd 0.05, adamw 0.001).")]
Momentum = Annotated[float | None, Parameter(help="SGD's momentum (0.9).")]
WeightDecay = Annotated[float | None, Parameter(help="Weight decay; AdamW's is decoupled (sgd 0.001, adamw 0.01).")]
Optimizer = Annotated[str | None, Parameter(help="sgd (the default) or adamw.")]
Nesterov = Annotated[bool | None, Parameter(negative="", help="SGD with Nesterov's momentum.")]
RateDecay = Annotated[
    str | None,
    Parameter(
        name="--schedule",
        help="Of the learning rate: constant; step:10,15 (a tenth from epoch 10 and from 15 on; step:10,15,gamma=0.2"
        " a fifth); cosine; cosine:0.01 (ends at a hundredth).",
    ),
]
WarmupEpochs = Annotated[
    float | None, Parameter(help="Epochs over which the learning rate rises; from the unscaled rate if it is scaled.")
]
ReferenceBatch = Annotated[
    int | None, Parameter(help="Scale the learning rate by the global batch over this many samples.")
]
StallAfter = Annotated[
    float | None, Parameter(help="Seconds of waiting after which a stall is reported (60); 0 or inf: never.")
]
LabelSmoothing = Annotated[
    float | None, Parameter(help="Share of the training loss that asks for every class alike: 0 (none), 0.1.")
]
Reproducible = Annotated[
    bool | None, Parameter(negative="", help="The same bits on any number of devices (up to one a leaf).")
]
Leaves = Annotated[
    int | None, Parameter(help="Parts of a global batch that are added in one fixed order (8, with --reproducible).")
]
BatchNorm = Annotated[
    Literal["local", "leaf", "global"] | None,
    Parameter(name="--batch-norm", help="Whose statistics: the device's, each leaf's, or the whole batch's."),
]
Elastic = Annotated[
    bool | None,
    Parameter(negative="", help="When ranks are killed, go on by itself on the others, from the last checkpoint."),
]
CheckpointFolder = Annotated[
    Path | None, Parameter(name="--checkpoint", help="Folder for checkpoints: one at the end; the last two are kept.")
]
CheckpointEvery = Annotated[int | None, Parameter(help="Steps from one checkpoint to the next.")]
Resume = Annotated[
    Path | None,
    Parameter(
        help="Go on from the newest checkpoint in this folder, with the model, data and settings that it names;"
        " --devices, the network's and fusion's flags may differ, --epochs and --steps count from the beginning."
    ),
]
Hostfile = Annotated[Path | None, Parameter(help="Hosts to start ranks on, lines like node1:4 or node1 slots=4.")]
Backend = Annotated[
    backend.Backend | None,
    Parameter(help="What reduces the gradients: cpu, or cuda: kernels on the ranks' GPUs, with host computation."),
]
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
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}", allowed="whole numbers of 1 or more")
        return int(text)

    return read


def reproducible_leaves(reproducible: bool | None, leaves: int | None) -> None:
    """Refuse reproducible training without leaves, which would not be reproducible. Raises ``ConfigError``."""
    if reproducible and leaves == 0:
        raise ConfigError(
            "--reproducible with --leaves 0: sums would depend on the number of devices",
            allowed="--leaves of 1 or more with --reproducible",
            remedy="leave --leaves out for 8 of them, or leave --reproducible out",
        )


def threshold(text: str) -> float:
    """Bytes of a fusion threshold; warns of a bare number that is hardly meant in bytes. Raises ``ConfigError``."""
    from dpsim.units import parse_size

    size_bytes = parse_size(text)
    if text.strip().isdecimal() and 0 < size_bytes < 1024:
        number = text.strip()
        print(
            f"warning: --fusion-threshold {number} means {number} bytes; write {number}MB or {number}MiB for more",
            file=sys.stderr,
        )
    return size_bytes


def duration(text: str | None) -> float | None:
    """Seconds of what a flag was given; None stays None. Raises ``ConfigError``."""
    from dpsim.units import parse_duration

    return None if text is None else parse_duration(text)


def budget(text: str | None) -> float | None:
    """Seconds of a budget such as ``90s`` or ``2min``; a bare number is of seconds. Raises ``ConfigError``."""
    return duration(f"{text}s" if text is not None and text.strip().isdecimal() else text)


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


def default_algorithm(algorithm: str | None, network: str | None, wire_dtype: str | None) -> str | None:
    """The algorithm that was named; else the one that a network (and a 16-bit wire on it) asks for."""
    from dpsim.machine import Network

    return (
        algorithm if algorithm is not None or network is None else Network.parse(network).default_algorithm(wire_dtype)
    )


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
