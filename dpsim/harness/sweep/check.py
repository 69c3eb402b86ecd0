"""``report --check``: compute both predictions of a sweep again, from what was profiled and calibrated alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.sweep.experiment import predict_beforehand
from dpsim.harness.sweep.sweep import blind_predictions
from dpsim.records.sweep import Predictions, read_predictions, read_results
from dpsim.study.inputs import SCHEMA, Inputs


@dataclass(frozen=True)
class CheckedHash:
    """A hash that a folder states, and the one that its files give now."""

    what: str
    stated: str
    computed: str

    @property
    def same(self) -> bool:
        """Whether both are the same."""
        return self.stated == self.computed


def check(folder: Path) -> tuple[CheckedHash, ...]:
    """Return the hashes of a folder's inputs and of its predictions, as stated and as computed again.

    Neither prediction reads a measured sample: both follow from ``inputs.json`` and the experiment that was declared.
    Raises ``ConfigError`` where the folder holds no finished sweep with these files, ``FileFormatError`` where one of
    them is damaged.
    """
    for name in ("inputs.json", "predictions.json", "blind.json", "results.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"the predictions in {folder} cannot be computed again: it has no {name}",
                allowed="the folder of a finished sweep that profiled and calibrated in turns with its samples",
                remedy="an interrupted sweep goes on when its command is given again; where nothing was profiled and "
                "calibrated in turns with the samples, there is nothing to compute again",
            )
    inputs = codec.read(folder / "inputs.json", Inputs, "inputs", SCHEMA)
    predictions, blind = (read_predictions(folder / name) for name in ("predictions.json", "blind.json"))
    results = read_results(folder / "results.json")
    try:
        again = predict_beforehand(predictions.experiment, inputs)
        blind_again = blind_predictions(predictions, inputs)
    except (ValueError, IndexError, KeyError) as error:
        raise FileFormatError(
            f"{folder / 'inputs.json'} does not hold what the experiment in predictions.json needs: {error}",
            allowed="the inputs of the same sweep, as they were written",
            remedy="restore the file, or run the sweep again",
        ) from error
    return (
        CheckedHash("inputs", results.inputs_sha256, codec.digest(inputs)),
        CheckedHash("predictions made beforehand", results.predictions_sha256, _digest_of(again, predictions)),
        CheckedHash("blind predictions", codec.digest(blind), _digest_of(blind_again, blind)),
    )


def _digest_of(again: Predictions, saved: Predictions) -> str:
    """Return the digest of predictions that were made again, at the instant of the saved ones."""
    return codec.digest(msgspec.structs.replace(again, predicted_at=saved.predicted_at))
