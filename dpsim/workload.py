"""``Workload``: what is trained. Layers in forward order, their times against the local batch, their gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.ddp_settings import DdpSettings, GradientMemory
from dpsim.errors import ConfigError
from dpsim.memo import remember
from dpsim.uncertainty import check_uncertainty
from dpsim.units import ITEM_BYTES

SCHEMA = "dpsim.workload/1"
_MOST_BYTES = 2**60  # so that sums stay 64-bit whole numbers
_LARGEST_BATCH = 10**12


class Tensor(Noun, frozen=True):
    """One gradient tensor (and its parameter): a name that is unique in the workload, a shape, a dtype.

    FSDP gathers the parameter as ``gather_dtype`` and reduces the gradient as ``reduce_dtype`` (empty: its own).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    gather_dtype: str = ""
    reduce_dtype: str = ""

    def __post_init__(self) -> None:
        for key, dtype in (("dtype", self.dtype), ("gather_dtype", self.gathered), ("reduce_dtype", self.reduced)):
            if dtype not in ITEM_BYTES:
                raise ConfigError(f"tensor {self.name!r} has {key} {dtype!r}", allowed=", ".join(ITEM_BYTES))
        if any(n < 0 for n in self.shape):
            raise ConfigError(f"tensor {self.name!r} has shape {self.shape}", allowed="no negative extent")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    def padded(self, devices: int) -> int:
        """Return the elements of ``devices`` equal shards of whole rows."""
        rows = self.shape[0] if self.shape else 1
        return self.elements if not rows else -(-rows // devices) * devices * (self.elements // rows)

    @property
    def gathered(self) -> str:
        """The dtype as which the parameter is gathered."""
        return self.gather_dtype or self.dtype

    @property
    def reduced(self) -> str:
        """The dtype as which the gradient is added up."""
        return self.reduce_dtype or self.dtype


class Layer(Noun, frozen=True):
    """One layer: its device time at each of the workload's ``local_batches``, and its gradient tensors.

    ``forward_s`` and ``backward_s`` have one entry per local batch. ``gradient_ready_s`` (optional) is the
    time from the start of this layer's backward until its gradients are final; without it they are final
    when its backward ends. ``launch_s`` is the host time to launch the layer's work (0 where host and device
    are one), once in forward and once in backward, or ``launch_backward_s`` there. ``depends_on`` names the layers
    that it reads; ``None``: the layer before it. ``activation_bytes_per_sample`` is what it keeps for backward,
    ``output_bytes_per_sample`` what it hands on to the layers that read it (0: not known). For a micro-batch of b
    samples dpsim's own runtime allocates ``work_bytes + b work_bytes_per_sample``: all that the layer works in.
    ``column_block`` is which block of a larger layer it is, so that devices may own some of them; -1: whole. What reads
    several blocks reads their sum. ``recompute_s`` is what ``backward_s`` has of computing forward again (activation
    checkpointing), or would have more where the script does not (``DdpSettings.recomputes``; empty: not known), and
    ``other_activation_bytes_per_sample`` what the layer would keep with that choice: ``dpsim.model.recomputation``.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    gradient_ready_s: tuple[float, ...] | None = None
    tensors: tuple[Tensor, ...] = ()
    kind: str = "layer"
    depends_on: tuple[str, ...] | None = None
    launch_s: float = 0.0
    activation_bytes_per_sample: float = 0.0
    batch_norm_channels: int = 0
    launch_backward_s: float | None = None
    output_bytes_per_sample: float = 0.0
    work_bytes: float = 0.0
    work_bytes_per_sample: float = 0.0
    column_block: int = -1
    recompute_s: tuple[float, ...] = ()
    other_activation_bytes_per_sample: float = 0.0

    @property
    def launched_backward_s(self) -> float:
        """Host seconds to launch the layer's backward."""
        return self.launch_s if self.launch_backward_s is None else self.launch_backward_s

    def __post_init__(self) -> None:
        sizes = [name for name in self.__struct_fields__ if name.endswith(("_bytes", "_bytes_per_sample"))]
        for key in ("launch_s", "launch_backward_s", *sizes, "batch_norm_channels"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= _MOST_BYTES:
                raise ConfigError(f"layer {self.name!r} has {key} {value}", allowed="a finite number >= 0")


class Workload(Noun, frozen=True, dict=True):
    """A description of what is trained: layers in forward order, and where the numbers come from.

    ``local_batches`` (ascending) are the batch sizes at which times were taken; between them times are
    interpolated, outside them extrapolated along the nearest segment (in proportion if there is only one size).
    ``update_s`` is the optimizer's time per step. ``overhead_s + b overhead_per_sample_s`` is the time that a step of
    local batch b spends outside the layers and the update: fetching the batch, bookkeeping. ``loss_s`` is what the
    loss of a micro-batch takes at each of the ``local_batches``; empty where it is part of the overhead. In a step of
    several micro-batches layers take ``accumulation_factor`` times as long: gradients are added up, and caches hold
    other data.
    ``update_bytes`` is what lives at most in an update of all parameters, beside these, gradients and optimizer state.
    ``optimizer_slots`` is how many arrays of the parameters' size the optimizer keeps; ``None``: as the plan's does.
    ``step_spread`` says how much the computing time of one device varies from step to step: evenly spaced quantiles of
    it over its median, ascending (value i of k is quantile (i + 1/2) / k); empty where it is not known.
    ``step_correlation`` says how far the devices of a step are slow together: 0 where each draws its time for itself,
    1 where all draw the same and none waits for another (``dpsim.model.slowest``).
    ``relative_uncertainty`` is one standard error of the layer times over them (``None``: not known). What later
    changes of the machine add is stated by the machine.

    ``input_s_per_sample`` is what one process takes to load and prepare a sample; a step needs ``input_s``. With
    ``input_prefetch`` that goes on during the step before, by ``input_workers`` processes at once; without, the step
    waits for it. ``ddp`` is what a PyTorch script was set to, where the workload was recorded from one. ``device``
    is the model of the device that the times are of (empty: not known).
    """

    name: str
    local_batches: tuple[int, ...]
    layers: tuple[Layer, ...]
    update_s: float = 0.0
    overhead_s: float = 0.0
    overhead_per_sample_s: float = 0.0
    state_bytes: int = 0
    optimizer_slots: int | None = None
    emulated_compute: bool = False
    step_spread: tuple[float, ...] = ()
    source: str = ""
    schema: str = SCHEMA
    relative_uncertainty: float | None = None
    input_s_per_sample: float = 0.0
    input_workers: int = 1
    input_prefetch: bool = False
    ddp: DdpSettings | None = None
    step_correlation: float = 0.0
    loss_s: tuple[float, ...] = ()
    accumulation_factor: float = 1.0
    update_bytes: int = 0
    device: str = ""

    def __post_init__(self) -> None:
        batches = self.local_batches
        if not batches or any(a >= b for a, b in itertools.pairwise((0, *batches, _LARGEST_BATCH + 1))):
            raise ConfigError(
                f"local_batches is {list(batches)}",
                allowed=f"one or more sizes from 1 to {_LARGEST_BATCH:.0e}, ascending",
            )
        if not self.layers:
            raise ConfigError(f"workload {self.name!r} has no layers", allowed="at least one layer")
        names = [layer.name for layer in self.layers]
        tensors = [t.name for layer in self.layers for t in layer.tensors]
        for what, words in (("layer", names), ("tensor", tensors)):
            if len(set(words)) != len(words):
                repeated = next(word for word, count in Counter(words).items() if count > 1)
                raise ConfigError(f"two {what}s are named {repeated!r}", allowed="unique names")
        tensor_names = set(names)
        for layer in self.layers:
            self._check_layer(layer, tensor_names)
        for key in ("update_s", "overhead_s", "overhead_per_sample_s", "input_s_per_sample"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{key} is {value}", allowed="finite seconds >= 0")
        if self.loss_s and (len(self.loss_s) != len(batches) or not all(0 <= each < math.inf for each in self.loss_s)):
            raise ConfigError(
                f"loss_s is {list(self.loss_s)}", allowed="finite seconds >= 0, one per local batch, or none"
            )
        if not 0 < self.accumulation_factor < math.inf:
            raise ConfigError(f"accumulation_factor is {self.accumulation_factor}", allowed="a finite number > 0")
        self._check_input()
        spread = self.step_spread
        if any(not 0 < value < math.inf for value in spread) or list(spread) != sorted(spread):
            raise ConfigError(
                f"workload {self.name!r} has step_spread {list(spread)}",
                allowed="finite ratios > 0 in ascending order, or none",
            )
        if not 0 <= self.step_correlation <= 1:
            raise ConfigError(
                f"workload {self.name!r} has step_correlation {self.step_correlation}",
                allowed="0 (each device for itself) to 1 (all devices together)",
            )
        check_uncertainty(f"workload {self.name!r}", relative_uncertainty=self.relative_uncertainty)
        sizes = {"gradient bytes": self.gradient_bytes, "optimizer_slots": self.optimizer_slots or 0}
        for what, size in (sizes | {each: getattr(self, each) for each in ("state_bytes", "update_bytes")}).items():
            if not 0 <= size <= _MOST_BYTES:
                raise ConfigError(f"workload {self.name!r} has {size} {what}", allowed="0 to 2^60")

    def _check_input(self) -> None:
        workers, prefetch = self.input_workers, self.input_prefetch
        if workers < 1:
            raise ConfigError(f"input_workers is {workers}", allowed="1 or more")
        if workers > 1 and not prefetch:
            raise ConfigError(
                f"{workers} input_workers without input_prefetch",
                allowed="1 worker where a step waits for its own samples",
                remedy="set input_prefetch = true if they prepare samples of later steps",
            )
        if (workers > 1 or prefetch) and self.input_s_per_sample == 0:
            raise ConfigError(
                "input_workers or input_prefetch without input_s_per_sample",
                allowed="both where preparing a sample takes time",
                remedy="state input_s_per_sample, or leave them out",
            )

    def input_s(self, samples: float) -> float:
        """Return seconds that preparing the input of a step takes: samples input_s_per_sample / input_workers."""
        return samples * self.input_s_per_sample / self.input_workers

    def _check_layer(self, layer: Layer, names: set[str]) -> None:
        for key in ("forward_s", "backward_s", "gradient_ready_s", "recompute_s"):
            times = getattr(layer, key)
            if times is None or (key == "recompute_s" and not times):
                continue
            if len(times) != len(self.local_batches):
                raise ConfigError(
                    f"layer {layer.name!r} has {len(times)} values of {key}",
                    allowed=f"one per local batch: {len(self.local_batches)}",
                )
            if any(not math.isfinite(t) or t < 0 for t in times):
                raise ConfigError(f"layer {layer.name!r} has {key} {list(times)}", allowed="finite seconds >= 0")
        for name in layer.depends_on or ():
            if name not in names:
                raise ConfigError(f"layer {layer.name!r} depends on {name!r}", allowed="names of layers")

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All gradient tensors in forward order."""
        return tuple(t for layer in self.layers for t in layer.tensors)

    def most_common_dtype(self, sent: Literal["gathered", "reduced"]) -> str:
        """Return the dtype as which most numbers are ``gathered`` or ``reduced``; float32 of none."""
        numbers = Counter[str]()
        for tensor in self.tensors:
            numbers[getattr(tensor, sent)] += tensor.elements
        return max(numbers, key=numbers.__getitem__, default="float32")

    @property
    def own_allreduce_bytes(self) -> tuple[int, ...]:
        """The sizes of the allreduces that its script asks for itself in a step."""
        return () if self.ddp is None else self.ddp.own_allreduce_bytes

    @property
    def deferred(self) -> bool:
        """Whether the last micro-batch of a step alone reduces gradients."""
        return self.ddp is None or self.ddp.deferred

    def reducing(self, accumulate: int) -> tuple[int, ...]:
        """Return which of so many micro-batches of a step reduce gradients, from 0."""
        return (accumulate - 1,) if self.ddp is None else self.ddp.reducing(accumulate)

    @property
    def all_reduce_deferred(self) -> bool:
        """Whether shards are added up over replicas in the last micro-batch alone."""
        return self.ddp is None or self.ddp.all_reduce_deferred

    @property
    def gradient_memory(self) -> GradientMemory:
        """When the gradients of its script have memory of their own; empty where there is none, or it is not known."""
        return "" if self.ddp is None else self.ddp.gradients

    @property
    def gradient_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors)

    @functools.cached_property
    def column_blocks(self) -> int:
        """How many column blocks layers are cut into; 1 where none is."""
        return max(1, 1 + max(layer.column_block for layer in self.layers))

    @functools.cached_property
    def ready_order(self) -> ReadyOrder:
        """The gradient tensors in the order in which backward makes them final."""
        index = {t.name: i for i, t in enumerate(self.tensors)}
        order, layers = [], []
        for number in range(len(self.layers) - 1, -1, -1):
            for tensor in reversed(self.layers[number].tensors):
                order.append(index[tensor.name])
                layers.append(number)
        sizes = np.array([self.tensors[i].size_bytes for i in order], np.int64)
        codes = list(ITEM_BYTES)
        return ReadyOrder(
            tensor=np.array(order, np.int64),
            layer=np.array(layers, np.int64),
            size_bytes=sizes,
            dtype_code=np.array([codes.index(self.tensors[i].dtype) for i in order], np.int64),
            cumulative_bytes=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """What ``remember`` keeps of this workload."""
        return {}

    @remember
    def times(self, local_batch: float) -> LayerTimes:
        """Return seconds of each layer at a local batch, which may be fractional: the mean of unequal shares."""
        if not local_batch > 0:
            raise ConfigError(f"local batch {local_batch}", allowed="more than 0")
        x = np.array(self.local_batches, float)

        def at(rows: list[tuple[float, ...]]) -> NDArray[np.float64]:
            return np.maximum(_interpolate(x, np.array(rows, float), local_batch), 0.0)

        backward_s = at([layer.backward_s for layer in self.layers])
        ready_s = at([layer.gradient_ready_s or layer.backward_s for layer in self.layers])
        return LayerTimes(
            forward_s=at([layer.forward_s for layer in self.layers]),
            backward_s=backward_s,
            gradient_ready_s=np.minimum(ready_s, backward_s),
            overhead_s=self.overhead_s + local_batch * self.overhead_per_sample_s,
            loss_s=float(at([self.loss_s])[0]) if self.loss_s else 0.0,
        )

    def slowed(self, factor: float) -> Workload:
        """Return the workload if all computing takes ``factor`` times as long; input loading and launches stay."""

        def times(seconds: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * value for value in seconds)

        layers = tuple(
            msgspec.structs.replace(
                layer,
                forward_s=times(layer.forward_s),
                backward_s=times(layer.backward_s),
                gradient_ready_s=layer.gradient_ready_s and times(layer.gradient_ready_s),
                recompute_s=times(layer.recompute_s),
            )
            for layer in self.layers
        )
        return msgspec.structs.replace(
            self,
            layers=layers,
            update_s=factor * self.update_s,
            loss_s=times(self.loss_s),
            overhead_s=factor * self.overhead_s,
            overhead_per_sample_s=factor * self.overhead_per_sample_s,
        )

    def spread_at(self, share: float) -> float:
        """Return the quantile of a step's computing time for this share of steps, over its median; 1: not known."""
        if not self.step_spread:
            return 1.0
        places = (np.arange(len(self.step_spread)) + 0.5) / len(self.step_spread)
        return float(np.interp(share, places, self.step_spread))

    def extrapolated(self, local_batch: float) -> bool:
        """Return whether times at this local batch lie outside what was measured."""
        return not self.local_batches[0] <= local_batch <= self.local_batches[-1]


@dataclass(frozen=True, kw_only=True)
class ReadyOrder:
    """Gradient tensors in backward order: forward index, layer index, size and dtype of each, as arrays of one length.

    ``dtype_code`` is the position in ``ITEM_BYTES``; ``cumulative_bytes`` has one entry more and starts at 0.
    """

    tensor: NDArray[np.int64]
    layer: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    dtype_code: NDArray[np.int64]
    cumulative_bytes: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds at one local batch: of each layer, in forward order, of the loss, and of a step besides those."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    gradient_ready_s: NDArray[np.float64]
    overhead_s: float
    loss_s: float


def _interpolate(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> NDArray[np.float64]:
    """Return piecewise linear rows of ``y`` (rows, points) at one ``at``; beyond the ends along the nearest segment."""
    if len(x) == 1:
        scaled: NDArray[np.float64] = y[:, 0] * (at / x[0])
        return scaled
    i = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
    weight = (at - x[i]) / (x[i + 1] - x[i])
    line: NDArray[np.float64] = y[:, i] * (1 - weight) + y[:, i + 1] * weight
    return line


def overhead_line(local_batches: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (``overhead_s``, ``overhead_per_sample_s``): the line nearest to the overhead at each batch, both >= 0.

    An overhead that was measured as a difference of two times, and came out below 0, counts as none.
    """
    overheads, batches = np.maximum(seconds, 0.0), np.array(local_batches)
    slope = float(np.polyfit(batches, overheads, 1)[0]) if len(batches) > 1 else 0.0
    slope = min(max(slope, 0.0), float(np.min(overheads / batches)))
    return max(float(np.mean(overheads - slope * batches)), 0.0), slope


def read(path: Path | str) -> Workload:
    """Read a workload file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return codec.read(Path(path), Workload, "workload", SCHEMA)
