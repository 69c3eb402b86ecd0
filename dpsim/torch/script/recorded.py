"""What was recorded of a script's training, and the ``Workload`` that it makes, at one or several local batches.

Loads no torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.lowering.ddp import Buckets
from dpsim.model.observed import most_delayed_s
from dpsim.torch.script.probe.steps import MODES, RecordedStep, StepMemory
from dpsim.torch.script.recomputed import divided_s, forward_of_blocks_s, other_activation_bytes
from dpsim.workload import Layer, Tensor, Workload, overhead_line


@dataclass(frozen=True, kw_only=True)
class RecordedParameter:
    """A parameter that DDP reduces, the module that has it, and the channels of that module's batch norm (0: none).

    ``gather_dtype`` and ``reduce_dtype`` are those of its ``Tensor``.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    batch_norm_channels: int = 0
    gather_dtype: str = ""
    reduce_dtype: str = ""

    @property
    def tensor(self) -> Tensor:
        """The parameter in a workload; a type that it has itself is left out."""
        others = {"gather_dtype": self.gather_dtype, "reduce_dtype": self.reduce_dtype}
        sent = {name: dtype for name, dtype in others.items() if dtype != self.dtype}
        return Tensor(name=self.name, shape=self.shape, dtype=self.dtype, **sent)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded training.

    ``buckets`` are those that DDP kept, as positions in ``parameters``, and ``first_parameter`` is the position of the
    first parameter of every module. ``input_workers`` is 0 where the training process itself loads the data; otherwise
    ``load_s_per_sample`` is what one process takes (0: not known).
    """

    name: str
    source: str
    parameters: tuple[RecordedParameter, ...]
    first_parameter: Mapping[str, int]
    buckets: Buckets
    steps: tuple[RecordedStep, ...]
    ddp: DdpSettings
    state_bytes: int = 0
    optimizer_slots: int | None = None
    input_workers: int = 0
    load_s_per_sample: float = 0.0
    shards: float = 1
    """All parameters as a multiple of those that the rank updates, where it updates its shard alone."""
    shard_update_s: float | None = None
    """Seconds of the part of an update that grows with a rank's shard; None: all of it."""
    memory: StepMemory | None = None
    device: str = ""
    """The model of the device that trained."""


_LEAST_CLEAN = 2
"""Clean steps of a mode with which the disturbed ones do not count."""


def is_clean(step: RecordedStep) -> bool:
    """Whether a step had a core all the time, but for what waking up takes."""
    return bool(step.delayed_s <= most_delayed_s(step.step_s))


def clean_steps(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Return the clean steps of each mode that has enough of them, and all of the others."""
    by_mode = {mode: [step for step in steps if step.mode == mode] for mode in (None, *MODES)}
    clean = {mode: [step for step in each if is_clean(step)] for mode, each in by_mode.items()}
    return [
        step for mode, each in by_mode.items() for step in (clean[mode] if len(clean[mode]) >= _LEAST_CLEAN else each)
    ]


_Group = tuple[tuple[int, ...], float]
"""Consecutive gradients of one module in one bucket, and the seconds by which the last of them is final."""


def workload_of(recorded: Recorded) -> Workload:
    """The workload of a recorded training: one layer for each group of gradients, in the order DDP sends them.

    Times are of clean steps, where there are some. Layer times are medians over the steps with hooks, scaled to the
    medians of the steps without hooks. What is left of a step beside layers, update and input is ``overhead_s``, with
    what an update of shards takes whatever their size.
    """
    counts = Counter((step.local_batch, step.micro_batches) for step in recorded.steps)
    ((local_batch, accumulate), _), *_ = counts.most_common(1)
    steps = [step for step in recorded.steps if (step.local_batch, step.micro_batches) == (local_batch, accumulate)]
    steps = clean_steps(steps)
    whole = [step for step in steps if step.mode == "whole"] or steps
    forward_s = _median(whole, lambda step: step.forward_s) / accumulate
    backward_s = _median(whole, lambda step: step.last_backward_s)
    update_s, input_s = _median(whole, lambda step: step.update_s), _median(whole, lambda step: step.input_s)
    growing_s = update_s if recorded.shard_update_s is None else min(recorded.shard_update_s, update_s)
    groups = _groups(recorded, _ready(recorded, steps, backward_s))
    recomputed_s = _recomputed_s(steps, backward_s)
    layers = _layers(recorded, groups, _module_times(recorded, steps, forward_s), recomputed_s, local_batch)
    loss_s = _median(whole, lambda step: step.loss_s) / accumulate
    computed_s = accumulate * (loss_s + sum(layer.forward_s[0] + layer.backward_s[0] for layer in layers))
    load_s, workers = input_s / (local_batch * accumulate), 1
    if recorded.input_workers:
        load_s, workers = recorded.load_s_per_sample, recorded.input_workers
    waited_s = 0.0 if recorded.input_workers and not load_s else input_s
    memory = recorded.memory
    return Workload(
        name=recorded.name,
        source=recorded.source,
        local_batches=(local_batch,),
        layers=layers,
        update_s=growing_s * recorded.shards,
        overhead_s=max(_median(whole, lambda step: step.step_s) - computed_s - growing_s - waited_s, 0.0),
        loss_s=(loss_s,) if loss_s else (),
        state_bytes=recorded.state_bytes,
        optimizer_slots=recorded.optimizer_slots,
        relative_uncertainty=_relative_error([step.forward_s + step.backward_s for step in whole]),
        input_s_per_sample=load_s,
        input_workers=workers if load_s else 1,
        input_prefetch=bool(recorded.input_workers and load_s),
        ddp=msgspec.structs.replace(
            recorded.ddp, gradients=memory.gradients if memory else "", recomputes=recomputed_s > 0
        ),
        update_bytes=round(memory.update_bytes * recorded.shards) if memory else 0,
        device=recorded.device,
    )


def layers_s(recorded: Recorded) -> float:
    """The seconds of forward and backward of a micro-batch: the mean of those of a step, the median of the steps."""
    steps = clean_steps(recorded.steps)
    whole = [step for step in steps if step.mode == "whole"] or steps
    return _median(whole, lambda step: (step.forward_s + step.backward_s) / step.micro_batches)


def _median(steps: Sequence[RecordedStep], seconds: Callable[[RecordedStep], float]) -> float:
    return statistics.median(map(seconds, steps))


def _relative_error(seconds: Sequence[float]) -> float | None:
    """One standard error of the mean over the mean; None where there is no scatter to tell it from."""
    if len(seconds) < 2 or not sum(seconds):
        return None
    return statistics.stdev(seconds) / statistics.fmean(seconds) / math.sqrt(len(seconds))


def _ready(recorded: Recorded, steps: Sequence[RecordedStep], backward_s: float) -> list[float]:
    """Seconds from the start of backward until each gradient is final: medians, scaled to a backward without hooks.

    A parameter that never got a gradient counts as final at once, as DDP takes it.
    """
    hooked = [step for step in steps if step.mode == "gradients" and step.ready_s]
    if not hooked:
        return [backward_s] * len(recorded.parameters)
    scale = backward_s / _median(hooked, lambda step: step.last_backward_s)
    ready = []
    for index in range(len(recorded.parameters)):
        seen = [step.ready_s[index] for step in hooked if index in step.ready_s]
        ready.append(min(scale * statistics.median(seen), backward_s) if seen else 0.0)
    return ready


def _groups(recorded: Recorded, ready_s: Sequence[float]) -> list[_Group]:
    """The gradients in the order in which DDP sends them, by module. None is ready before the one that goes first."""
    latest = 0.0
    groups: list[_Group] = []
    for bucket in recorded.buckets:
        for _, members in itertools.groupby(bucket, key=lambda index: recorded.parameters[index].module):
            group = tuple(members)
            latest = max(latest, *(ready_s[index] for index in group))
            groups.append((group, latest))
    return groups


def _module_times(recorded: Recorded, steps: Sequence[RecordedStep], forward_s: float) -> dict[str, float]:
    """Forward seconds of every module: medians over the steps with hooks, scaled to ``forward_s`` in all.

    Where no module was called by itself, as in a compiled model, the first one has it all.
    """
    hooked = [step for step in steps if step.mode == "forward"]
    modules = dict.fromkeys(name for step in hooked for name in step.module_s)
    times = {name: statistics.median(step.module_s.get(name, 0.0) for step in hooked) for name in modules}
    total = sum(times.values())
    if not total:
        return {next(iter(recorded.first_parameter)): forward_s}
    return {name: seconds * forward_s / total for name, seconds in times.items()}


def _recomputed_s(steps: Sequence[RecordedStep], backward_s: float) -> float:
    """Seconds of a backward in which it computes forward again: the median share of it, as steps with hooks have it."""
    shares = [step.recomputed_s / step.last_backward_s for step in steps if step.mode == "gradients"]
    return backward_s * statistics.median(shares) if shares else 0.0


def _layers(
    recorded: Recorded,
    groups: Sequence[_Group],
    module_s: Mapping[str, float],
    recomputed_s: float,
    local_batch: int,
) -> tuple[Layer, ...]:
    """The layers in forward order: the reverse of the order in which DDP sends their gradients."""
    layer_of = {index: number for number, (members, _) in enumerate(groups) for index in members}

    def of_layers(of_modules: Mapping[str, float]) -> list[float]:
        values = [0.0] * len(groups)
        for module, value in of_modules.items():
            values[layer_of[recorded.first_parameter[module]]] += value
        return values

    forward, activation_bytes = of_layers(module_s), of_layers(_activation_bytes(recorded))
    copied_bytes = of_layers(recorded.memory.copied_bytes if recorded.memory else {})
    backward = [ready_s - before_s for before_s, ready_s in itertools.pairwise((0.0, *(each for _, each in groups)))]
    again = of_layers(forward_of_blocks_s(recorded.memory, module_s))
    if recomputed_s:
        again_bytes = recorded.memory.again_bytes if recorded.memory else {}
        again = divided_s(recomputed_s, backward, [each > 0 for each in of_layers(again_bytes)])
    others = of_layers(other_activation_bytes(recorded.memory))
    names = _names([recorded.parameters[members[0]].module for members, _ in groups])
    layers = []
    columns = zip(groups, names, forward, backward, activation_bytes, copied_bytes, again, others, strict=True)
    for (members, _), name, forward_s, backward_s, kept_bytes, copies, again_s, other_bytes in columns:
        parameters = [recorded.parameters[index] for index in members]
        layers.append(
            Layer(
                name=name,
                kind="module",
                forward_s=(forward_s,),
                backward_s=(backward_s,),
                tensors=tuple(each.tensor for each in reversed(parameters)),
                batch_norm_channels=parameters[0].batch_norm_channels if name == parameters[0].module else 0,
                activation_bytes_per_sample=kept_bytes / local_batch,
                work_bytes=copies,
                recompute_s=(again_s,) if any(again) else (),
                other_activation_bytes_per_sample=other_bytes / local_batch,
            )
        )
    return tuple(reversed(layers))


def _activation_bytes(recorded: Recorded) -> dict[str, float]:
    """The bytes at the peak of a micro-batch, of each module in proportion to what is saved of it until backward."""
    if recorded.memory is None:
        return {}
    saved = recorded.memory.saved_bytes if any(recorded.memory.saved_bytes.values()) else {}
    shares = saved or {next(iter(recorded.first_parameter)): 1}
    return {module: recorded.memory.activation_bytes * share / sum(shares.values()) for module, share in shares.items()}


def _names(modules: Sequence[str]) -> list[str]:
    """A unique name for each group: its module's, with a number from the second group of a module on."""
    seen: Counter[str] = Counter()
    names = []
    for module in modules:
        seen[module] += 1
        names.append((module or "model") + (f" ({seen[module]})" if seen[module] > 1 else ""))
    return names


def joined(workloads: Sequence[Workload]) -> Workload:
    """One workload of several that have one local batch each, all different. Raises ``ConfigError``.

    Times of layers are tables; the overhead is a line over the local batch; what does not depend on the local batch is
    a median. Of settings that do, such as sizes that the script sums itself, those at the largest batch are kept.
    """
    ordered = sorted(workloads, key=lambda workload: workload.local_batches)
    first = ordered[0]
    batches = [workload.local_batches[0] for workload in ordered]
    for workload, batch in zip(ordered, batches, strict=True):
        check_same(first, workload, batch)
    overhead_s, per_sample_s = overhead_line(batches, [workload.overhead_s for workload in ordered])
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=tuple(workload.layers[number].forward_s[0] for workload in ordered),
            backward_s=tuple(workload.layers[number].backward_s[0] for workload in ordered),
            recompute_s=tuple(seconds for workload in ordered for seconds in workload.layers[number].recompute_s)
            if all(workload.layers[number].recompute_s for workload in ordered)
            else (),
            **{
                name: max(getattr(workload.layers[number], name) for workload in ordered)
                for name in ("activation_bytes_per_sample", "other_activation_bytes_per_sample")
            },
        )
        for number, layer in enumerate(first.layers)
    )
    errors = [workload.relative_uncertainty for workload in ordered if workload.relative_uncertainty is not None]
    load_s = statistics.median(workload.input_s_per_sample for workload in ordered)
    return msgspec.structs.replace(
        first,
        local_batches=tuple(batches),
        layers=layers,
        update_s=statistics.median(workload.update_s for workload in ordered),
        update_bytes=max(workload.update_bytes for workload in ordered),
        overhead_s=overhead_s,
        overhead_per_sample_s=per_sample_s,
        loss_s=tuple(workload.loss_s[0] for workload in ordered) if all(each.loss_s for each in ordered) else (),
        relative_uncertainty=max(errors, default=None),
        input_s_per_sample=load_s,
        input_workers=first.input_workers if load_s else 1,
        input_prefetch=first.input_prefetch and load_s > 0,
        ddp=ordered[-1].ddp,
        source=f"{first.source}, with data loaders of batches of {', '.join(map(str, batches))}"
        if len(batches) > 1
        else first.source,
    )


def check_same(first: Workload, other: Workload, batch: int) -> None:
    """Raises ``ConfigError`` unless both send the same gradients in the same order.

    What a script sums itself may have another size with another batch, and not every profile was weighed.
    """
    sent = [[(layer.name, layer.tensors) for layer in workload.layers] for workload in (first, other)]
    settings = [
        workload.ddp and msgspec.structs.replace(workload.ddp, own_allreduce_bytes=(), gradients="")
        for workload in (first, other)
    ]
    same_settings = settings[0] == settings[1] and first.input_workers == other.input_workers
    if sent[0] != sent[1] or not same_settings:
        raise ConfigError(
            f"with local batch {batch} the script sends its gradients in other buckets than with"
            f" {first.local_batches[0]}, or trains with other settings",
            allowed="a script in which the local batch decides nothing but the batch",
            remedy="profile each local batch by itself: --local-batch with one number",
        )
