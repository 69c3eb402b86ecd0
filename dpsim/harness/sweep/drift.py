"""The drift of a sweep over devices: each of its plans is trained for some steps and compared with one device."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.fields import shared
from dpsim.harness.reproduce.measure import measure, possible
from dpsim.harness.sweep.experiment import chosen_overlap
from dpsim.plan import Overlap
from dpsim.progress import Progress
from dpsim.records.reproduce import AXES, ReproduceRecord, Reproduction, read
from dpsim.records.sweep import Predictions
from dpsim.units import format_duration

DRIFT, DRIFT_PREDICTIONS = "drift.json", "drift_predictions.json"


def reproduction_of(predictions: Predictions) -> Reproduction | None:
    """Return the trainings on which a sweep measures drift, or ``None`` where its experiment measures none.

    All are on this machine's own network: an emulated network changes times, not bits.
    """
    experiment = predictions.experiment
    if not experiment.measures_drift:
        return None
    settings = [point.setting for point in predictions.points if point.setting.repeat == 0]
    plans = [setting.plan for setting in settings]
    pairs = _algorithms(predictions)
    lists = {name: [getattr(plan, field) for plan in plans] for name, field in AXES.items()} | {
        "devices": [plan.layout or plan.devices for plan in plans],
        "fusion_thresholds_bytes": [plan.threshold_bytes for plan in plans],
        "algorithms": [algorithm for algorithm, _ in pairs],
        "overlaps": [overlap for _, overlap in pairs],
        "batch_norms": [plans[0].batch_norm],
    }
    of_all = {"model": settings[0].model} | shared(plans[0], Reproduction) | shared(experiment, Reproduction)
    return Reproduction(**of_all | {name: tuple(dict.fromkeys(values)) for name, values in lists.items()})


def drift(predictions: Predictions, folder: Path, progress: Progress) -> ReproduceRecord | None:
    """Return the drift of a sweep, ``None`` where its experiment measures none.

    It is read from the folder, or else measured and written there, after its predictions; before that it says how long
    that takes. Raises ``FileFormatError``
    where the folder holds the drift of another sweep; otherwise as ``reproduce``.
    """
    reproduction = reproduction_of(predictions)
    if reproduction is None or (folder / DRIFT).exists():
        return read_drift(predictions, folder)
    pairs = _algorithms(predictions)
    plans = [plan for plan in possible(reproduction) if plan.devices == 1 or (plan.algorithm, plan.overlap) in pairs]
    step_s = {point.setting.plan.devices: point.step_s for point in predictions.points}
    total_s = reproduction.steps * sum(step_s.get(plan.devices, max(step_s.values())) for plan in plans)
    progress(
        f"the drift: {len(plans)} trainings of {reproduction.steps} steps take about {format_duration(total_s)} on a "
        "quiet machine, after the start of their ranks"
    )
    record = measure(reproduction, folder / DRIFT_PREDICTIONS, progress, plans)
    trajectories = tuple(
        msgspec.structs.replace(trajectory, tensors=(), steps=()) for trajectory in record.trajectories
    )
    record = msgspec.structs.replace(record, trajectories=trajectories)
    codec.write_record(folder / DRIFT, record)
    return record


def read_drift(predictions: Predictions, folder: Path) -> ReproduceRecord | None:
    """Read the drift of a sweep from its folder, ``None`` where there is none. Raises ``FileFormatError``."""
    path = folder / DRIFT
    if not path.exists():
        return None
    record = read(path, "drift")
    sha = "" if record.predictions is None else codec.digest(record.predictions)
    predicted_at = None if record.predictions is None else record.predictions.predicted_at
    in_order = predicted_at is None or record.measured_from <= predicted_at <= record.measured_until
    if record.reproduction != reproduction_of(predictions) or record.predictions_sha256 != sha or not in_order:
        raise FileFormatError(
            f"{path} is not the drift of this sweep, or does not belong to its predictions",
            allowed="the file as the sweep wrote it, beside its predictions.json",
            remedy="remove it and run the sweep again: it measures what is missing",
        )
    return record


def _algorithms(predictions: Predictions) -> list[tuple[str, Overlap]]:
    """Return (algorithm, overlap) of each network, in the order of the networks, since reproductions are compared."""
    of_network: dict[str, tuple[str, Overlap]] = {}
    for point in predictions.points:
        where, plan = point.setting.where, point.setting.plan
        of_network.setdefault(where, (plan.algorithm, chosen_overlap(predictions.mechanisms.get(where, {}))))
    return list(of_network.values())
