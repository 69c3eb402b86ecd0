"""What DDP itself logs about a model, or FSDP knows of it, beside what was recorded of its steps. Loads torch."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.lowering.ddp import Buckets, DdpOptions, DdpParameter, initial_buckets
from dpsim.model.observed import clean_words
from dpsim.torch.script.fsdp import ShardedModel, plain_update_s
from dpsim.torch.script.probe.rank_record import ddp_parameters, optimizer_slots
from dpsim.torch.script.recorded import Recorded, RecordedParameter, RecordedStep, is_clean
from dpsim.torch.script.request import ScriptRequest

if TYPE_CHECKING:
    from dpsim.torch.script.record import Recorder

_Parameter = TypeVar("_Parameter", DdpParameter, RecordedParameter)


def recorded_of(recorder: Recorder, request: ScriptRequest) -> Recorded:
    """Everything that was recorded of a script that trained enough. Raises ``ConfigError``."""
    ddp = recorder.ddp
    if isinstance(ddp, ShardedModel):
        return _recorded_of_shards(ddp, recorder, request)
    logged, buckets, reduced = ddp._get_ddp_logging_data(), kept_buckets(ddp), parameters_of(ddp)
    sizes = [parameter.size_bytes for parameter in reduced]
    by_count = sorted((step.own_collectives for step in recorder.steps), key=len)
    own = by_count[(len(by_count) - 1) // 2]
    settings = DdpSettings(
        torch=str(torch.__version__),
        devices=request.devices,
        accumulate=_accumulated(recorder),
        bucket_cap_bytes=None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap,
        bucket_caps_bytes=tuple(getattr(ddp, "bucket_bytes_cap_list", ())),
        find_unused_parameters=bool(ddp.find_unused_parameters),
        static_graph=bool(ddp.static_graph),
        communication_hook=logged.get("comm_hook", ""),
        initial_bucket_bytes=_numbers(logged["bucket_sizes"]),
        bucket_bytes=tuple(sum(sizes[index] for index in bucket) for bucket in buckets),
        own_collectives=len(own),
        own_allreduce_bytes=tuple(size for size in own if size is not None),
        sparse_gradient_bytes=sum(parameter.size_bytes for parameter in reduced if parameter.sparse),
        sharded_optimizer=_is_zero_redundancy(recorder.optimizer),
    )
    parameters = tuple(_parameters_as(RecordedParameter, ddp))
    return _recorded(recorder, request, settings, parameters, buckets)


def _recorded_of_shards(model: ShardedModel, recorder: Recorder, request: ScriptRequest) -> Recorded:
    """What was recorded of a script with ``fully_shard``: a unit is a bucket, and a module. Raises ``ConfigError``."""
    units = model.units
    settings = DdpSettings(
        torch=str(torch.__version__),
        devices=request.devices,
        accumulate=_accumulated(recorder),
        bucket_bytes=model.bucket_bytes,
        units=units,
    )
    parameters = tuple(
        RecordedParameter(name=name, module=unit, shape=tuple(shard.shape), dtype=_dtype(shard))
        for name, unit, shard in model.parameters
    )
    of_unit: dict[str, list[int]] = {}
    for index, (_, unit, _) in enumerate(model.parameters):
        of_unit.setdefault(unit, []).append(index)
    buckets = tuple(tuple(reversed(of_unit[unit.name])) for unit in reversed(units))
    return replace(
        _recorded(recorder, request, settings, parameters, buckets),
        shards=request.devices,
        shard_update_s=plain_update_s(recorder.optimizer),
    )


def _accumulated(recorder: Recorder) -> int:
    """The micro-batches of most steps."""
    micro_batches = [step.micro_batches for step in recorder.steps]
    return max(set(micro_batches), key=micro_batches.count)


def _recorded(
    recorder: Recorder,
    request: ScriptRequest,
    settings: DdpSettings,
    parameters: tuple[RecordedParameter, ...],
    buckets: Buckets,
) -> Recorded:
    model, optimizer = recorder.ddp, recorder.optimizer
    return Recorded(
        name=f"{type(model.module).__name__.removeprefix('FSDP')} of {request.name}",
        source=f"dpsim profile {request.flag}: medians of {len(recorder.steps)} steps on {model.device_type}"
        f"{_clean_share(recorder.steps)}, as rank 0 of {request.devices} in one process, PyTorch {torch.__version__}",
        parameters=parameters,
        first_parameter=recorder.first_parameter,
        buckets=buckets,
        steps=tuple(recorder.steps),
        ddp=settings,
        state_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.module.buffers()),
        optimizer_slots=optimizer_slots(optimizer.optim if _is_zero_redundancy(optimizer) else optimizer),
        input_workers=recorder.input_workers,
        load_s_per_sample=recorder.load_s_per_sample,
        memory=recorder.memory,
    )


def _clean_share(steps: list[RecordedStep]) -> str:
    """Say which share of the steps is clean; nothing where that is not known."""
    if not any(step.delayed_s for step in steps):
        return ""
    return clean_words(sum(map(is_clean, steps)) / len(steps))


def options_of(ddp: Any) -> DdpOptions:
    """The arguments of a DDP model that decide its buckets."""
    major, minor = torch.__version__.split(".")[:2]
    return DdpOptions(
        bucket_cap_bytes=None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap,
        bucket_caps_bytes=tuple(getattr(ddp, "bucket_bytes_cap_list", ())),
        find_unused_parameters=bool(ddp.find_unused_parameters),
        static_graph=bool(ddp.static_graph),
        torch_version=(int(major), int(minor)),
    )


def parameters_of(ddp: Any) -> list[DdpParameter]:
    """The parameters that DDP reduces, in the order of its positions."""
    return _parameters_as(DdpParameter, ddp)


def _parameters_as(kind: type[_Parameter], ddp: Any) -> list[_Parameter]:
    names = [field.name for field in fields(kind)]
    return [kind(**{name: each[name] for name in names}) for each in ddp_parameters(ddp)]


def kept_buckets(ddp: Any) -> Buckets:
    """The buckets that DDP uses after its first step, as it logs them; it logs no members where it does not rebuild.

    Raises ``ConfigError`` where it should have rebuilt them and has not, or made others at construction than it should.
    """
    logged = ddp._get_ddp_logging_data()
    members = logged.get("rebuilt_per_bucket_param_indices", "")
    if members:
        return tuple(tuple(map(int, bucket.split())) for bucket in members.split(","))
    parameters, options = parameters_of(ddp), options_of(ddp)
    buckets = initial_buckets(parameters, options)
    sizes = tuple(sum(parameters[index].size_bytes for index in bucket) for bucket in buckets)
    if options.rebuilds or sizes != _numbers(logged["bucket_sizes"]):
        raise ConfigError(
            f"DDP of PyTorch {torch.__version__} has buckets of {logged['bucket_sizes']} bytes",
            allowed=f"buckets of {', '.join(map(str, sizes))} bytes, which it rebuilds after the first step",
            remedy="use a released version of PyTorch from 2.0 on",
        )
    return buckets


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _is_zero_redundancy(optimizer: Any) -> bool:
    """Tell whether an optimizer is a ``ZeroRedundancyOptimizer``.

    Its module is imported only where the script has imported it: it takes long, and warns of its own deprecated calls.
    """
    defined = sys.modules.get("torch.distributed.optim")
    return defined is not None and isinstance(optimizer, defined.ZeroRedundancyOptimizer)
