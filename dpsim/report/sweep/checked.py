"""What ``report --check`` says of a sweep: whether its predictions are those that its hashes and inputs stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpsim.codec import SIGNIFICANT_DIGITS
from dpsim.records.checked import Checked, CheckedPoint, CheckedRecord
from dpsim.records.columns import run_values
from dpsim.report.words import percent
from dpsim.units import format_duration

SHOWN = 6
"""Points that a terminal shows without ``--verbose``: those that differ most."""


def hashed(model_version: int) -> str:
    """Return what the hashes of records are of, since versions of the model are recorded and before."""
    digits = f"rounded to {SIGNIFICANT_DIGITS} digits" if model_version else "of all digits"
    return (
        f"What predictions.json, blind.json and inputs.json say, numbers {digits}, as dpsim report FOLDER --check "
        "computes it; sha256sum of a file gives another value"
    )


def sentences(checked: Checked) -> Iterator[str]:
    """Yield the verdict, then what was found of each record, and what the hashes are of."""
    before = " (from before versions were recorded)" if not checked.model_version else ""
    if checked.damage:
        yield f"damaged: {checked.damage}"
    elif checked.verdict == "verified":
        yield f"verified: both predictions follow from inputs.json by model {checked.today}, as stated"
    else:
        yield (
            f"of model {checked.model_version}{before}, and not damaged: every file has the hash that is stated of it. "
            f"This dpsim has model {checked.today}, which predicts {_today(checked)} from the same inputs"
        )
    for record in checked.records:
        yield f"{record.what} ({record.file}): {_found(record)}"
    if checked.records:
        yield f"Hashed: {hashed(checked.model_version)}."
        yield "inputs.json holds no measured sample. No hash is of the samples in results.json."


def _found(record: CheckedRecord) -> str:
    if not record.stated:
        text = f"{record.computed}; records of model 0 state no hash of it"
    elif record.as_stated:
        text = f"{record.computed}, as stated"
    else:
        text = f"{record.computed}, but {record.stated} is stated"
    if record.largest is None:
        return text
    same = "the same" if record.agrees else "the same steps"
    again = same if record.same_steps else f"steps differ by up to {percent(record.largest.difference, sign=True)}"
    return f"{text}; predicted again: {again}"


def _today(checked: Checked) -> str:
    return "the same steps" if all(record.same_steps for record in checked.records) else "other steps"


def shown_points(checked: Checked, *, every: bool) -> list[tuple[str, CheckedPoint]]:
    """Return the predictions that differ from today's, the largest difference first: a few, or all of them."""
    points = [(record.what, point) for record in checked.records if not record.same_steps for point in record.points]
    points.sort(key=lambda each: -abs(each[1].difference))
    return points if every else points[:SHOWN]


def cells(what: str, point: CheckedPoint) -> tuple[str, ...]:
    """Return which prediction, the setting, and the step as stated, today, and how these differ."""
    stated, today = (format_duration(seconds) for seconds in (point.stated_step_s, point.today_step_s))
    kind = what.removeprefix("predictions ")
    return kind, point.setting.describe(), stated, today, percent(point.difference, sign=True)


def points(checked: Checked) -> list[dict[str, Any]]:
    """Return the rows of ``--json``: every prediction as stated and today."""
    return [
        {"predictions": record.file}
        | run_values(point.setting)
        | {
            "stated_step_s": point.stated_step_s,
            "today_step_s": point.today_step_s,
            "difference": point.difference,
        }
        for record in checked.records
        for point in record.points
    ]


def summary(checked: Checked) -> dict[str, Any]:
    """Return the summary of ``--json``: the verdict, and each record's hashes and largest difference."""
    return {
        "verdict": checked.verdict,
        "model_version": checked.model_version,
        "todays_model_version": checked.today,
        "damage": checked.damage,
        "hashed": hashed(checked.model_version),
        "records": [
            {
                "what": record.what,
                "file": record.file,
                "stated_sha256": record.stated,
                "computed_sha256": record.computed,
                "largest_difference": record.largest.difference if record.largest else None,
            }
            for record in checked.records
        ],
    }
