"""The file of a training's result (``dpsim train --output``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from dpsim import codec
from dpsim.codec import to_builtins
from dpsim.dtypes import WireDtype
from dpsim.fields import shared
from dpsim.learning_rate import RateSchedule
from dpsim.optimizer import Optimizer
from dpsim.plan import BatchNormMode
from dpsim.records.sweep import TrainResult

SCHEMA = "dpsim.output/1"


class TrainRecord(TrainResult, frozen=True, kw_only=True):
    """The training, by every field that decides its bits or the order of its sums, and its result.

    Files of earlier versions lack some: ``optimizer`` and ``rate_schedule`` are then ``None``, others the defaults.
    """

    model: str
    dataset: str
    global_batch: int
    seed: int
    network: str
    algorithm: str
    fusion_rule: str
    overlap: str
    leaves: int
    strategy: str = "data-parallel"
    compute_dtype: str = "float32"
    layout: str = ""
    fusion_threshold_bytes: float | None = None
    cycle_s: float = 1e-3
    accumulate: int = 1
    wire_dtype: WireDtype | None = None
    batch_norm: BatchNormMode | None = None
    label_smoothing: float = 0.0
    optimizer: Optimizer | None = None
    rate_schedule: RateSchedule | None = None
    command: Literal["train"]
    schema: str = SCHEMA


def identity(config: Struct) -> dict[str, Any]:
    """Return the fields of a configuration of a training that its record has."""
    return {name: to_builtins(value) for name, value in shared(config, TrainRecord).items()}


def read(path: Path) -> TrainRecord:
    """Read the result of a training. Raises ``FileFormatError``."""
    return codec.read(path, TrainRecord, "training result", SCHEMA)
