"""The strategy of a plan: how the devices divide samples, layers, gradients and parameters among them.

A strategy is written like a model, ``zero3:prefetch=2,reshard=no``: its name, and its settings where they are not the
defaults. ``dpsim.lowering`` turns each one into a Schedule; everything else asks for the properties of ``Strategy``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import msgspec

from dpsim.codec import Noun
from dpsim.collective import CollectiveKind
from dpsim.errors import ConfigError, unknown

_YES = {"yes": True, "no": False}


class Strategy(Noun, frozen=True):
    """What every strategy says of itself.

    ``shards_gradients``: gradients are reduce-scattered, and a device updates its shard of them alone. ``gathers``:
    parameters are brought together during the computation. ``keeps_shards``: a device's shards have memory of their
    own, and are copied from or to that of the buckets. ``whole_micro_batches``: every device computes exactly the
    micro-batches that the plan names, each in one pass.
    ``asynchronous``: devices make no step together.
    """

    name: ClassVar[str]
    shards_gradients: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    keeps_shards: ClassVar[bool] = False
    whole_micro_batches: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False

    @classmethod
    def candidates(cls, devices: int, nodes: int, layers: int, blocks: int) -> tuple[Strategy, ...]:
        """Return the settings that are compared where the best ones are asked for.

        The number of layers bounds the stages, and that of column blocks the parts. ``nodes`` is 1 where nothing is
        known of nodes.
        """
        return (cls(),)

    @property
    def recomputing(self) -> Strategy | None:
        """The same with activations that are computed again instead of kept; ``None`` where no setting says so."""
        return None

    @property
    def stages(self) -> int:
        """Into how many stages of neighbours layers are divided."""
        return 1

    @property
    def parts(self) -> int:
        """Into how many parts the column blocks of each stage are divided."""
        return 1

    @property
    def replicas(self) -> int:
        """How many copies there are of what devices divide into shards, each among as many neighbours."""
        return 1

    @property
    def classes(self) -> int:
        """The rank classes: devices of different ones compute different layers, or different parts of them."""
        return self.stages * self.parts

    @property
    def sharded(self) -> bool:
        """Whether a device updates a shard of the parameters alone."""
        return self.shards_gradients

    @property
    def owns_tensors(self) -> bool:
        """Whether a device updates whole tensors, and broadcasts them, in place of a shard of each bucket."""
        return False

    @property
    def gradient_collective(self) -> CollectiveKind:
        """What adds up the gradients."""
        return "reduce-scatter" if self.sharded else "allreduce"

    @property
    def collectives(self) -> tuple[CollectiveKind, ...]:
        """The collectives that its calibration measures."""
        if self.owns_tensors:
            return ("allreduce", "broadcast")
        copies: tuple[CollectiveKind, ...] = ("copy",) if self.keeps_shards else ()
        return ("allreduce", "reduce-scatter", "all-gather", *copies) if self.sharded else ("allreduce",)

    @property
    def text(self) -> str:
        """The strategy as it is written, without settings that have their defaults."""
        defaults = type(self)()
        settings = [
            f"{name}={_written(value)}"
            for name in self.__struct_fields__
            if (value := getattr(self, name)) != getattr(defaults, name)
        ]
        return self.name + (":" + ",".join(settings) if settings else "")


class DataParallel(Strategy, frozen=True):
    """Every device computes its share of the samples; allreduces add up the gradients."""

    name = "data-parallel"


class Zero1(Strategy, frozen=True):
    """A device updates a shard of the parameters, and has optimizer state for it alone.

    ``gather``: reduce-scatters and all-gathers of shards of buckets; or, as ``ZeroRedundancyOptimizer`` does,
    allreduces of gradients and a ``broadcast`` of each tensor by the device that updates it.
    """

    name = "zero1"

    gather: Literal["all-gather", "broadcast"] = "all-gather"

    @property
    def sharded(self) -> bool:
        return not self.owns_tensors

    @property
    def owns_tensors(self) -> bool:
        return self.gather == "broadcast"


class Zero2(Strategy, frozen=True):
    """ZeRO-1 in which a device keeps its shard of the gradients alone.

    ``buckets``: how many whole buckets of gradients there may be at once, or more where one layer's tensors fill more.
    """

    name = "zero2"
    shards_gradients = keeps_shards = True

    buckets: int = 2

    def __post_init__(self) -> None:
        _at_least(self, "buckets", 1)


class Zero3(Strategy, frozen=True):
    """ZeRO-2 in which a device keeps its shard of the parameters alone (FSDP). A bucket is a unit of whole layers.

    A unit is gathered before it is needed, while the ``prefetch`` units before it compute. With ``reshard`` it is given
    up after forward and gathered again for backward; without, it is kept from forward to backward. With several
    ``replicas`` (HSDP) each of as many groups of neighbours divides the model among its devices, and allreduces add up
    the shards of all groups.
    """

    name = "zero3"
    shards_gradients = gathers = keeps_shards = whole_micro_batches = True

    prefetch: int = 1
    reshard: bool = True
    replicas: int = 1

    def __post_init__(self) -> None:
        _at_least(self, "prefetch", 0)
        _at_least(self, "replicas", 1)

    @classmethod
    def candidates(cls, devices: int, nodes: int, layers: int, blocks: int) -> tuple[Strategy, ...]:
        """Return each of two numbers of units ahead, given up or not, with a copy in all and with one in each node."""
        copies = (1, nodes) if 1 < nodes < devices else (1,)
        settings = itertools.product(copies, (True, False), (1, 2))
        return tuple(cls(prefetch=prefetch, reshard=reshard, replicas=each) for each, reshard, prefetch in settings)


class Pipeline(Strategy, frozen=True):
    """Layers are divided into ``stages`` of neighbours; the micro-batches of a step (``accumulate``) flow through them.

    ``order``: ``1f1b`` begins a backward as soon as it can, so that a stage keeps the activations of as many
    micro-batches as there are stages from it to the end; ``gpipe`` computes all forwards first. ``balance``: stages of
    equal computing time, or of equal memory. ``recompute``: a stage keeps what a micro-batch enters and leaves it with
    alone, and computes its forward again before backward. ``shard``: ZeRO-1 among the devices of a stage that have the
    same layers. With several ``parts`` each of as many neighbouring devices owns some of the column blocks of a stage.
    """

    name = "pipeline"
    whole_micro_batches = True

    stages: int = 2
    order: Literal["1f1b", "gpipe"] = "1f1b"
    balance: Literal["time", "memory"] = "time"
    recompute: bool = False
    shard: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        _at_least(self, "stages", 1)
        _at_least(self, "parts", 1)

    @classmethod
    def candidates(cls, devices: int, nodes: int, layers: int, blocks: int) -> tuple[Strategy, ...]:
        """Return each number of stages and of parts that fills the devices evenly, with and without shards.

        Parts are powers of 2. Where there are no such stages they are 2, which a plan refuses by name. The order is
        1f1b: gpipe has the same bubble, and keeps the activations of as many micro-batches or more.
        """
        stages = [number for number in range(2, min(devices, layers) + 1) if devices % number == 0] or [2]
        settings = itertools.product(stages, (False, True), _powers(devices, blocks))
        return tuple(
            cls(stages=number, shard=shard, parts=parts)
            for number, shard, parts in settings
            if (devices % (number * parts) == 0 or parts == 1) and _may_shard(shard, number * parts, devices)
        )

    @property
    def recomputing(self) -> Strategy | None:
        return None if self.recompute else msgspec.structs.replace(self, recompute=True)

    @property
    def sharded(self) -> bool:
        return self.shard


class Tensor(Strategy, frozen=True):
    """Each of ``parts`` neighbouring devices owns some of the column blocks that the model's layers are cut into.

    They compute the same samples and add up what their blocks compute. ``shard``: ZeRO-1 among the devices that have
    the same blocks.
    """

    name = "tensor"

    parts: int = 2
    shard: bool = False

    def __post_init__(self) -> None:
        _at_least(self, "parts", 1)

    @classmethod
    def candidates(cls, devices: int, nodes: int, layers: int, blocks: int) -> tuple[Strategy, ...]:
        """Return each number of parts that fills the devices evenly and is a power of 2, with and without shards.

        Where there is none it is 2, which is refused by name.
        """
        settings = itertools.product(_powers(devices, blocks)[1:] or [2], (False, True))
        return tuple(cls(parts=parts, shard=shard) for parts, shard in settings if _may_shard(shard, parts, devices))

    @property
    def sharded(self) -> bool:
        return self.shard


class Asynchronous(Strategy, frozen=True):
    """What the strategies have in common in which devices, called workers, update parameters and wait for nobody.

    What they share has as many *cells* as there are workers, each with a lock and a version. ``staleness``: a worker
    begins no update while it has made more than so many updates more than the slowest one (stale synchronous parallel,
    Ho et al. 2013).
    """

    asynchronous = True

    staleness: int = 4

    @classmethod
    def candidates(cls, devices: int, nodes: int, layers: int, blocks: int) -> tuple[Strategy, ...]:
        """Return none: there is no step to compare."""
        return ()

    def copies(self, workers: int) -> int:
        """Return how many copies of the parameters exist: one, whose shards are the cells, or a cell a worker."""
        return 1

    def groups(self, worker: int, workers: int, made: int, gone: Collection[int] = ()) -> list[tuple[int, ...]]:
        """Return the cells that a worker's update changes after the ``made`` ones before it, group after group.

        The first cell of a group is pulled before, and gets the gradient; then all cells of the group are averaged.
        Workers that are ``gone`` have left their copies behind.
        """
        return [((worker + number) % workers,) for number in range(workers)]


class ParameterServer(Asynchronous, frozen=True):
    """Workers update the same parameters, which are divided into shards, when they have a gradient."""

    name = "parameter-server"


class Gossip(Asynchronous, frozen=True):
    """Each worker updates parameters of its own, and then averages them with those of others (AD-PSGD).

    ``peers``: with how many others at once, or with all others where there are fewer; a worker takes them in turn.
    Source: Lian et al., arXiv:1710.06952, who draw the peer.
    """

    name = "gossip"

    peers: int = 1

    def __post_init__(self) -> None:
        _at_least(self, "peers", 1)

    def copies(self, workers: int) -> int:
        return workers

    def groups(self, worker: int, workers: int, made: int, gone: Collection[int] = ()) -> list[tuple[int, ...]]:
        others = [each for number in range(1, workers) if (each := (worker + number) % workers) not in gone]
        count = min(self.peers, len(others))
        return [(worker, *(others[(made * count + number) % len(others)] for number in range(count)))]


def _powers(devices: int, blocks: int) -> list[int]:
    """Return the powers of 2 that divide the devices and are at most the column blocks, from 1 on."""
    powers = (1 << power for power in range(devices.bit_length()))
    return [number for number in powers if devices % number == 0 and number <= blocks]


def _may_shard(shard: bool, classes: int, devices: int) -> bool:
    """Return whether there is something to shard: one device of each rank class has nobody to share with."""
    return not shard or classes < devices


def own_blocks(blocks: int, part: int, parts: int) -> range:
    """Return the column blocks that one of ``parts`` devices owns: neighbours, as equal in number as can be."""
    return range(blocks * part // parts, blocks * (part + 1) // parts)


STRATEGIES: dict[str, type[Strategy]] = {
    each.name: each for each in (DataParallel, Zero1, Zero2, Zero3, Pipeline, Tensor, ParameterServer, Gossip)
}
SYNCHRONOUS = tuple(name for name, kind in STRATEGIES.items() if not kind.asynchronous)
"""The names of those in which all devices make every step together."""
ASYNCHRONOUS = tuple(name for name, kind in STRATEGIES.items() if kind.asynchronous)
"""The names of the others."""


@functools.cache
def parse_strategy(text: str) -> Strategy:
    """Return the strategy of ``zero3:prefetch=2``. Raises ``ConfigError`` for an unknown name, setting or value."""
    name, colon, settings = text.partition(":")
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    kind = STRATEGIES[name]
    if colon and not settings:
        raise ConfigError(f"strategy is {text!r}", allowed=f"{name}, or {name}:SETTING=VALUE", remedy="drop the colon")
    values: dict[str, Any] = {}
    for part in settings.split(",") if settings else ():
        key, equals, value = part.partition("=")
        if key not in kind.__struct_fields__:
            names = ", ".join(kind.__struct_fields__) or "no settings"
            raise ConfigError(f"strategy {name} with the setting {key!r}", allowed=names, remedy=f"--strategy {name}")
        if key in values:
            raise ConfigError(f"strategy {text!r} sets {key} twice", allowed="each setting once")
        values[key] = _read(kind, key, value if equals else "")
    return kind(**values)


def parse_strategies(text: str) -> tuple[str, ...]:
    """Return the strategies of a list: commas separate settings too, which follow a strategy's colon."""
    parts: list[str] = []
    for part in text.split(","):
        name = part.strip()
        if parts and ":" in parts[-1] and "=" in name and name.partition(":")[0] not in STRATEGIES:
            parts[-1] += f",{name}"
        else:
            parts.append(name)
    return tuple(parse_strategy(part).text for part in parts)


def described() -> str:
    """Return each strategy with its settings, for help texts: ``zero2[:buckets=2]``."""
    texts = []
    for name, kind in STRATEGIES.items():
        settings = ",".join(f"{key}={_written(getattr(kind(), key))}" for key in kind.__struct_fields__)
        texts.append(f"{name}[:{settings}]" if settings else name)
    return ", ".join(texts)


def _read(kind: type[Strategy], key: str, text: str) -> Any:
    hint = get_type_hints(kind)[key]
    if hint is int and re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return int(text)
    words = _YES if hint is bool else {word: word for word in get_args(hint)}
    if text in words:
        return words[text]
    allowed = "a whole number" if hint is int else " or ".join(words)
    raise ConfigError(f"strategy {kind.name} with {key}={text}", allowed=f"{key}={allowed}")


def _written(value: Any) -> str:
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def _at_least(strategy: Strategy, key: str, least: int) -> None:
    if getattr(strategy, key) < least:
        raise ConfigError(f"strategy {strategy.name} with {key}={getattr(strategy, key)}", allowed=f"{least} or more")


FULLY_SHARD = Zero3(prefetch=0)
"""What PyTorch's ``fully_shard`` does on processors: nothing runs during a gather; on GPUs it gathers one ahead."""

ZERO_REDUNDANCY = Zero1(gather="broadcast").text
"""What PyTorch's ``ZeroRedundancyOptimizer`` does beside DDP."""


def fully_sharded(replicas: int) -> str:
    """Return the strategy of ``fully_shard`` on processors with a mesh of so many replicas."""
    return msgspec.structs.replace(FULLY_SHARD, replicas=replicas).text
