"""The file of a training's result (``dpsim train --output``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dpsim import codec
from dpsim.records.sweep import TrainResult

SCHEMA = "dpsim.output/1"


class TrainRecord(TrainResult, frozen=True, kw_only=True):
    """What was trained, and its result."""

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
    command: Literal["train"]
    schema: str = SCHEMA


def read(path: Path) -> TrainRecord:
    """Read the result of a training. Raises ``FileFormatError``."""
    return codec.read(path, TrainRecord, "training result", SCHEMA)
