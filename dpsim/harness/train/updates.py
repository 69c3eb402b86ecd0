"""The file of a recorded order of updates, and the configuration of the run that replays it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.records.train import TrainConfig
from dpsim.runtime.asynchronous.update_order import UpdateOrder

SCHEMA = "dpsim.updates/1"
_MAY_DIFFER = frozenset({"replay", "devices", "layout", "stall_after_s"})


class RecordedUpdates(Noun, frozen=True):
    """The file of ``--record``: a training, and the order of its updates."""

    training: TrainConfig
    order: UpdateOrder
    schema: str = SCHEMA


def read(path: Path) -> RecordedUpdates:
    """Read the file of ``--record``. Raises ``FileFormatError``."""
    return codec.read(path, RecordedUpdates, "update order", SCHEMA)


def replayed(chosen: Mapping[str, Any]) -> TrainConfig:
    """Return the training of the file ``chosen["replay"]``, to be replayed on the chosen devices (1).

    Raises ``ConfigError`` if other fields are chosen, which the file has already, and ``FileFormatError``.
    """
    if others := sorted(chosen.keys() - _MAY_DIFFER):
        raise ConfigError(
            f"a replay with another {', '.join(others)}",
            allowed="the recorded training, on any number of devices",
            remedy="leave all flags out but --replay, --devices, --output and --json",
        )
    recorded = read(Path(chosen["replay"])).training
    return recorded.changed(**{"devices": 1, "layout": "", "record": None} | dict(chosen))
