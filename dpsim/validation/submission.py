"""Anyone's predictions: one JSON file, scored as dpsim's own are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, DpsimError, FileFormatError, unknown
from dpsim.model.residuals import LEVEL
from dpsim.validation.contestants import DPSIM
from dpsim.validation.judge import JudgedRow

SCHEMA = "dpsim.submission/1"
_MOST_NAMED = 8


class SubmittedRow(Noun, frozen=True):
    """The prediction of a row, by the line of the row in its set's CSV file, with the ends of its interval."""

    line: int
    predicted_s: float
    low_s: float
    high_s: float


class Submission(Noun, frozen=True):
    """Predictions with intervals of one level: for each part of a case, by the part's name, all of its rows.

    ``name`` is that of the predictor, ``source`` says who made it and from what.
    """

    name: str
    predictions: dict[str, tuple[SubmittedRow, ...]]
    level: float = LEVEL
    source: str = ""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise ConfigError(f"the name is {self.name!r}", allowed="one line of text, which names the predictor")


def submission(name: str, rows: Sequence[JudgedRow]) -> Submission:
    """Return the predictions of judged rows as a submission."""
    predictions: dict[str, list[SubmittedRow]] = {}
    for row in rows:
        submitted = SubmittedRow(line=row.line, predicted_s=row.predicted, low_s=row.low, high_s=row.high)
        predictions.setdefault(row.case, []).append(submitted)
    return Submission(name=name, predictions={case: tuple(of_case) for case, of_case in predictions.items()})


def submitted(path: Path, rows: Sequence[JudgedRow]) -> tuple[str, list[JudgedRow]]:
    """Return the name of the predictor, and the rows of its cases with its predictions in place of dpsim's.

    Who predicts one part of a case predicts all parts and rows of it. Raises ``FileFormatError``, with the place, for
    a case or row that does not exist, rows that are missing or twice, and an interval without its prediction inside.
    """
    given = codec.read(path, Submission, "submission", SCHEMA)
    if given.level != LEVEL:
        raise FileFormatError(
            f"{path}: the level is {given.level}",
            allowed=f"{LEVEL}: intervals of {LEVEL:.0%}",
            remedy=f"give the ends of the {LEVEL:.0%} intervals",
        )
    parts: dict[str, dict[int, JudgedRow]] = {}
    for row in rows:
        parts.setdefault(row.case, {})[row.line] = row
    for part in given.predictions:
        if part not in parts:
            raise _placed(path, unknown("case", part, parts, remedy="dpsim validate --predictions FILE names them all"))
    cases = {_case(parts[part]) for part in given.predictions}
    _complete(
        path, f"case {', '.join(sorted(cases))}", given.predictions, [p for p in parts if _case(parts[p]) in cases]
    )
    judged = []
    for part, predictions in given.predictions.items():
        _complete(path, f"case {part!r}", [each.line for each in predictions], list(parts[part]))
        judged += [_replaced(path, parts[part][each.line], each) for each in predictions]
    if not judged:
        raise FileFormatError(f"{path} predicts nothing", allowed="predictions of one case or more")
    return given.name, judged


def _case(part: dict[int, JudgedRow]) -> str:
    return next(iter(part.values())).part.case.name


def _replaced(path: Path, row: JudgedRow, given: SubmittedRow) -> JudgedRow:
    ends = given.low_s, given.predicted_s, given.high_s
    if not (0 < given.low_s <= given.predicted_s <= given.high_s < math.inf):
        raise FileFormatError(
            f"{path}: case {row.case!r}, line {row.line}: low, predicted and high are {', '.join(map(str, ends))} s",
            allowed="finite seconds above 0, the prediction inside its interval",
            remedy="low_s is the lower end of the interval and high_s the upper one",
        )
    others = row.others | {DPSIM: row.predicted}
    return row.replaced(predicted=given.predicted_s, low=given.low_s, high=given.high_s, others=others)


def _complete(path: Path, what: str, given: Iterable[object], wanted: Sequence[object]) -> None:
    """Refuse anything that is missing, twice or too many."""
    counts, known = Counter(iter(given)), frozenset(wanted)
    problems = {
        "do not exist": [each for each in counts if each not in known],
        "are missing": [each for each in wanted if each not in counts],
        "are there twice": [each for each, count in counts.items() if count > 1],
    }
    kind = "lines" if wanted and isinstance(wanted[0], int) else "parts"
    for problem, members in problems.items():
        if members:
            shown = ", ".join(map(str, members[:_MOST_NAMED])) + ", ..." * (len(members) > _MOST_NAMED)
            raise FileFormatError(
                f"{path}: {what}: {kind} {shown} {problem}",
                allowed=f"each of its {len(wanted)} {kind} once",
                remedy="predict all rows of a case, or leave the case out",
            )


def _placed(path: Path, error: DpsimError) -> FileFormatError:
    return FileFormatError(f"{path}: {error.given}", allowed=error.allowed, remedy=error.remedy)
