"""``report --check``: hold a sweep against the hashes that it states, and predict it again from its inputs alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError, FileFormatError, FormatVersionError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.experiment import predict_beforehand, predict_from
from dpsim.harness.sweep.packed import PACKED, Swept, read
from dpsim.harness.sweep.sweep import read_swept
from dpsim.model.version import MODEL_VERSION
from dpsim.records.checked import SAME, Checked, CheckedPoint, CheckedRecord
from dpsim.records.sweep import Predictions, Results, read_predictions
from dpsim.study.inputs import SCHEMA, Inputs

_NOTHING_S = 1e-15
"""Times that differ by less are the same."""


def check(folder: Path) -> Checked:
    """Return whether a folder's records belong together, have their stated hashes, and follow from its inputs.

    Neither prediction reads a measured sample: both follow from ``inputs.json`` and the experiment that was declared.
    Raises ``ConfigError`` where the folder holds no finished sweep with these files, ``FormatVersionError`` where one
    of them has a format of another version.
    """
    if (packed := folder / PACKED).is_file():
        return checked(read(packed))
    for name in ("inputs.json", "predictions.json", "blind.json", "results.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"the predictions in {folder} cannot be computed again: it has no {name}",
                allowed="the folder of a finished sweep that profiled and calibrated in turns with its samples",
                remedy="an interrupted sweep goes on when its command is given again; where nothing was profiled and "
                "calibrated in turns with the samples, there is nothing to compute again",
            )
    try:
        swept, blind = read_swept(folder), read_predictions(folder / "blind.json")
        inputs = codec.read(folder / "inputs.json", Inputs, "inputs", SCHEMA)
    except FormatVersionError:
        raise
    except DpsimError as error:
        return Checked(model_version=0, today=MODEL_VERSION, damage=error.given)
    return check_records(swept.predictions, swept.results, blind, inputs)


def checked(swept: Swept) -> Checked:
    """Return whether a record has the hashes that it states and is predicted again from its inputs.

    Raises ``FileFormatError`` where its parts do not belong together.
    """
    predictions, results, blind, inputs = swept.predictions, swept.results, swept.blind, swept.inputs
    if blind is None or inputs is None:
        raise FileFormatError("a record of a sweep without inputs", allowed="one with inputs and blind predictions")
    compare(predictions, results, blind=blind)  # raises
    return check_records(predictions, results, blind, inputs)


def check_records(predictions: Predictions, results: Results, blind: Predictions, inputs: Inputs) -> Checked:
    """Return the same of records that were read."""
    version = results.model_version
    versions = {record.model_version for record in (inputs, predictions, blind, results)}
    content = CheckedRecord(
        what="inputs", file="inputs.json", stated=results.inputs_sha256, computed=codec.digest(inputs)
    )
    ways: dict[str, tuple[str, Predictions, str, Callable[[], Predictions]]] = {
        "predictions made beforehand": (
            "predictions.json",
            predictions,
            results.predictions_sha256,
            lambda: _beforehand_again(predictions, inputs, same_model=version == MODEL_VERSION),
        ),
        "predictions of the same minutes": (
            "blind.json",
            blind,
            results.blind_sha256,
            lambda: predict_from(predictions, inputs, same_minutes=True),
        ),
    }
    records, damage = [content], [] if len(versions) == 1 else [f"its files are of models {_listed(versions)}"]
    for what, (file, stated, sha256, again) in ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # a mean of nothing, a NaN
                today = again()
        except (ValueError, IndexError, KeyError, RuntimeWarning) as error:
            return Checked(
                model_version=version,
                today=MODEL_VERSION,
                records=tuple(records),
                damage=f"inputs.json does not hold what the experiment in predictions.json needs: {error}",
            )
        records.append(_checked(what, file, stated, today, sha256))
    for record in records:
        if not record.as_stated:
            damage.append(f"{record.file} has another SHA-256 than results.json states")
        elif record.agrees is False and version == MODEL_VERSION:
            damage.append(f"{record.file} holds other predictions than the same model makes of inputs.json")
    return Checked(model_version=version, today=MODEL_VERSION, records=tuple(records), damage="; ".join(damage))


def _beforehand_again(predictions: Predictions, inputs: Inputs, *, same_model: bool) -> Predictions:
    """Predict from what was measured before the first sample; another model predicts the settings that were chosen."""
    if same_model:
        return predict_beforehand(predictions.experiment, inputs)
    return predict_from(predictions, inputs, same_minutes=False)


def _checked(what: str, file: str, stated: Predictions, today: Predictions, sha256: str) -> CheckedRecord:
    of_today = {point.setting: point.step_s for point in today.points}
    points = [
        CheckedPoint(setting=point.setting, stated_step_s=point.step_s, today_step_s=of_today[point.setting])
        for point in stated.points
        if point.setting in of_today
    ]
    both = [codec.to_builtins(each) | {"predicted_at": "", "model_version": 0} for each in (stated, today)]
    return CheckedRecord(
        what=what,
        file=file,
        stated=sha256,
        computed=codec.digest(stated),
        points=tuple(points),
        agrees=_agree(*both),
    )


def _agree(stated: Any, today: Any) -> bool:
    """Return whether plain values are the same but for the last digits of fractions, which processors round apart."""
    if isinstance(stated, float) and isinstance(today, float):
        return math.isclose(stated, today, rel_tol=SAME, abs_tol=_NOTHING_S)
    if isinstance(stated, dict) and isinstance(today, dict):
        return stated.keys() == today.keys() and all(_agree(stated[key], today[key]) for key in stated)
    if isinstance(stated, list) and isinstance(today, list):
        return len(stated) == len(today) and all(map(_agree, stated, today))
    return bool(stated == today)


def _listed(versions: set[int]) -> str:
    return " and ".join(map(str, sorted(versions)))
