"""What the process of a script has written down of its DDP or FSDP model, and what was recorded of its training.

Loads no torch. ``dpsim.torch.script.probe.script_record`` writes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dpsim import processor
from dpsim.codec import Noun
from dpsim.ddp_settings import DdpSettings, ShardedUnit
from dpsim.errors import ConfigError
from dpsim.lowering.ddp import Buckets, DdpOptions, DdpParameter, initial_buckets
from dpsim.lowering.zero1 import owners
from dpsim.model.observed import clean_words
from dpsim.torch.script.probe.steps import RecordedStep, StepMemory
from dpsim.torch.script.recorded import Recorded, RecordedParameter, is_clean
from dpsim.torch.script.request import ScriptRequest


class ReducedParameter(Noun, frozen=True):
    """A parameter that DDP reduces; ``module`` has it, with so many channels of batch norm (0: none)."""

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    batch_norm_channels: int
    size_bytes: int
    device: str
    sparse: bool


class DdpRecord(Noun, frozen=True):
    """What a DDP model was given, and what it logs; ``rebuilt`` has its buckets, if it logs their members.

    ``device_name`` is the model of a GPU, and empty on a processor.
    """

    torch: str
    device: str
    parameters: tuple[ReducedParameter, ...]
    rebuilt: str
    initial_bucket_bytes: str
    communication_hook: str
    bucket_cap_bytes: int | None
    bucket_caps_bytes: tuple[int, ...]
    find_unused_parameters: bool
    static_graph: bool
    state_bytes: int
    joins: bool
    parameters_sha256: str = ""
    optimizer: str = ""
    device_name: str = ""

    @property
    def options(self) -> DdpOptions:
        """The arguments that decide the buckets."""
        major, minor = self.torch.split(".")[:2]
        return DdpOptions(
            bucket_cap_bytes=self.bucket_cap_bytes,
            bucket_caps_bytes=self.bucket_caps_bytes,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            torch_version=(int(major), int(minor)),
        )

    @property
    def ddp_parameters(self) -> list[DdpParameter]:
        """The parameters, as far as they decide the buckets."""
        return [
            DdpParameter(size_bytes=each.size_bytes, dtype=each.dtype, device=each.device, sparse=each.sparse)
            for each in self.parameters
        ]

    @property
    def recorded_parameters(self) -> tuple[RecordedParameter, ...]:
        """The parameters, as far as they decide a workload."""
        names = RecordedParameter.__dataclass_fields__.keys() & ReducedParameter.__struct_fields__
        return tuple(RecordedParameter(**{name: getattr(each, name) for name in names}) for each in self.parameters)

    @property
    def buckets(self) -> Buckets:
        """The buckets that DDP keeps, each of positions in ``parameters``, in the order in which it sends them."""
        if self.rebuilt:
            return tuple(tuple(map(int, bucket.split())) for bucket in self.rebuilt.split(","))
        return initial_buckets(self.ddp_parameters, self.options)

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """The sizes of ``buckets``."""
        return tuple(sum(self.parameters[index].size_bytes for index in bucket) for bucket in self.buckets)

    def settings(self, *, devices: int, accumulate: int, **others: Any) -> DdpSettings:
        """Return how it trained, as far as that decides communication."""
        shared = set(DdpSettings.__struct_fields__) & set(DdpRecord.__struct_fields__) - {"initial_bucket_bytes"}
        return DdpSettings(
            devices=devices,
            accumulate=accumulate,
            initial_bucket_bytes=numbers(self.initial_bucket_bytes),
            bucket_bytes=self.bucket_bytes,
            **{name: getattr(self, name) for name in shared},
            **others,
        )


class Shard(Noun, frozen=True):
    """A parameter of which this rank has a shard; ``module`` is the unit that it is gathered with.

    It is gathered as ``gather_dtype``, and its gradient is reduced as ``reduce_dtype``.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    gather_dtype: str
    reduce_dtype: str


class ShardsRecord(Noun, frozen=True):
    """What FSDP knows of a model that it has sharded; ``update_s`` is the part of an update that grows with a shard.

    ``replicas`` are the groups of ranks that have a copy of the parameters each.
    """

    torch: str
    device: str
    units: tuple[ShardedUnit, ...]
    parameters: tuple[Shard, ...]
    state_bytes: int
    update_s: float | None
    replicas: int = 1
    frozen_bytes: int = 0
    parameters_sha256: str = ""
    optimizer: str = ""
    device_name: str = ""


class ScriptRecord(Noun, frozen=True):
    """What was recorded of a script: of a DDP model (``ddp``) or a sharded one (``shards``)."""

    model: str
    steps: tuple[RecordedStep, ...]
    first_parameter: Mapping[str, int]
    optimizer_slots: int | None
    sharded_optimizer: bool
    sync_batch_norm: bool
    input_workers: int
    load_s_per_sample: float
    memory: StepMemory | None
    ddp: DdpRecord | None = None
    shards: ShardsRecord | None = None

    @property
    def accumulate(self) -> int:
        """The micro-batches of most steps."""
        micro_batches = [step.micro_batches for step in self.steps]
        return max(set(micro_batches), key=micro_batches.count)

    @property
    def accumulation(self) -> dict[str, Any]:
        """How most steps accumulate, as ``DdpSettings`` has it."""
        steps = [step for step in self.steps if step.micro_batches == self.accumulate]
        ((reduces, _),) = Counter(step.reductions for step in steps).most_common(1)
        summed = [(step.all_reductions or len(step.reductions)) < len(step.reductions) for step in steps]
        return {
            "accumulate": self.accumulate,
            "deferred": len(reduces) == 1,
            "reduces": reduces if 1 < len(reduces) < self.accumulate else (),
            "all_reduce_deferred": 2 * sum(summed) > len(steps),
            "late_flag": 2 * sum(step.late_flags > 0 for step in steps) > len(steps),
        }


class ScriptOutcome(Noun, frozen=True):
    """What running a script came to: a record, or the three parts of the error that says why there is none."""

    record: ScriptRecord | None = None
    error: tuple[str, str, str] | None = None


def recorded_of(record: ScriptRecord, request: ScriptRequest) -> Recorded:
    """Return the training that a record tells of. Raises ``ConfigError``."""
    if record.shards is not None:
        return _recorded_of_shards(record, record.shards, request)
    if record.ddp is None:
        raise ConfigError(f"{request.name} has no model in its record", allowed="one of DDP or of fully_shard")
    check_buckets(record.ddp)
    ddp = record.ddp
    own = _own_collectives(record)
    settings = ddp.settings(
        devices=request.devices,
        **record.accumulation,
        own_collectives=len(own),
        own_allreduce_bytes=tuple(size for size in own if size is not None),
        sparse_gradient_bytes=sum(each.size_bytes for each in ddp.parameters if each.sparse),
        sharded_optimizer=record.sharded_optimizer,
        sync_batch_norm=record.sync_batch_norm,
    )
    shards = _shards(ddp.recorded_parameters, request.devices) if record.sharded_optimizer else 1.0
    return _recorded(record, ddp, request, settings, ddp.recorded_parameters, ddp.buckets, shards=shards)


def _shards(parameters: Sequence[RecordedParameter], devices: int) -> float:
    """All parameters as a multiple of those that rank 0, which was recorded, updates by ``ZeroRedundancyOptimizer``."""
    elements = [math.prod(each.shape) for each in parameters]
    own = sum(size for size, owner in zip(elements, owners(elements, devices), strict=True) if owner == 0)
    return sum(elements) / own if own else 1.0


def _own_collectives(record: ScriptRecord) -> tuple[int | None, ...]:
    """The collectives that the script asks for itself in a step of the median number of them."""
    by_count = sorted((step.own_collectives for step in record.steps), key=len)
    return by_count[(len(by_count) - 1) // 2]


def _recorded_of_shards(record: ScriptRecord, model: ShardsRecord, request: ScriptRequest) -> Recorded:
    """What was recorded of a script with ``fully_shard``: a unit is a bucket, and a module."""
    settings = DdpSettings(
        torch=model.torch,
        devices=request.devices,
        **record.accumulation,
        bucket_bytes=tuple(unit.size_bytes for unit in reversed(model.units)),
        units=model.units,
        replicas=model.replicas,
        frozen_bytes=model.frozen_bytes,
        parameters_sha256=model.parameters_sha256,
        optimizer=model.optimizer,
        sync_batch_norm=record.sync_batch_norm,
        own_collectives=len(_own_collectives(record)),
    )
    parameters = tuple(RecordedParameter(**msgspec.structs.asdict(shard)) for shard in model.parameters)
    of_unit: dict[str, list[int]] = {}
    for index, shard in enumerate(model.parameters):
        of_unit.setdefault(shard.module, []).append(index)
    buckets = tuple(tuple(reversed(of_unit[unit.name])) for unit in reversed(model.units))
    return _recorded(
        record,
        model,
        request,
        settings,
        parameters,
        buckets,
        shards=request.devices // model.replicas,
        shard_update_s=model.update_s,
    )


def _recorded(
    record: ScriptRecord,
    model: DdpRecord | ShardsRecord,
    request: ScriptRequest,
    settings: DdpSettings,
    parameters: tuple[RecordedParameter, ...],
    buckets: Buckets,
    **shards: Any,
) -> Recorded:
    return Recorded(
        name=f"{record.model} of {request.name}",
        source=f"dpsim profile {request.flag}: medians of {len(record.steps)} steps on {model.device}"
        f"{_clean_share(record.steps)}, as rank 0 of {request.devices} in one process, PyTorch {model.torch}",
        parameters=parameters,
        first_parameter=record.first_parameter,
        buckets=buckets,
        steps=record.steps,
        ddp=settings,
        state_bytes=model.state_bytes,
        optimizer_slots=record.optimizer_slots,
        input_workers=record.input_workers,
        load_s_per_sample=record.load_s_per_sample,
        memory=record.memory,
        device=model.device_name or processor.model(),
        **shards,
    )


def _clean_share(steps: Sequence[RecordedStep]) -> str:
    """Say which share of the steps is clean; nothing where that is not known."""
    if not any(step.delayed_s for step in steps):
        return ""
    return clean_words(sum(map(is_clean, steps)) / len(steps))


def check_buckets(ddp: DdpRecord) -> None:
    """Raises ``ConfigError`` where DDP should have rebuilt its buckets and has not, or made others than it should."""
    if ddp.rebuilt:
        return
    if ddp.options.rebuilds or ddp.bucket_bytes != numbers(ddp.initial_bucket_bytes):
        raise ConfigError(
            f"DDP of PyTorch {ddp.torch} has buckets of {ddp.initial_bucket_bytes} bytes",
            allowed=f"buckets of {', '.join(map(str, ddp.bucket_bytes))} bytes, which it rebuilds after the first step",
            remedy="use a released version of PyTorch from 2.0 on",
        )


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a text that has commas between them."""
    return tuple(int(number) for number in text.split(",") if number.strip())
