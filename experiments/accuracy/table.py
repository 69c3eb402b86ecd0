"""The table of accuracy as Markdown, for the terminal, for its own report and for the README."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.experiments.accuracy.lines import Line

BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
_NUMBERS = ("skill on the shape", "interval score")


def markdown(lines: Sequence[Line], processor: str, finished: str = "") -> str:
    """A table with a row for each line; equal places are written once. ``finished`` says how many sweeps it is from."""
    rows = ["| where | what | measured | target | met | best null | points |", "|---|---|---|---|---|---|---|"]
    for place, members in itertools.groupby(lines, lambda line: line.where):
        for number, line in enumerate(members):
            met = "" if line.met is None else "yes" if line.met else "**no**"
            cells = [
                "" if number else place,
                line.quantity + (f" ({line.note})" if line.note else ""),
                _text(line, line.value),
                line.target,
                met,
                _text(line, line.null),
                f"{line.points} of {line.calibrations}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    noises = [line.noise for line in lines if line.noise is not None]
    noise = (
        f" Two runs of one setting differ by {min(noises):.1%} to {max(noises):.1%} (medians by place)."
        if noises
        else ""
    )
    return "\n".join(
        [
            *rows,
            "",
            f"Measured on {processor}{finished}. Points: of so many sweeps, each with its own profile and "
            f"calibration.{noise} The machine's speed is that of a reference computation, and its change is from the "
            "calibration to the run, by the median sweep. The error at equal speed is that of what the same tables "
            "predict for the speed at which each sample was taken. The constant width that intervals compete with is "
            "chosen for each calibration on all others.",
        ]
    )


def _text(line: Line, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if line.quantity in _NUMBERS else f"{value:.1%}"


def into(readme: Path, table: str) -> None:
    """Put the table between the marks in a file. Raises ``ConfigError`` for a file without them."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} has no place for the table", allowed=f"a file with the lines {BEGIN} and {END}")
    codec.write_text(readme, f"{before}{BEGIN}\n{table}\n{END}{after}")
