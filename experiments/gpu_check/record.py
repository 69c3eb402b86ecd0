"""What a run of gpu_check leaves: one JSON file with raw samples, points, and each target with what was measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.records.sweep import Environment
from dpsim.units import format_size

SCHEMA = "dpsim.gpu-check/1"
COMMAND = "gpu_check"
LARGE_BYTES, SMALL_BYTES = 64 << 20, 64 << 10

Mode = Literal["one-launch", "flags", "split", "nccl"]


class Samples(Noun, frozen=True):
    """What was timed at one size: every sample in seconds, and beside it, from the same moments, what bounds it.

    ``copy_s``: a device-to-device copy of all ranks' bytes, which reads and writes as much as the fastest allreduce in
    one memory; ``empty_s``: an empty cooperative launch. Both only with all devices on one GPU in one process.
    ``clock``: GPU ``events``, or the ``host`` from a barrier to the end of the stream on the slowest rank.
    ``wrong``: elements of all ranks' results, before and after the timing, that differ from the reference in any bit.
    """

    algorithm: str
    mode: Mode
    devices: int
    processes: int
    size_bytes: int
    dtype: str
    wrong: int
    clock: Literal["events", "host"]
    samples_s: tuple[float, ...]
    copy_s: tuple[float, ...] = ()
    empty_s: tuple[float, ...] = ()


class Training(Noun, frozen=True):
    """Something of training on one GPU: samples of dpsim's ``own``, and of what it is compared with, in ``unit``.

    ``name`` is one of ``TARGETS``, ``setting`` what was trained.
    """

    name: str
    setting: str
    unit: Literal["s", "bytes"]
    own: tuple[float, ...]
    other: tuple[float, ...]


MLP_SPEED, PICTURE_SPEED = "speed of an MLP over PyTorch's", "speed of a ResNet over PyTorch's"
REPRODUCIBLE, TIMELINES = "step with 8 leaves over a plain one", "step with its Timeline over one without"
STATE_BYTES = "memory of parameters, gradients and optimizer over the sum of their bytes"
ACTIVATION_BYTES = "memory of activations over PyTorch's"
BFLOAT16_SPEED = "speed of an MLP in bfloat16 over PyTorch's autocast"
BESIDE_PYTORCH = (MLP_SPEED, PICTURE_SPEED, ACTIVATION_BYTES, BFLOAT16_SPEED)


Row = dict[str, Any]
"""A point or a claim: see ``point`` and ``Target.claim``."""


class Target(NamedTuple):
    """A ratio that is wanted. Of speeds it is the other's time over dpsim's own, else dpsim's own over the other's."""

    better: Literal["at least", "at most"]
    ratio: float

    def of_training(self, training: Training) -> Row:
        """Return the claim on the ratio of medians."""
        own, other = statistics.median(training.own), statistics.median(training.other)
        measured = other / own if self.better == "at least" else own / other
        return self.claim(training.name, 1, 0, training.setting, measured)

    def claim(self, name: str, devices: int, size_bytes: int, algorithm: str, measured: float) -> Row:
        """Return the target beside what was measured. Of a training the algorithm is its setting, and the size 0."""
        met = measured >= self.ratio if self.better == "at least" else measured <= self.ratio
        place = {"name": name, "devices": devices, "size_bytes": size_bytes, "algorithm": algorithm}
        return place | {"better": self.better, "target": self.ratio, "measured": measured, "met": met}


LARGE, SMALL = Target("at least", 0.85), Target("at most", 1.5)
TARGETS = {
    STATE_BYTES: Target("at most", 1.05),
    TIMELINES: Target("at most", 1.02),
    MLP_SPEED: Target("at least", 0.9),
    PICTURE_SPEED: Target("at least", 0.6),
    ACTIVATION_BYTES: Target("at most", 1.2),
    BFLOAT16_SPEED: Target("at least", 0.9),
    REPRODUCIBLE: Target("at most", 1.25),
}
"""In the order in which they are measured: what takes the least time comes first."""


class Gpus(Noun, frozen=True):
    """What was measured on, and with what; versions of CUDA's runtime and of NCCL are with the probes.

    ``simulated``: numba's CUDA simulator, whose times mean nothing.
    """

    names: tuple[str, ...]
    driver: str
    cuda: str
    numba_cuda: str
    cupy: str
    simulated: bool


class Probe(Noun, frozen=True):
    """A library that measuring needs: whether it works, its version or the reason, and what to do if it does not."""

    name: str
    works: bool
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The probe as it is printed, its remedy included."""
        remedy = f"; to do: {self.remedy}" if self.remedy else ""
        return f"{self.name:<11} {'ok' if self.works else 'FAILS':<6} {self.text}{remedy}"


class Tests(Noun, frozen=True):
    """The tests marked ``gpu``: whether they passed, the last line that pytest printed, and which tests failed."""

    passed: bool
    line: str
    failed: tuple[str, ...] = ()


class Summary(Noun, frozen=True, kw_only=True):
    """``claims_met`` of ``claims``; ``wrong`` elements of all points; what was left out, and what failed, and why.

    ``running``: the part that ran when the record was written; empty once all are done.
    """

    claims: int = 0
    claims_met: int = 0
    wrong: int = 0
    seconds: float
    left_out: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    running: str = ""


class GpuCheck(Noun, frozen=True, kw_only=True):
    """One run. Its points, claims and the counts of its summary follow from its samples (``derived``)."""

    taken_at: str
    environment: Environment
    gpus: Gpus
    tests: Tests
    samples: tuple[Samples, ...]
    points: tuple[Row, ...] = ()
    claims: tuple[Row, ...] = ()
    summary: Summary
    probes: tuple[Probe, ...] = ()
    trainings: tuple[Training, ...] = ()
    command: str = COMMAND
    schema: str = SCHEMA


def kept(times_s: Iterable[float]) -> tuple[float, ...]:
    """Round to a tenth of a nanosecond: no clock here tells more, and the file stays small."""
    return tuple(round(time_s, 10) for time_s in times_s)


def point(of: Samples) -> Row:
    """Return the medians of one size under the field names of ``dpsim bench allreduce``, and where it ran.

    busbw is as nccl-tests has it, algbw 2(n-1)/n. ``fraction_of_bound``: 2nS bytes over the bandwidth of the copies
    beside it, over the time; None where ranks have memories of their own.
    """
    time_s = statistics.median(of.samples_s)
    algbw = of.size_bytes / time_s
    return {
        "size_bytes": of.size_bytes,
        "devices": of.devices,
        "algorithm": of.algorithm,
        "in_place": True,
        "cached": False,
        "time_s": time_s,
        "p50_s": time_s,
        "p99_s": float(np.percentile(of.samples_s, 99)),
        "algbw_bytes_per_s": algbw,
        "busbw_bytes_per_s": algbw * 2 * (of.devices - 1) / of.devices,
        "fraction_of_bound": statistics.median(of.copy_s) / time_s if of.copy_s else None,
        "wrong": of.wrong,
        "mode": of.mode,
        "processes": of.processes,
        "empty_launch_s": statistics.median(of.empty_s) if of.empty_s else None,
    }


def claims(points: Iterable[Row]) -> Iterator[Row]:
    """Yield the targets for logical devices of one GPU, each with its fastest algorithm that is right to the bit."""
    fastest: dict[tuple[int, int], Row] = {}
    for candidate in points:
        key = (candidate["devices"], candidate["size_bytes"])
        if candidate["fraction_of_bound"] is not None and not candidate["wrong"]:
            fastest[key] = min(fastest.get(key, candidate), candidate, key=itemgetter("time_s"))
    for (devices, size_bytes), best in sorted(fastest.items()):
        where = (devices, size_bytes, best["algorithm"])
        if size_bytes >= LARGE_BYTES:
            yield LARGE.claim("fraction of the bound", *where, best["fraction_of_bound"])
        elif size_bytes <= SMALL_BYTES and best["empty_launch_s"] is not None:
            over = best["time_s"] / best["empty_launch_s"]
            yield SMALL.claim("time over an empty cooperative launch", *where, over)


def derived(record: GpuCheck) -> GpuCheck:
    """Return the record with what follows from its samples: points, claims, and their counts in the summary."""
    points = tuple(map(point, record.samples))
    trained = (TARGETS[training.name].of_training(training) for training in record.trainings)
    targets = () if record.gpus.simulated else (*claims(points), *trained)
    summary = msgspec.structs.replace(
        record.summary,
        claims=len(targets),
        claims_met=sum(claim["met"] for claim in targets),
        wrong=sum(each["wrong"] for each in points),
    )
    return msgspec.structs.replace(record, points=points, claims=targets, summary=summary)


def file_name(record: GpuCheck) -> str:
    """Return ``2026-11-21-4x-nvidia-h100-80gb-hbm3.json``: day and GPUs; ``simulator-`` first where there is none."""
    names = record.gpus.names
    slug = re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-") if names else "gpu"
    count = f"{len(names)}x-" if len(names) > 1 else ""
    return f"{'simulator-' if record.gpus.simulated else ''}{record.taken_at[:10]}-{count}{slug}.json"


def read(path: Path) -> GpuCheck:
    """Read a record. Raises ``FileFormatError``."""
    return codec.read(path, GpuCheck, "gpu-check", SCHEMA)


def check_contribution(record: GpuCheck) -> None:
    """Refuse what does not belong among contributed reports. Raises ``ConfigError``."""
    refused = {
        "it was taken in numba's CUDA simulator": record.gpus.simulated,
        "it has no measurement": not record.points,
        f"it ended during: {record.summary.running}": record.summary.running,
        "its points or claims do not follow from its samples": derived(record) != record,
    }
    for reason, holds in refused.items():
        if holds:
            raise ConfigError(
                f"this gpu-check record is no contribution: {reason}",
                allowed="the file that make gpu-check wrote on a machine with a GPU, unchanged",
            )


def table(record: GpuCheck) -> str:
    """Return a line a size, devices and mode, of the fastest algorithm; then the targets and what went wrong."""
    lines = ["numba's CUDA simulator: the times mean nothing"] if record.gpus.simulated else []
    lines.append(
        f"{'size':>9} {'devices':>7} {'mode':<10} {'algorithm':<16} {'time':>11} {'busbw':>11} {'of bound':>8}"
        f" {'wrong':>6}"
    )
    groups: dict[tuple[int, int, int, str], list[Row]] = {}
    for row in record.points:
        key = (row["processes"], row["devices"], row["size_bytes"], row["mode"])
        groups.setdefault(key, []).append(row)
    for (_, devices, size_bytes, mode), group in sorted(groups.items(), key=lambda each: each[0][:3]):
        best = min(group, key=itemgetter("time_s"))
        share = "" if best["fraction_of_bound"] is None else f"{best['fraction_of_bound']:.0%}"
        lines.append(
            f"{format_size(size_bytes):>9} {devices:>7} {mode:<10} {best['algorithm']:<16} "
            f"{best['time_s'] * 1e6:>8.2f} us {best['busbw_bytes_per_s'] / 1e9:>6.1f} GB/s {share:>8} "
            f"{sum(each['wrong'] for each in group):>6}"
        )
    for claim in record.claims:
        where = f", {claim['devices']} devices of {format_size(claim['size_bytes'])}" if claim["size_bytes"] else ""
        lines.append(
            f"{'met   ' if claim['met'] else 'MISSED'} {claim['name']}{where} ({claim['algorithm']}): "
            f"{claim['measured']:.2f}, {claim['better']} {claim['target']:g}"
        )
    summary = record.summary
    lines += [f"left out: {reason}" for reason in summary.left_out] + [f"FAILED: {reason}" for reason in summary.failed]
    lines += [f"CUT OFF during: {summary.running}"] if summary.running else []
    return "\n".join([*lines, f"tests: {record.tests.line}", *(f"FAILED: {test}" for test in record.tests.failed)])
