"""The table of accuracy as Markdown, for the terminal and for its own report, and its short form for the README."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.experiments.accuracy.lines import Line

BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
_STEP = "median error of the step"
_SHORT = {
    _STEP: "median error",
    "median error at equal speed": "at equal speed of the machine",
    "mean regret of the predicted best": "following the prediction costs",
    "coverage": "inside the 90 % interval",
}
_NUMBERS = ("skill on the shape", "interval score")


def markdown(lines: Sequence[Line], processor: str, finished: str = "") -> str:
    """A table with a row for each line; equal places are written once. ``finished`` says how many sweeps it is from."""
    rows = ["| where | what | measured | target | met | best null | points |", "|---|---|---|---|---|---|---|"]
    for place, members in itertools.groupby(lines, lambda line: line.where):
        for row, line in enumerate(members):
            met = "" if line.met is None else "yes" if line.met else "**no**"
            cells = [
                "" if row else place,
                line.quantity + (f" ({line.note})" if line.note else ""),
                number(line, line.value),
                line.target,
                met,
                number(line, line.null),
                f"{line.points} of {line.calibrations}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", note(lines, processor, finished)])


def summary(lines: Sequence[Line]) -> str:
    """Return the short table: a row for each place with communication and for one device of this machine."""
    rows = [f"| where | {' | '.join(_SHORT.values())} | best simple guess |", "|---|---|---|---|---|---|"]
    for place, members in itertools.groupby(lines, lambda line: line.where):
        of_quantity = {line.quantity.partition(" of the 90%")[0]: line for line in members}
        if "coverage" in of_quantity and not place.startswith("emulated link, 1 device"):
            cells = [number(line, line.value) if (line := of_quantity.get(key)) else "-" for key in _SHORT]
            guess = number(of_quantity[_STEP], of_quantity[_STEP].null)
            rows.append(f"| {' | '.join([place, *cells, guess])} |")
    return "\n".join(rows)


def note(lines: Sequence[Line], processor: str, finished: str = "") -> str:
    """Return what the columns of the table mean, and where it was measured."""
    noises = [line.noise for line in lines if line.noise is not None]
    noise = (
        f" Two runs of one setting differ by {min(noises):.1%} to {max(noises):.1%} (medians by place)."
        if noises
        else ""
    )
    return (
        f"Measured on {processor}{finished}. Points: of so many sweeps, each with its own profile and "
        f"calibration.{noise} The machine's speed is that of a reference computation, and its change is from the "
        "calibration to the run, by the median sweep. The error at equal speed is that of what the same tables "
        "predict for the speed at which each sample was taken. The constant width that intervals compete with is "
        "chosen for each calibration on all others."
    )


def number(line: Line, value: float | None) -> str:
    """Return the value, or the null, of a line as the table shows it; nothing for ``None``."""
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
