"""Made-up sweeps for tests of the comparison and the report. Test data: nothing here was measured."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from dpsim import codec
from dpsim.machine import Link, Machine
from dpsim.plan import Plan
from dpsim.records.sweep import (
    Environment,
    Experiment,
    MeasuredPoint,
    PredictedPoint,
    Predictions,
    Results,
)
from dpsim.setting import Setting
from dpsim.timeline import TimelineRecord
from dpsim.workload import Layer, Tensor, Workload

KIB = 1024.0
THRESHOLDS = (0.0, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, math.inf)
BUCKETS = (10, 8, 6, 5, 3, 2, 1)
PACED = "paced:50us,1gbit"
LAYERS = ("conv1", "conv2", "conv3", "dense1", "dense2")
ENVIRONMENT = Environment(
    dpsim="0.1.0",
    python="3.11.4",
    platform="Linux (test data)",
    processor="Imaginary CPU 3000",
    cores=2,
    memory_bytes=8 * 2**30,
    mpi="MPICH 5.0.2",
    numpy="2.4.6",
    numba="0.68.1",
    blas="OpenBLAS Imaginary",
    variables={"OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "(unset)"},
)


def workload() -> Workload:
    layers = tuple(
        Layer(name=n, forward_s=(4e-4,), backward_s=(8e-4,), tensors=(Tensor(name=f"{n}.w", shape=(64, 64)),))
        for n in LAYERS
    )
    return Workload(name="cnn", local_batches=(32,), layers=layers, update_s=3e-4, overhead_s=2e-4, source="test data")


def timeline(source: str, compute: float, exposed: float, buckets: int, emulated: bool, devices: int) -> TimelineRecord:
    """Three steps of forward, backward, update, overhead and allreduces whose last one ends ``exposed`` late."""
    names = [f"forward {n}" for n in LAYERS] + [f"backward {n}" for n in LAYERS]
    names += ["update", "step overhead"] + [f"allreduce {k}" for k in range(buckets)]
    rows: list[tuple[int, int, int, int, float, float, int]] = []
    clock = 0.0
    for step in range(3):
        begin = clock
        for rank in range(devices):
            clock = begin
            unit = compute / 17
            for i in range(5):
                rows.append((step, rank, 0, i, clock, clock + unit, 0))
                clock += unit
            middle = clock
            for i in range(5):
                rows.append((step, rank, 0, 9 - i, clock, clock + 2 * unit, 0))
                clock += 2 * unit
            backward = clock - middle
            length = (0.7 * backward + exposed) / buckets
            for k in range(buckets if devices > 1 else 0):
                start = middle + 0.3 * backward + k * length
                rows.append((step, rank, 1, 12 + k, start, start + length * 0.97, 16384 // buckets))
            clock += exposed
            rows.append((step, rank, 0, 10, clock, clock + unit, 0))
            rows.append((step, rank, 0, 11, clock + unit, clock + 2 * unit, 0))
            clock += 2 * unit
    c = list(zip(*rows, strict=True))
    return TimelineRecord(
        source="measured" if source == "measured" else "predicted",
        operations=tuple(names),
        step=c[0],
        rank=c[1],
        lane=c[2],
        operation=c[3],
        start_s=c[4],
        end_s=c[5],
        size_bytes=c[6],
        emulated_network=emulated,
    )


def _truth(network: str, devices: int, index: int, overlap: str) -> tuple[float, float]:
    """Computation and exposed communication of a point, in seconds."""
    compute = 10e-3 / devices + 1e-3
    if devices == 1:
        return compute, 0.0
    latency, bandwidth = (50e-6, 4e7) if network != "node" else (40e-6, 1.2e9)
    total = BUCKETS[index] * latency * 3 + 90e3 / bandwidth
    hidden = 0.0 if overlap == "off" else total * (1 - 1 / BUCKETS[index] * 0.95) * 0.75
    return compute, total - hidden


def sweep(
    *,
    networks: tuple[str, ...] = ("node", PACED),
    devices: tuple[int, ...] = (1, 2),
    rounds: int = 12,
    per_round: int = 4,
    bias: float = 0.03,
    noise: float = 0.02,
    seed: int = 1,
    timelines: bool = True,
    overlaps: tuple[str, ...] = ("thread", "off"),
) -> tuple[Predictions, Results]:
    """Predictions (off by ``bias``) and results (spread by ``noise``) of a sweep that never took place."""
    rng = np.random.default_rng(seed)
    experiment = Experiment(
        name="fusion-threshold",
        question="fusion-threshold",
        base={"model": "cnn", "global_batch": 64, "algorithm": "ring", "overlap": "auto"},
        axes={"network": networks, "devices": devices, "fusion_threshold_bytes": THRESHOLDS},
    )
    predicted, measured = [], []
    for network in networks:
        for count in devices:
            for index, threshold in enumerate(THRESHOLDS if count > 1 else (0.0,)):
                for overlap in overlaps if count > 1 else ("off",):
                    twins = 2 if index in (0, 4) and overlap == overlaps[0] else 1
                    for repeat in range(twins):
                        plan = Plan(
                            devices=count,
                            fusion_threshold_bytes=threshold,
                            algorithm="ring",
                            overlap=overlap,
                            global_batch=64,
                        )
                        setting = Setting(plan=plan, model="cnn", network=network, repeat=repeat)
                        truth = _truth(network, count, index, overlap)
                        buckets = BUCKETS[index] if count > 1 else 0
                        show = timelines and (overlap == overlaps[0] or count == 1)
                        point = _predicted(setting, truth, buckets, bias, show)
                        predicted.append(msgspec.structs.replace(point, machine=networks.index(network)))
                        measured.append(_measured(setting, truth, buckets, rng, rounds, per_round, noise, show))
    predictions = Predictions(
        experiment=experiment,
        environment=ENVIRONMENT,
        predicted_at="2025-01-01T10:00:00+00:00",
        workloads=(workload(),),
        machines=tuple(
            Machine(
                name=n,
                network=n,
                emulated_network=n != "node",
                link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9),
                calibrated_on="Imaginary CPU 3000, 2 cores (test data)",
            )
            for n in networks
        ),
        points=tuple(predicted),
        mechanisms={n: {"off": 9e-3, "thread": 8e-3} for n in networks},
    )
    results = Results(
        experiment=experiment,
        environment=ENVIRONMENT,
        predictions_sha256=codec.digest(predictions),
        predicted_at=predictions.predicted_at,
        measured_from="2025-01-01T10:00:05+00:00",
        measured_until="2025-01-01T10:01:02+00:00",
        points=tuple(measured),
    )
    return predictions, results


def _timeline(source: str, setting: Setting, parts: tuple[float, float], buckets: int) -> TimelineRecord:
    return timeline(source, *parts, max(1, buckets), setting.network != "node", setting.plan.devices)


def _predicted(setting: Setting, truth: tuple[float, float], buckets: int, bias: float, show: bool) -> PredictedPoint:
    compute, exposed = truth[0] * (1 + bias), truth[1] * (1 - bias)
    step = compute + exposed
    latency = 5e-4 if setting.network != "node" else 5e-5
    nulls = {
        "perfect_scaling": compute,
        "alpha_beta_no_overlap": compute + buckets * latency + 3e-3 * (setting.network != "node"),
        "largest_bucket": compute + 4e-3 if setting.network != "node" else compute + 2e-4,
        "free_communication": compute,
    }
    return PredictedPoint(
        setting=setting,
        buckets=buckets,
        step_s=step,
        low_s=step * 0.96,
        high_s=step * 1.05,
        exposed_communication_s=exposed,
        extrapolated=False,
        null_step_s=nulls,
        null_exposed_s={n: v - compute for n, v in nulls.items()},
        timeline=_timeline("predicted", setting, (compute, exposed), buckets) if show else None,
    )


def _measured(
    setting: Setting,
    truth: tuple[float, float],
    buckets: int,
    rng: np.random.Generator,
    rounds: int,
    per_round: int,
    noise: float,
    show: bool,
) -> MeasuredPoint:
    count = rounds * per_round
    factor = 1 + noise * rng.gamma(1.5, 1.0, count)
    return MeasuredPoint(
        setting=setting,
        buckets=buckets,
        step_s=tuple(float(v) for v in (truth[0] + truth[1]) * factor),
        exposed_communication_s=tuple(float(v) for v in truth[1] * factor),
        round=tuple(i // per_round for i in range(count)),
        losses=(0.5,) * count,
        timeline=_timeline("measured", setting, truth, buckets) if show else None,
    )
