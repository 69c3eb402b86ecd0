"""The drift of a devices sweep: its plans trained for some steps each, bits and distances against one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.harness.reproduce.measure import measure_drift, possible
from dpsim.harness.sweep.experiment import chosen_overlap, networks_of
from dpsim.plan import overlap_of
from dpsim.records.reproduce import SCHEMA, ReproduceRecord, Reproduction
from dpsim.records.sweep import Predictions

DRIFT, DRIFT_PREDICTIONS = "drift.json", "drift_predictions.json"
Progress = Callable[[str], None]


def reproduction_of(predictions: Predictions) -> Reproduction | None:
    """What a sweep's drift is measured on: its trainings over the number of devices, all on this machine's own network.

    An emulated network changes times, not bits. None where the experiment measures no drift.
    """
    experiment = predictions.experiment
    over = experiment.scaling
    if over is None or not experiment.measures_drift:
        return None
    ways = _ways(predictions)
    return Reproduction(
        model=experiment.model,
        dataset=experiment.dataset,
        devices=experiment.devices,
        fusion_thresholds_bytes=experiment.fusion_thresholds_bytes,
        steps=over.steps,
        leaves=over.leaves,
        algorithms=tuple(dict.fromkeys(algorithm for algorithm, _ in ways)),
        overlaps=tuple(dict.fromkeys(overlap_of(overlap) for _, overlap in ways)),
        batch_norms=(over.mode,),
        global_batch=experiment.global_batch,
        optimizer=experiment.optimizer,
        seed=experiment.seed,
        fusion_rule=experiment.fusion_rule,
        wire_dtype=experiment.wire_dtype,
    )


def drift(predictions: Predictions, folder: Path, progress: Progress) -> ReproduceRecord | None:
    """The drift of a sweep, from its folder or else measured into it, predictions first; None where there is none.

    Raises ``FileFormatError`` where the folder holds the drift of another sweep; otherwise as ``reproduce``.
    """
    reproduction = reproduction_of(predictions)
    if reproduction is None or (folder / DRIFT).exists():
        return read_drift(predictions, folder)
    ways = _ways(predictions)
    wanted = [one for one in possible(reproduction) if one.devices == 1 or (one.algorithm, one.overlap) in ways]
    record = measure_drift(reproduction, wanted, folder / DRIFT_PREDICTIONS, progress)
    trajectories = tuple(msgspec.structs.replace(one, tensors=(), steps=()) for one in record.trajectories)
    record = msgspec.structs.replace(record, trajectories=trajectories)
    codec.write(folder / DRIFT, record)
    return record


def read_drift(predictions: Predictions, folder: Path) -> ReproduceRecord | None:
    """The drift that a folder holds of a sweep, None where it holds none. Raises ``FileFormatError``."""
    path = folder / DRIFT
    if not path.exists():
        return None
    record = codec.read(path, ReproduceRecord, "drift", SCHEMA)
    sha = "" if record.predictions is None else codec.digest(record.predictions)
    made = None if record.predictions is None else record.predictions.predicted_at
    in_order = made is None or record.measured_from <= made <= record.measured_until
    if record.reproduction != reproduction_of(predictions) or record.predictions_sha256 != sha or not in_order:
        raise FileFormatError(
            f"{path} is not the drift of this sweep, or is not what was predicted",
            allowed="the file as the sweep wrote it, beside its predictions.json",
            remedy="remove it and run the sweep again: it measures what is missing",
        )
    return record


def _ways(predictions: Predictions) -> list[tuple[str, str]]:
    """(algorithm, overlap) of each network, in their order: a record is compared with what is made of it."""
    mechanisms = predictions.mechanisms
    pairs = networks_of(predictions.experiment)
    return [(algorithm, chosen_overlap(mechanisms.get(network, {}))) for network, algorithm in pairs]
