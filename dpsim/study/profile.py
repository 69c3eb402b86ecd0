"""``profile``: forward and backward time of every layer against the local batch, on this machine; a Workload."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.data import load_dataset
from dpsim.dtypes import in_dtype
from dpsim.errors import ConfigError
from dpsim.machine import LEAST_SLOWDOWN, NODE, ComputeSlowdown
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.describe import describe, with_work_bytes
from dpsim.study import models
from dpsim.study.cases import run
from dpsim.study.rows import ProfiledBatch, Rows, Series
from dpsim.study.scatter import later_error, median_error
from dpsim.study.statistics import median_interval
from dpsim.torch.script.recorded import joined
from dpsim.workload import Workload, overhead_line

Floats = NDArray[np.float64]
STEP_S, FORWARD_S, BACKWARD_S, READY_S = "step_s", "forward_s", "backward_s", "gradient_ready_s"
UPDATE_S, OVERHEAD_S, AT_S = "update_s", "overhead_s", "at_s"
LOSS_S, LAYERS_S = "loss_s", "layers_s"
"""Quantities of a profiled batch: its steps, the medians over a visit of their parts, and when the visit ended.

``layers_s`` is what all layers take for a micro-batch, forward and backward."""
INPUT_S = "input_s_per_sample"
"""A quantity of a script alone: what its data loader takes for a sample."""
PARTS = (FORWARD_S, BACKWARD_S, READY_S, UPDATE_S, OVERHEAD_S, LOSS_S, LAYERS_S, INPUT_S)
"""Quantities of which a prediction takes the median over all visits, and nothing else."""
TICK_S = 1e-9
"""The resolution of the clock: a difference of times that is less was not measured."""
_SPREAD_QUANTILES = 20


class ProfileConfig(Noun, frozen=True):
    """What to profile: a model on a data set at some local batches.

    ``concurrent`` holds pairs (devices, local batch) at which to measure how much slower the same computation is when
    so many devices of this machine compute at once, on each of the ``networks``; ``accumulated`` pairs (micro-batches,
    local batch) of steps of several micro-batches, on one device. ``plan`` says how one device computes;
    its ``leaves`` count those of the largest local batch, and a smaller one has its share of them. ``seconds`` bounds
    the measuring. Several processes of a PyTorch script wait in each step for ``pause_s`` (by their number), as for an
    allreduce. Where the times of a script's layers are given (``times_given``), only the steps of one and several
    processes are compared.
    """

    model: str = "cnn"
    dataset: str = "digits"
    local_batches: tuple[int, ...] = (8, 16, 32, 64)
    concurrent: tuple[tuple[int, int], ...] = ()
    accumulated: tuple[tuple[int, int], ...] = ()
    networks: tuple[str, ...] = (NODE,)
    seed: int = 0
    seconds: float = 4.0
    plan: Plan = Plan(devices=1, global_batch=1, fusion_rule="one")
    pause_s: tuple[tuple[int, float], ...] = ()
    times_given: bool = False

    def __post_init__(self) -> None:
        if not self.local_batches or min(self.local_batches) < 1:
            raise ConfigError(f"local batches {list(self.local_batches)}", allowed="one or more sizes of 1 or more")

    def leaves_of(self, local_batch: int) -> int:
        """Return the leaves of a local batch: its share of all leaves, and one at least where there are any."""
        leaves = self.plan.leaves
        return min(leaves, max(1, round(leaves * local_batch / max(self.local_batches))))

    @property
    def cases(self) -> tuple[tuple[int, int], ...]:
        """(devices, local batch) of everything that is profiled, one device first."""
        several = [(devices, batch) for devices, batch in self.concurrent if devices > 1]
        return *((1, batch) for batch in sorted(set(self.local_batches))), *several

    def subjects(self, profile: int = 0) -> tuple[ProfiledBatch, ...]:
        """Return what is profiled of it as the profile number ``profile`` of a study, one device first."""
        return (
            *(
                ProfiledBatch(devices=devices, local_batch=batch, profile=profile, network=network)
                for devices, batch in self.cases
                for network in (self.networks if devices > 1 else (NODE,))
            ),
            *(
                ProfiledBatch(devices=1, local_batch=batch, profile=profile, accumulate=accumulate)
                for accumulate, batch in self.accumulated
            ),
        )


def bare_workload(config: ProfileConfig) -> Workload:
    """Return the workload of a profile without its times: layers, tensors, sizes, and what layers work in."""
    dataset = load_dataset(config.dataset, config.seed)
    replica = models.load(config.model, dataset.input_shape, dataset.classes).replica()
    return with_work_bytes(describe(replica, f"{config.model} on {config.dataset}"), replica)


def profiled_workload(config: ProfileConfig, bare: Workload, rows: Rows, profile: int = 0) -> Workload:
    """Return the workload that the rows of a profile describe; ``bare`` is the same without times.

    A time is the median over visits of the medians of a visit, scaled so that the parts of a step add up to the median
    step: a sum of medians is less.
    """
    batches = sorted(set(config.local_batches))
    cases = [ProfiledBatch(devices=1, local_batch=batch, profile=profile) for batch in batches]
    parts = np.array([_parts(case, len(bare.layers), rows) for case in cases])
    count, update_s = len(bare.layers), float(np.median(parts[:, -3]))
    overhead_s, per_sample_s = overhead_line(batches, (parts[:, -1] + parts[:, -3] - update_s).tolist())
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=tuple(parts[:, i].tolist()),
            backward_s=tuple(parts[:, count + i].tolist()),
            gradient_ready_s=tuple(parts[:, 2 * count + i].tolist()),
        )
        for i, layer in enumerate(bare.layers)
    )
    errors = [median_error(np.maximum(rows.visit_medians(case, STEP_S), TICK_S)) for case in cases]
    steps = min(len(rows.values(case, STEP_S)) for case in cases)
    return msgspec.structs.replace(
        bare,
        local_batches=tuple(batches),
        layers=layers,
        optimizer_slots=len(config.plan.optimizer.slots),
        update_s=update_s,
        overhead_s=overhead_s,
        overhead_per_sample_s=per_sample_s,
        loss_s=tuple(parts[:, -2].tolist()) if _has_loss(cases[0], rows) else (),
        accumulation_factor=_accumulation_factor(config, rows, profile),
        relative_uncertainty=float(np.sqrt(np.mean(np.square(errors)))),
        step_spread=_spread([rows.values(case, STEP_S) for case in cases]),
        source=f"dpsim profile: medians of {steps} steps or more a local batch{in_dtype(config.plan.compute_dtype)}",
    )


def _parts(case: ProfiledBatch, layers: int, rows: Rows) -> Floats:
    """Return forward, backward and ready times of each layer, then update, loss and overhead: 3 layers + 3 values."""
    keys = [(quantity, layer) for quantity in (FORWARD_S, BACKWARD_S, READY_S) for layer in range(layers)]
    keys += [(UPDATE_S, 0), (LOSS_S, 0), (OVERHEAD_S, 0)]
    values = {key: rows.values(case, *key) for key in keys}
    if not _has_loss(case, rows):
        values[LOSS_S, 0] = np.zeros(1)
    medians = np.array([np.median(np.maximum(each, 0.0)) for each in values.values()])
    total_s = max(medians[: 2 * layers].sum() + medians[-3:].sum(), TICK_S)
    scaled: Floats = medians * (np.median(rows.values(case, STEP_S)) / total_s)
    return scaled


def _has_loss(case: ProfiledBatch, rows: Rows) -> bool:
    """Return whether the loss was profiled; in inputs of model 0 it is within the overhead."""
    return len(rows.values(case, LOSS_S)) > 0


def _accumulation_factor(config: ProfileConfig, rows: Rows, profile: int) -> float:
    """Return how many times as long layers take for a micro-batch of several as for one: the mean over the cases."""
    factors = []
    for accumulate, batch in config.accumulated:
        alone, of_several = (
            ProfiledBatch(devices=1, local_batch=batch, profile=profile, accumulate=count) for count in (1, accumulate)
        )
        each_s, alone_s = (float(np.median(rows.values(case, LAYERS_S))) for case in (of_several, alone))
        factors.append(max(each_s, TICK_S) / max(alone_s, TICK_S))
    return float(np.mean(factors)) if factors else 1.0


def _spread(steps_s: Sequence[Floats]) -> tuple[float, ...]:
    """Return quantiles of a step's time on one device over the median of its local batch, of all batches."""
    ratios = np.concatenate([steps / np.median(steps) for steps in steps_s])
    levels = (np.arange(_SPREAD_QUANTILES) + 0.5) / _SPREAD_QUANTILES
    return tuple(np.quantile(ratios, levels).tolist())


def profiled_slowdowns(
    config: ProfileConfig, rows: Rows, profile: int = 0, network: str = NODE
) -> tuple[ComputeSlowdown, ...]:
    """Return how much longer each of several devices computes than one alone: the ratio of their median steps.

    So one device's median step times the factor is the median step of several, as measured steps are summed up. The
    uncertainty is that of the ratios of visits made back to back.
    """
    measured: dict[int, list[tuple[float, ComputeSlowdown]]] = {}
    for devices, batch in config.cases:
        if devices > 1:
            alone = ProfiledBatch(devices=1, local_batch=batch, profile=profile)
            together = ProfiledBatch(devices=devices, local_batch=batch, profile=profile, network=network)
            of_visits = slowdown(devices, rows.visit_medians(alone, STEP_S), rows.visit_medians(together, STEP_S))
            alone_s, together_s = (float(np.median(rows.values(case, STEP_S))) for case in (alone, together))
            factor = max(together_s / alone_s, LEAST_SLOWDOWN)
            measured.setdefault(devices, []).append((alone_s, msgspec.structs.replace(of_visits, factor=factor)))
    return tuple(joined_slowdown(of_devices) for of_devices in measured.values())


def profiled_uncertainty(config: ProfileConfig, rows: Rows, profile: int = 0) -> float:
    """Return the relative standard error of the mean step of a later run, by the scatter of all visits together.

    What slows a machine down does so to any number of devices, and each number alone has too few visits.
    """
    subjects = config.subjects(profile)
    return later_error(
        [(rows.values(each, AT_S), rows.visit_medians(each, STEP_S, middle=np.mean)) for each in subjects]
    )


def sampling_uncertainty(config: ProfileConfig, rows: Rows, profile: int = 0) -> float:
    """Return the relative standard error of a median step of the same minutes, by the scatter of the visits.

    A setting is visited about half as often as what is profiled in turns with it.
    """
    errors = [median_error(rows.visit_medians(each, STEP_S)) for each in config.subjects(profile)]
    return float(np.sqrt(2 * np.mean(np.square(errors))))


def slowdown(devices: int, alone_s: Floats, together_s: Floats) -> ComputeSlowdown:
    """Return how many times as long steps take on several devices at once: the median ratio of paired visits.

    A factor below the least that a machine may have was measured while something else slowed the one device down.
    """
    pairs = min(len(alone_s), len(together_s))
    ratio = median_interval((together_s[:pairs] / alone_s[:pairs]).tolist())
    factor = max(ratio.median, LEAST_SLOWDOWN)
    return ComputeSlowdown(devices=devices, factor=factor, half_width=ratio.relative_half_width)


def joined_slowdown(measured: Sequence[tuple[float, ComputeSlowdown]]) -> ComputeSlowdown:
    """Return the slowdown f t + a of a step that takes t alone, from those measured at steps of several lengths t.

    The line through the shortest and the longest step. A slowdown that does not fall with the length is a factor alone:
    that of the longest step, whose uncertainty is stated.
    """
    (short_s, of_short), (long_s, of_long) = (choose(measured, key=lambda each: each[0]) for choose in (min, max))
    if of_short.factor <= of_long.factor or long_s <= short_s:
        return of_long
    factor = (of_long.factor * long_s - of_short.factor * short_s) / (long_s - short_s)
    factor = min(max(factor, min(1.0, of_long.factor)), of_long.factor)  # rounding may lift it above
    return msgspec.structs.replace(of_long, factor=factor, added_s=(of_long.factor - factor) * long_s)


def narrow(slowdowns: Sequence[ComputeSlowdown], most: float = 0.03) -> bool:
    """Return whether the half-widths of all 95 % intervals are at most ``most``."""
    return all(math.isfinite(each.half_width) and each.half_width <= most for each in slowdowns)


def profile(config: ProfileConfig, progress: Progress) -> Workload:
    """Profile a model on this machine and return the workload, with a step of two micro-batches if samples suffice.

    Raises ``ConfigError``.
    """
    samples = len(load_dataset(config.dataset, config.seed).train_y)
    enough = [batch for batch in config.local_batches if 2 * batch <= samples]
    if enough and not config.accumulated:
        config = msgspec.structs.replace(config, accumulated=((2, max(enough)),))
    most = max([devices for devices, _ in config.concurrent], default=1)
    plain = run("dpsim.study.runners.profile:profile_on_ranks", config, most, progress)
    rows = Rows(codec.decode(series, Series, "profile") for series in plain)
    return profiled_workload(config, bare_workload(config), rows)


def computed_s(workload: Workload) -> float:
    """Seconds of a step on one device: everything but communication and waiting for input."""
    times = workload.times(workload.local_batches[0])
    accumulate = 1 if workload.ddp is None else workload.ddp.accumulate
    passes_s = float(times.forward_s.sum() + times.backward_s.sum())
    return accumulate * (passes_s + times.loss_s) + workload.update_s + times.overhead_s


def script_workload(config: ProfileConfig, bare: Workload, rows: Rows, profile: int) -> Workload:
    """Return the workload that the rows of a script's profile describe; ``bare`` has the same layers.

    A time is the median over visits, scaled so that the parts of a step add up to the median step.
    """
    if not config.times_given:
        bare = joined([_at(batch, bare, rows, profile) for batch in sorted(config.local_batches)])
    factor = _accumulation_factor(config, rows, profile) if config.accumulated else bare.accumulation_factor
    return msgspec.structs.replace(bare, accumulation_factor=factor)


def _at(local_batch: int, bare: Workload, rows: Rows, profile: int) -> Workload:
    case = ProfiledBatch(devices=1, local_batch=local_batch, profile=profile)

    def median(quantity: str, part: int = 0) -> float:
        return float(np.median(rows.values(case, quantity, part)))

    known = [number for number, batch in enumerate(bare.local_batches) if batch == local_batch]
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=(median(FORWARD_S, number),),
            backward_s=(median(BACKWARD_S, number),),
            recompute_s=tuple(layer.recompute_s[each] for each in known if layer.recompute_s),
        )
        for number, layer in enumerate(bare.layers)
    )
    visits, load_s = len(rows.values(case, STEP_S)), median(INPUT_S)
    parts = msgspec.structs.replace(
        bare,
        local_batches=(local_batch,),
        layers=layers,
        update_s=median(UPDATE_S),
        overhead_s=median(OVERHEAD_S),
        overhead_per_sample_s=0.0,
        loss_s=(median(LOSS_S),) if bare.loss_s else (),
        input_s_per_sample=load_s,
        input_workers=bare.input_workers if load_s else 1,
        input_prefetch=bare.input_prefetch and load_s > 0,
        relative_uncertainty=median_error(np.maximum(rows.values(case, STEP_S), TICK_S)),
        source=f"{bare.source}; times are medians of {visits} visits in turns",
    )
    scale = median(STEP_S) / max(computed_s(parts), TICK_S)
    return parts.slowed(scale)
