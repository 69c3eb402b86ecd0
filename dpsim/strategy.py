"""The strategy of a plan: how the devices divide samples, layers, gradients and parameters among them.

A strategy is written like a model, ``zero3:prefetch=2,reshard=no``: its name, and its settings where they are not the
defaults. ``dpsim.lowering`` turns each one into a Schedule; everything else asks for the properties of ``Strategy``.
"""

from __future__ import annotations

import functools
import re
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import msgspec

from dpsim.codec import Noun
from dpsim.collective import CollectiveKind
from dpsim.errors import ConfigError, unknown

_YES = {"yes": True, "no": False}


class Strategy(Noun, frozen=True):
    """What every strategy says of itself.

    ``shards_gradients``: gradients are reduce-scattered, and a device updates its shard of them alone. ``gathers``:
    parameters are brought together beside the computation. ``whole_micro_batches``: every device computes exactly
    the micro-batches that the plan names, each in one pass. ``stages``: the parts that layers are divided into.
    ``asynchronous``: devices make no step together.
    """

    name: ClassVar[str]
    shards_gradients: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    whole_micro_batches: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False

    @classmethod
    def candidates(cls, devices: int, layers: int) -> tuple[Strategy, ...]:
        """Return the settings that are compared where the best ones are asked for; layers bound the stages."""
        return (cls(),)

    @property
    def recomputing(self) -> Strategy | None:
        """The same with activations that are computed again instead of kept; ``None`` where no setting says so."""
        return None

    @property
    def stage_count(self) -> int:
        """The stages of layers, each on devices of its own; 1 where every device computes all layers."""
        return 1

    @property
    def sharded(self) -> bool:
        """Whether a device updates a shard of the parameters alone."""
        return self.shards_gradients

    @property
    def sends(self) -> bool:
        """Whether devices send messages to each other, beside their collectives."""
        return self.stage_count > 1

    @property
    def gradient_collective(self) -> CollectiveKind:
        """What adds up the gradients."""
        return "reduce-scatter" if self.sharded else "allreduce"

    @property
    def collectives(self) -> tuple[CollectiveKind, ...]:
        """The collectives that its calibration measures."""
        return ("allreduce", "reduce-scatter", "all-gather") if self.sharded else ("allreduce",)

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
    """A device updates a shard of the parameters, and has optimizer state for it alone."""

    name = "zero1"
    shards_gradients = True


class Zero2(Strategy, frozen=True):
    """ZeRO-1 in which a device keeps its shard of the gradients alone.

    ``buckets``: how many whole buckets of gradients there may be at once, or more where one layer's tensors fill more.
    """

    name = "zero2"
    shards_gradients = True

    buckets: int = 2

    def __post_init__(self) -> None:
        _at_least(self, "buckets", 1)


class Zero3(Strategy, frozen=True):
    """ZeRO-2 in which a device keeps its shard of the parameters alone (FSDP). A bucket is a unit of whole layers.

    A unit is gathered before it is needed, while the ``prefetch`` units before it compute. With ``reshard`` it is given
    up after forward and gathered again for backward; without, it is kept from forward to backward.
    """

    name = "zero3"
    shards_gradients = gathers = whole_micro_batches = True

    prefetch: int = 1
    reshard: bool = True

    def __post_init__(self) -> None:
        _at_least(self, "prefetch", 0)

    @classmethod
    def candidates(cls, devices: int, layers: int) -> tuple[Strategy, ...]:
        return tuple(cls(prefetch=prefetch, reshard=reshard) for reshard in (True, False) for prefetch in (1, 2))


class Pipeline(Strategy, frozen=True):
    """Layers are divided into ``stages`` of neighbours; the micro-batches of a step (``accumulate``) flow through them.

    ``order``: ``1f1b`` begins a backward as soon as it can, so that a stage keeps the activations of as many
    micro-batches as there are stages from it to the end; ``gpipe`` computes all forwards first. ``balance``: stages of
    equal computing time, or of equal memory. ``recompute``: a stage keeps what a micro-batch enters and leaves it with
    alone, and computes its forward again before backward. ``shard``: ZeRO-1 among the devices of a stage.
    """

    name = "pipeline"
    whole_micro_batches = True

    stages: int = 2
    order: Literal["1f1b", "gpipe"] = "1f1b"
    balance: Literal["time", "memory"] = "time"
    recompute: bool = False
    shard: bool = False

    def __post_init__(self) -> None:
        _at_least(self, "stages", 1)

    @classmethod
    def candidates(cls, devices: int, layers: int) -> tuple[Strategy, ...]:
        """Return each number of stages that fills the devices evenly, with and without shards.

        Where there is none it is 2, which a plan refuses by name. The order is 1f1b: gpipe has the same bubble, and
        keeps the activations of as many micro-batches or more. With one device a stage there is nothing to shard.
        """
        stages = [number for number in range(2, min(devices, layers) + 1) if devices % number == 0] or [2]
        return tuple(
            cls(stages=number, shard=shard)
            for number in stages
            for shard in (False, True)
            if number < devices or not shard
        )

    @property
    def recomputing(self) -> Strategy | None:
        return None if self.recompute else msgspec.structs.replace(self, recompute=True)

    @property
    def stage_count(self) -> int:
        return self.stages

    @property
    def sharded(self) -> bool:
        return self.shard


class ParameterServer(Strategy, frozen=True):
    """Devices update shared parameters when they have a gradient, and wait for nobody.

    ``staleness``: a device begins no update while it has made more than so many updates more than the slowest device
    (stale synchronous parallel, Ho et al. 2013).
    """

    name = "parameter-server"
    asynchronous = True

    staleness: int = 4

    @classmethod
    def candidates(cls, devices: int, layers: int) -> tuple[Strategy, ...]:
        """Return none: there is no step to compare."""
        return ()


STRATEGIES: dict[str, type[Strategy]] = {
    each.name: each for each in (DataParallel, Zero1, Zero2, Zero3, Pipeline, ParameterServer)
}


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
            known = ", ".join(kind.__struct_fields__) or "no settings"
            raise ConfigError(f"strategy {name} with the setting {key!r}", allowed=known, remedy=f"--strategy {name}")
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
