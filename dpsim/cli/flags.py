"""The flags that several commands share, each with one meaning, and how their values are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import App, Parameter

from dpsim import backend, compute_dtype
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
        "resnet20:norm=group (batch, layer, instance, group or none), mlp:512,dropout=0.2, cnn:crop=4,flip=0.5. "
        "Or your own: FILE.py:FUNCTION or python:PACKAGE.MODULE:FUNCTION, which returns a Replica."
    ),
]
DataSet = Annotated[
    str | None,
    Parameter(
        name="--dataset",
        help="digits, digits:noise=SD,samples=N, synthetic:HxWxC,classes=K,train=N, cifar10:DIR, mnist:DIR,"
        " fashion-mnist:DIR, npz:FILE or npy:X.npy,Y.npy.",
    ),
]
Devices = Annotated[
    str | None, Parameter(help="Number of devices (MPI ranks), or a layout: 2x4 is 2 nodes with 4 each.")
]
DevicesList = Annotated[str | None, Parameter(help="Numbers of devices: 1,2,4, or layouts: 2x4.")]
GlobalBatch = Annotated[int | None, Parameter(help="Samples per step, over all devices.")]
GlobalBatches = Annotated[
    str | None, Parameter(name="--global-batch", help="Numbers of samples per step, over all devices: 64,128,256.")
]
LocalBatch = Annotated[int | None, Parameter(help="Samples on a device at once.")]
LocalBatches = Annotated[
    str | None, Parameter(name="--local-batch", help="Numbers of samples on a device at once: 8,16,32.")
]
Accumulate = Annotated[int | None, Parameter(help="Micro-batches per step on each device.")]
FusionRule = Annotated[str | None, Parameter(help=f"Rule that forms buckets: {named(FUSION_RULES)} (tarantella).")]
FusionRules = Annotated[
    str | None, Parameter(name="--fusion-rule", help=f"List of {named(FUSION_RULES)} (tarantella).")
]
Cycle = Annotated[str | None, Parameter(help="Horovod's cycle, with --fusion-rule horovod, like 5ms (1ms).")]
Threshold = Annotated[
    str | None,
    Parameter(
        name="--fusion-threshold",
        help="Bytes to fuse, like 64KiB or 25MB; 0: one bucket per tensor; inf: one per step.",
    ),
]
Thresholds = Annotated[
    str | None,
    Parameter(
        name="--fusion-threshold",
        help="Bytes to fuse, like 0,32KiB,1MiB,inf; 0: one bucket per tensor; inf: one per step.",
    ),
]
Algorithm = Annotated[
    str | None,
    Parameter(help=f"{named(_RUNNABLE)}. Default: auto on a node (in shared memory, by size), otherwise ring."),
]
Algorithms = Annotated[str | None, Parameter(name="--algorithm", help=f"List of {named(_RUNNABLE)}.")]
PricedAlgorithms = Annotated[str | None, Parameter(name="--algorithm", help=f"List of {named(ALGORITHMS)}.")]
Overlap = Annotated[
    str | None, Parameter(help="Overlap of communication with backward: auto, off, inline, poll or thread.")
]
WireDtype = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    Parameter(
        name="--wire-dtype", help="Number format of gradients in messages; default: the tensor's own. Sums use float32."
    ),
]
ComputeDtype = Annotated[
    compute_dtype.ComputeDtype | None,
    Parameter(
        name="--compute-dtype",
        help="Number format that operands of matrix products and convolutions are rounded to: float32 (the default) or"
        " bfloat16. Sums, parameters and gradients are float32.",
    ),
]
Network = Annotated[
    str | None,
    Parameter(help="node (this machine), or an emulated link paced:LATENCY,BANDWIDTH like paced:50us,1gbit."),
]
Networks = Annotated[str | None, Parameter(name="--network", help="Networks to compare: node,paced:50us,1gbit.")]
Compute = Annotated[
    Literal["real", "emulated"] | None,
    Parameter(help="real, or emulated: ranks wait for the profiled times, so that they may outnumber the cores."),
]
Steps = Annotated[int | None, Parameter(help="Steps to train, instead of epochs.")]
Epochs = Annotated[int | None, Parameter(help="Passes over the training samples (20, unless --steps is given).")]
TorchModule = Annotated[
    str | None,
    Parameter(
        name="--torch-module", help="In place of --torch-script: a module, as python -m runs it, like package.train."
    ),
]
Seed = Annotated[int | None, Parameter(help="Seed of initialisation and shuffling.")]
LearningRate = Annotated[float | None, Parameter(help="Learning rate (sgd 0.05, adamw 0.001, lars 1).")]
Momentum = Annotated[float | None, Parameter(help="SGD's and LARS's momentum (0.9).")]
WeightDecay = Annotated[
    float | None, Parameter(help="Weight decay; AdamW's is decoupled (sgd 0.001, adamw 0.01, lars 0.0005).")
]
Optimizer = Annotated[str | None, Parameter(help="sgd (the default), adamw or lars.")]
TrustCoefficient = Annotated[
    float | None,
    Parameter(help="LARS's trust: a tensor's step is about this share of its norm, times the rate (0.001)."),
]
Nesterov = Annotated[bool | None, Parameter(negative="", help="SGD with Nesterov's momentum.")]
RateDecay = Annotated[
    str | None,
    Parameter(
        name="--schedule",
        help="Learning rate over time: constant; step:10,15 (times 0.1 from epoch 10 on, and again from 15 on;"
        " step:10,15,gamma=0.2: times 0.2); cosine (ends at 0); cosine:0.01 (ends at 0.01 of the rate).",
    ),
]
WarmupEpochs = Annotated[
    float | None,
    Parameter(
        help="Epochs in which the learning rate rises to its value; with --reference-batch, from the unscaled one."
    ),
]
ReferenceBatch = Annotated[
    int | None, Parameter(help="Multiply the learning rate by the global batch divided by this number of samples.")
]
StrategyName = Annotated[
    Literal["data-parallel", "zero1"] | None,
    Parameter(
        name="--strategy",
        help="data-parallel (the default), or zero1: a device updates a shard, and has optimizer state for it alone.",
    ),
]
StallAfter = Annotated[
    float | None, Parameter(help="Seconds of waiting after which a stall is reported (60); 0 or inf: never.")
]
LabelSmoothing = Annotated[
    float | None, Parameter(help="Share of each target that is spread evenly over all classes, like 0.1 (0).")
]
Reproducible = Annotated[
    bool | None,
    Parameter(negative="", help="Compute the same bits on any number of devices, up to the number of leaves."),
]
Leaves = Annotated[
    int | None,
    Parameter(help="Parts of a global batch whose gradients are added in a fixed order (8 with --reproducible)."),
]
BatchNorm = Annotated[
    Literal["local", "leaf", "global"] | None,
    Parameter(
        name="--batch-norm", help="Samples that statistics are taken over: a device's, a leaf's, or the whole batch."
    ),
]
Norms = Annotated[
    str | None,
    Parameter(
        name="--batch-norm",
        help="Norms to compare: batch norm's local, leaf, global; or none, group, instance, layer in its place.",
    ),
]
Elastic = Annotated[
    bool | None,
    Parameter(negative="", help="When ranks are killed, resume from the last checkpoint on the remaining ones."),
]
CheckpointFolder = Annotated[
    Path | None,
    Parameter(name="--checkpoint", help="Folder for checkpoints. One is written at the end; the last two are kept."),
]
CheckpointEvery = Annotated[int | None, Parameter(help="Steps between two checkpoints.")]
Resume = Annotated[
    Path | None,
    Parameter(
        help="Resume from the newest checkpoint in this folder, with its model, data and settings. --devices and the"
        " flags of network and fusion may differ; --epochs and --steps count from the beginning."
    ),
]
Hostfile = Annotated[
    Path | None, Parameter(help="File of hosts to start ranks on, with lines like node1:4 or node1 slots=4.")
]
Backend = Annotated[
    backend.Backend | None,
    Parameter(
        help="Where training runs: cpu, or cuda (the ranks' GPUs; LARS and models of your own compute on the CPU). cuda"
        " also takes --algorithm nccl."
    ),
]
ScriptMayWrite = Annotated[
    bool | None,
    Parameter(negative="", help="Let the script change your files; otherwise what it writes is discarded."),
]
AllTables = Annotated[bool, Parameter(name="--verbose", negative="", help="Show all tables and all warnings too.")]
Json = Annotated[
    bool, Parameter(negative="", show_default=False, help="Print one JSON object on stdout, progress on stderr.")
]


def group(name: str, help: str, examples: str) -> App:
    """A command that has commands of its own, like ``dpsim sweep``."""
    return App(name=name, help=help, help_format="plaintext", help_epilogue=examples)


def listed(flag: str, text: str | None, read: Callable[[str], T]) -> tuple[T, ...] | None:
    """The comma-separated parts of ``text``, each converted by ``read``; None stays None. Raises ``ConfigError``."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} is {text!r}", allowed="values separated by single commas")
    return tuple(read(part) for part in parts)


def whole(flag: str) -> Callable[[str], int]:
    """A function that reads whole numbers of 1 or more, for ``listed``."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}", allowed="whole numbers of 1 or more")
        return int(text)

    return read


def reproducible_leaves(reproducible: bool | None, leaves: int | None) -> None:
    """Raises ``ConfigError`` for reproducible training without leaves, which would not be reproducible."""
    if reproducible and leaves == 0:
        raise ConfigError(
            "--reproducible with --leaves 0: sums would depend on the number of devices",
            allowed="--leaves of 1 or more with --reproducible",
            remedy="leave --leaves out for 8 leaves, or leave --reproducible out",
        )


def threshold(text: str) -> float:
    """A fusion threshold in bytes; warns of a bare number that is hardly meant in bytes. Raises ``ConfigError``."""
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
    """The seconds of a duration like ``5ms``; None stays None. Raises ``ConfigError``."""
    from dpsim.units import parse_duration

    return None if text is None else parse_duration(text)


def budget(text: str | None) -> float | None:
    """The seconds of a budget like ``90s`` or ``2min``; a bare number is in seconds. Raises ``ConfigError``."""
    return duration(f"{text}s" if text is not None and text.strip().isdecimal() else text)


def layout(text: str) -> tuple[int, str]:
    """(devices, layout) of a value of ``--devices``, ``8`` or ``2x4``. Raises ``ConfigError``."""
    from dpsim.layout import parse_devices

    try:
        return parse_devices(text)
    except ConfigError as error:
        raise ConfigError(f"--{error.given}", allowed=error.allowed) from error


def devices_or_layout(text: str) -> int | str:
    """A value of ``--devices`` as a number, or as a layout of several nodes; for ``listed``."""
    devices, node_layout = layout(text)
    return node_layout or devices


def default_algorithm(algorithm: str | None, network: str | None, wire_dtype: str | None) -> str | None:
    """``algorithm`` if it is named; otherwise the default of a named network with these messages."""
    from dpsim.machine import Network

    return (
        algorithm if algorithm is not None or network is None else Network.parse(network).default_algorithm(wire_dtype)
    )


def networks(text: str | None) -> tuple[str, ...] | None:
    """The networks in a list like ``node,paced:50us,1gbit`` (two: the name of a paced one contains a comma)."""
    if text is None:
        return None
    parts = re.findall(r"paced:[^,]*,[^,]*|[^,]+", text)
    if not parts:
        raise ConfigError(f"--network is {text!r}", allowed="node, or paced:LATENCY,BANDWIDTH, or several of them")
    return tuple(part.strip() for part in parts)


def provided(**values: object) -> dict[str, Any]:
    """The values that are not None. A flag that the user leaves out keeps the default of the class it configures."""
    return {name: value for name, value in values.items() if value is not None}


def program(script: str | None, module: str | None) -> str:
    """What ``--torch-script`` or ``--torch-module`` names: a script's path or a module. Raises ``ConfigError``."""
    from dpsim.launch.user_script import is_module

    if (script is None) == (module is None):
        given = "neither --torch-script nor --torch-module" if script is None else "--torch-script and --torch-module"
        raise ConfigError(given, allowed="one of the two")
    if module is not None and not is_module(module):
        raise ConfigError(
            f"--torch-module is {module!r}",
            allowed="package.module, which python -m would run",
            remedy="name a script by its path with --torch-script",
        )
    if script is not None and is_module(script):
        raise ConfigError(
            f"--torch-script is {script!r}",
            allowed="the path of a Python script, which ends in .py",
            remedy=f"a module, which python -m would run, is named so: --torch-module {script}",
        )
    return script or module or ""
