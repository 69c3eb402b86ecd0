"""What the command line asks of the process that runs a PyTorch script. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.torch.script.probe.steps import MODES

_MOST_DEVICES = 1_000_000


class ScriptRequest(Noun, frozen=True):
    """A script to run as rank 0 of ``devices``, its arguments, and how many of its synchronising steps to record.

    ``script`` is a path, or the name of a module that ``python -m`` would run. Instead of it there may be a
    ``function``, named as ``package.module:build_model``, which gives a ``torch.nn.Module`` to train.
    ``local_batch`` replaces the batch size of the script's data loaders, or is given to the function (None: theirs).
    With ``must_end`` a script is refused that trains on after dpsim has ended it, which no rank of a measurement may.
    ``fully_shard``: what the script wraps in DistributedDataParallel is sharded instead, in so many ``replicas``. With
    ``accumulates`` a script is refused that could not accumulate gradients as it is
    (``dpsim.torch.script.probe.accumulated``).
    Unless ``script_may_write`` no file of the user's changes (``dpsim.launch.protection``).
    """

    script: str = ""
    function: str = ""
    arguments: tuple[str, ...] = ()
    devices: int = 1
    steps: int = 15
    local_batch: int | None = None
    must_end: bool = False
    script_may_write: bool = False
    fully_shard: bool = False
    replicas: int = 1
    accumulates: bool = False

    @property
    def name(self) -> str:
        """What messages call it: the script's file name, or the function."""
        return self.function or Path(self.script).name

    @property
    def flag(self) -> str:
        """The words of the command line that ask for it."""
        if self.function:
            return f"--torch {self.function}"
        return f"--torch-script {self.name}"

    def __post_init__(self) -> None:
        if bool(self.script) == bool(self.function):
            given = "--torch-script and --torch" if self.script else "neither --torch-script nor --torch"
            raise ConfigError(given, allowed="one of the two")
        module, colon, name = self.function.partition(":")
        if self.function and not (colon and name.isidentifier() and all(map(str.isidentifier, module.split(".")))):
            raise ConfigError(
                f"--torch is {self.function!r}",
                allowed="package.module:function, such as models.resnet:build_model",
                remedy="name an importable module; those in the current folder are",
            )
        if self.function and self.arguments:
            raise ConfigError("ARGUMENTS with --torch", remedy="leave them out: the function gets no arguments")
        if not 1 <= self.devices <= _MOST_DEVICES:
            raise ConfigError(f"--devices is {self.devices}", allowed=f"1 to {_MOST_DEVICES}")
        if self.steps < len(MODES):
            raise ConfigError(
                f"--steps is {self.steps}",
                allowed=f"{len(MODES)} or more",
                remedy="one is timed as a whole, one with a hook on each module, one with a hook on each gradient",
            )


class Part(Noun, frozen=True):
    """What ``ranks`` processes do together in a measurement, in turns with others, the ``number``-th of all.

    They ``train``, or ``observe`` so many ``steps`` of their training; or each is the ``profile`` of rank 0 of
    ``devices``; or they time the ``collectives`` of the first so many ranks (``counts``). A script is changed as in a
    ``ScriptRequest``, whose ``replicas`` are those of the collectives too, and DDP may have another
    ``bucket_cap_bytes`` and a communication ``hook``: what the function ``module:function`` returns. Of a script that
    calls ``fully_shard`` so often (``joined_calls``), units below the cap are joined to the root's.
    """

    kind: Literal["train", "observe", "profile", "collectives"]
    number: int
    ranks: int
    script: str = ""
    arguments: tuple[str, ...] = ()
    devices: int = 1
    local_batch: int | None = None
    accumulate: int | None = None
    fully_shard: bool = False
    on_gpus: bool = False
    hook: str = ""
    bucket_cap_bytes: float | None = None
    joined_calls: int = 0
    steps: int = 0
    counts: tuple[int, ...] = ()
    replicas: int = 1
