"""A finished sweep as one compressed file: what the records of a report's folder hold, in a tenth of the bytes."""

from __future__ import annotations

import lzma
from pathlib import Path

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import FileFormatError
from dpsim.records.sweep import Predictions, Results
from dpsim.study.inputs import Inputs

SUFFIX = ".json.xz"
PACKED = f"records{SUFFIX}"
"""The file of a folder that has it in place of the records of a sweep."""


class Swept(Noun, frozen=True):
    """A finished sweep: what was profiled and calibrated, both predictions, and the results with their hashes.

    Sweeps before schema 2 have no ``inputs`` and no ``blind`` predictions.
    """

    predictions: Predictions
    results: Results
    blind: Predictions | None = None
    inputs: Inputs | None = None
    schema: str = "dpsim.swept/2"


def keep(path: Path, swept: Swept) -> None:
    """Write the record of a finished sweep."""
    codec.write_output(path, lzma.compress(codec.record_text(swept).encode()))


def read(path: Path) -> Swept:
    """Read the record of a finished sweep. Raises ``FileFormatError``."""
    try:
        raw = codec.parse_json(lzma.decompress(path.read_bytes()).decode())
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise FileFormatError(
            f"the record {path} cannot be read: {error}",
            allowed="a record of a sweep, as dpsim compresses it",
            remedy="take an undamaged copy; or delete it, and run the sweep again",
        ) from error
    return codec.decode(raw, Swept, "record of a sweep")
