"""Reproducibility across configurations: what is asked, and the record of what training came to, bits by digest."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Literal

from dpsim import codec
from dpsim.algorithms import ALGORITHMS, RUNNABLE, algorithms_in
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.layout import parse_devices
from dpsim.machine import Network, check_algorithm
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import BATCH_NORM_MODES, DEFAULT_LEAVES, OVERLAPS, BatchNormMode, Overlap, Plan
from dpsim.records.sweep import Environment
from dpsim.rng import check_seed
from dpsim.wire_dtype import SIXTEEN_BITS, WireDtype

SCHEMA = "dpsim.reproduce/1"
RECORD = "reproduce.json"
PREDICTIONS = "predictions.json"
Cause = Literal["summation order", "batch norm", "shape", "other"]


class Configuration(Noun, frozen=True):
    """One way to run the training. On one device nothing is sent, and threshold, algorithm and overlap mean nothing."""

    batch_norm: BatchNormMode
    leaves: int
    devices: int
    layout: str = ""
    fusion_threshold_bytes: float = math.inf
    algorithm: str = "auto"
    overlap: Overlap = "off"

    def __post_init__(self) -> None:
        ALGORITHMS.find(self.algorithm)

    @property
    def promised(self) -> bool:
        """Whether its bits are those of any other one of its mode: with leaves they are."""
        return self.leaves > 0

    @property
    def name(self) -> str:
        """``2 devices, 64 KiB, ring, poll``."""
        from dpsim.units import format_size

        devices = self.layout or str(self.devices)
        if self.devices == 1:
            return "1 device"
        return f"{devices} devices, {format_size(self.fusion_threshold_bytes)}, {self.algorithm}, {self.overlap}"


class Reproduction(Noun, frozen=True):
    """A training, and all the ways of running it that are compared: every combination, and one device.

    ``batch_norms`` are trainings of their own: what is compared is compared within one of them. ``local`` is trained
    without leaves, since it has no meaning with them; ``leaves`` 0 asks for plain training in every mode.
    ``wire_dtype`` is what gradients are sent as, which is part of the training; ``None``: as they are.
    """

    model: str = "cnn"
    dataset: str = "digits"
    devices: tuple[int | str, ...] = (1, 2, 3, 4)
    fusion_thresholds_bytes: tuple[float, ...] = (0.0, 65536.0, math.inf)
    algorithms: tuple[str, ...] = ("auto",)
    overlaps: tuple[str, ...] = ("off",)
    batch_norms: tuple[str, ...] = ("leaf",)
    steps: int = 50
    leaves: int = DEFAULT_LEAVES
    global_batch: int = 64
    optimizer: Optimizer = Sgd(weight_decay=1e-3)
    seed: int = 0
    fusion_rule: str = "tarantella"
    wire_dtype: WireDtype | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", allowed="1 or more")
        for what, given, allowed in (
            ("algorithm", self.algorithms, algorithms_in(*RUNNABLE)),
            ("overlap", self.overlaps, OVERLAPS),
            ("batch norm", self.batch_norms, BATCH_NORM_MODES),
        ):
            for word in given:
                if word not in allowed:
                    raise unknown(what, word, ("all", *allowed) if what != "batch norm" else allowed)
        for what, values in (
            ("devices", self.devices),
            ("fusion_thresholds_bytes", self.fusion_thresholds_bytes),
            ("algorithms", self.algorithms),
            ("overlaps", self.overlaps),
            ("batch_norms", self.batch_norms),
        ):
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{what} is {list(values)}", allowed="one or more different values")
        for configuration in self.configurations():
            self.plan(configuration)
            check_algorithm(configuration.algorithm, Network())

    def configurations(self) -> tuple[Configuration, ...]:
        """Every combination, ordered by mode and then by devices; one device first, once a mode."""
        given = sorted((parse_devices(token) for token in self.devices), key=lambda pair: (pair[0], pair[1]))
        found: list[Configuration] = []
        for mode in self.batch_norms:
            leaves = 0 if mode == "local" else self.leaves
            found.append(Configuration(batch_norm=mode, leaves=leaves, devices=1))  # type: ignore[arg-type]
            for (devices, layout), threshold, algorithm, overlap in itertools.product(
                given, self.fusion_thresholds_bytes, self.algorithms, self.overlaps
            ):
                if devices == 1 or (len(self.algorithms) > 1 and self._impossible(algorithm, layout, leaves)):
                    continue
                found.append(
                    Configuration(
                        batch_norm=mode,  # type: ignore[arg-type]
                        leaves=leaves,
                        devices=devices,
                        layout=layout,
                        fusion_threshold_bytes=threshold,
                        algorithm=algorithm,
                        overlap=overlap,  # type: ignore[arg-type]
                    )
                )
        return tuple(found)

    def _impossible(self, algorithm: str, layout: str, leaves: int) -> bool:
        """Whether one of several algorithms has no nodes here, or without leaves cannot send 16 bits."""
        plain = self.wire_dtype in SIXTEEN_BITS and not leaves
        return (algorithm == "hierarchical" and not layout) or (plain and not ALGORITHMS.find(algorithm).sixteen_bits)

    def plan(self, configuration: Configuration) -> Plan:
        """The plan of one of them. Raises ``ConfigError``."""
        return Plan(
            devices=configuration.devices,
            layout=configuration.layout,
            global_batch=self.global_batch,
            fusion_threshold_bytes=configuration.fusion_threshold_bytes,
            algorithm=configuration.algorithm,
            overlap=configuration.overlap,
            batch_norm=configuration.batch_norm,
            optimizer=self.optimizer,
            leaves=configuration.leaves,
            fusion_rule=self.fusion_rule,
            wire_dtype=self.wire_dtype,
        )


class Trajectory(Noun, frozen=True):
    """What a training came to. Several configurations that came to the same share one.

    ``digest`` is that of ``dpsim train``: SHA-256 of parameters, optimizer state and running statistics, tensor by
    tensor in name order. ``tensors`` are rank 0's, in the order in which a step makes them; ``steps`` has the first 16
    digits of the SHA-256 of each after each step.
    """

    digest: str
    losses_digest: str
    losses: tuple[float, ...]
    tensors: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]


class Run(Noun, frozen=True):
    """A configuration and the number of its trajectory. ``ranks_agree``: all ranks ended with the same bits."""

    configuration: Configuration
    trajectory: int
    ranks_agree: bool


class Difference(Noun, frozen=True):
    """Where a trajectory leaves another for the first time.

    ``tensor`` is the first one that differs in ``step`` (from 1), in the order in which a step makes them; ``element``
    the first place in it, where ``value`` stands instead of ``reference_value``, ``ulps`` floating-point numbers away.
    ``max_ulps`` and ``max_relative`` (over the tensor's largest number) are the largest in that tensor. ``kept``:
    values are known (of a saved run only the digests are). ``evidence`` says why it is ``cause``.
    """

    step: int
    tensor: str
    tensors_differing: int
    tensors: int
    cause: Cause | None = None
    evidence: str = ""
    kept: bool = False
    element: tuple[int, ...] = ()
    value: float = 0.0
    reference_value: float = 0.0
    ulps: int = 0
    relative: float = 0.0
    elements_differing: int = 0
    elements: int = 0
    max_ulps: int = 0
    max_relative: float = 0.0


class PredictedDrift(Noun, frozen=True):
    """What a mode that is not invariant was predicted to drift by on so many devices, against one device.

    ``parameters``: |w_n - w_1| / |w_1| after the last step, from rounding alone (None with local statistics, which
    change more than rounding does). ``statistics``: root mean square, in standard deviations of a sample, of the
    difference between a device's mean and the whole batch's: those of the first batch norm, before training, over the
    first 16 batches (None without local batch norm).
    """

    batch_norm: BatchNormMode
    devices: int
    parameters: float | None = None
    statistics: float | None = None


class MeasuredDrift(Noun, frozen=True):
    """The same, measured; ``loss`` is the relative difference of the last step's loss."""

    configuration: Configuration
    parameters: float
    loss: float
    statistics: float | None = None


class DriftInputs(Noun, frozen=True):
    """What the run on one device tells a prediction of drift; it was measured before the prediction was made.

    ``spacing_updates`` = sum over steps of the mean of |update| times the spacing of floating-point numbers at w;
    ``squared_updates`` = sum over steps of the mean of update^2; ``parameter_rms`` at the end. ``unit`` is half the
    relative spacing of floating-point numbers. ``normalises``: the model has batch norm.
    """

    batch_norm: BatchNormMode
    spacing_updates: float
    squared_updates: float
    parameter_rms: float
    unit: float
    normalises: bool


class DriftPredictions(Noun, frozen=True):
    """All predictions of drift and what they were made from; written and hashed before any other run."""

    reproduction: Reproduction
    predicted_at: str
    basis: tuple[DriftInputs, ...]
    points: tuple[PredictedDrift, ...]
    schema: str = "dpsim.drift/1"


class Divergence(Noun, frozen=True):
    """A trajectory that is not the one it is compared with (numbers in the record's ``trajectories``)."""

    trajectory: int
    reference: int
    difference: Difference


class SavedComparison(Noun, frozen=True):
    """A comparison with a saved run: ``None`` where a configuration or its mode came to the same."""

    path: str
    compared: tuple[Configuration, ...]
    differences: tuple[Difference | None, ...]
    across_machines: tuple[str, ...] = ()


class ReproduceRecord(Noun, frozen=True):
    """Everything that was found.

    ``kernel_table``: the digest of the table that decided which code computes in leaves.
    """

    reproduction: Reproduction
    environment: Environment
    measured_from: str
    measured_until: str
    trajectories: tuple[Trajectory, ...]
    runs: tuple[Run, ...]
    found: tuple[Divergence, ...] = ()
    predictions: DriftPredictions | None = None
    predictions_sha256: str = ""
    drift: tuple[MeasuredDrift, ...] = ()
    against: SavedComparison | None = None
    kernel_table: str = ""
    schema: str = SCHEMA

    def reference(self, configuration: Configuration) -> int:
        """The trajectory that the ones of its mode are compared with: that of one device."""
        return next(
            run.trajectory
            for run in self.runs
            if run.configuration.devices == 1 and run.configuration.batch_norm == configuration.batch_norm
        )

    def identical(self, run: Run) -> bool:
        """Whether a run came to the bits of one device, on all its ranks."""
        return run.ranks_agree and run.trajectory == self.reference(run.configuration)

    def difference(self, run: Run) -> Difference | None:
        """Where a run leaves the one on one device."""
        pair = self.reference(run.configuration), run.trajectory
        return next((one.difference for one in self.found if (one.reference, one.trajectory) == pair), None)

    @property
    def kept_promises(self) -> bool:
        """Whether everything that should be identical is, here and in the saved run."""
        here = all(self.identical(run) for run in self.runs if run.configuration.promised)
        beside = self.against
        pairs = zip(beside.compared, beside.differences, strict=True) if beside else ()
        return here and not any(where is not None for one, where in pairs if one.promised)


def read(path: Path) -> ReproduceRecord:
    """Read a record, or the one in a folder. Raises ``FileFormatError``."""
    return codec.read(path / RECORD if path.is_dir() else path, ReproduceRecord, "reproduce", SCHEMA)
