"""pandas DataFrames with declared columns. Loading this module loads pandas; ``import dpsim`` does not load it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dpsim.columns import AnyColumn, ColumnDtype
from dpsim.errors import FileFormatError

Row = Mapping[str, Any]


def table(rows: Sequence[Row], columns: Sequence[AnyColumn]) -> pd.DataFrame:
    """Return a row for each of ``rows``, with exactly the declared columns and data types.

    Rows are plain values as in ``--json``: infinity is ``"inf"``, and a field of a nested object becomes a column with
    a dot in its name. What is ``None`` or missing in a row is missing in the table.
    Raises ``FileFormatError`` for a number out of range.
    """
    flat = [_flat(row) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    data: dict[str, Any] = {}
    for column in columns:
        shown = sorted(name for name in names if name.startswith(column.prefix)) if column.prefix else [column.name]
        for name in shown:
            data[name] = _array([row.get(name) for row in flat], column.dtype)
    return pd.DataFrame(data, index=pd.RangeIndex(len(flat)))


def repeated(
    rows: Sequence[Row], lengths: Sequence[int], values: Mapping[str, Any], columns: Sequence[AnyColumn]
) -> pd.DataFrame:
    """Return each of ``rows`` as many times as its length, beside ``values``: one entry for each row of the result.

    The values are numbers as arrays, words as sequences. Raises ``FileFormatError`` for a number out of range.
    """
    own = table(rows, [column for column in columns if column.name not in values])
    each = own.take(np.repeat(np.arange(len(rows)), lengths)).reset_index(drop=True)
    data = {c.name: _array(values[c.name], c.dtype) if c.name in values else each[c.name] for c in columns}
    return pd.DataFrame(data, index=each.index)


def _flat(row: Row) -> dict[str, Any]:
    """Return a row with the fields of nested objects beside its own; lists are their JSON text."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": each for inner, each in _flat(value).items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _array(values: Any, dtype: ColumnDtype) -> Any:
    if dtype == "category":
        words = sorted({value for value in values if value is not None})
        return pd.Categorical(values, categories=pd.Index(words, dtype="str"))
    if dtype == "float64":
        if isinstance(values, np.ndarray):
            return values.astype(np.float64)
        return np.array([np.nan if value is None else float(value) for value in values], np.float64)
    try:
        return pd.array(values, dtype=dtype)
    except OverflowError as error:
        raise FileFormatError(
            "the record holds a number out of range", allowed="64-bit whole numbers", remedy="the file is damaged"
        ) from error
