"""The picture of a prediction over many numbers of devices: its efficiency with its band, and where the time goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.report.charts import Chart, Lines, Series
from dpsim.report.prediction import SETTING, Point, amount

_MOST_TICKS = 6
_CURVE = ("machine", *SETTING)
"""What each curve has of its own, beside the batch."""


def scaling_chart(points: Sequence[Point], best: Sequence[Point], *, weak: bool) -> Chart:
    """Return panels over the number of devices: scaling efficiency, and the shares of the first curve's steps.

    Where they are asked for, hours, cost and tokens a second follow.
    Of each number of devices and curve the fastest threshold counts. Raises ``ConfigError`` for fewer than two numbers.
    """
    counts = sorted({each["devices"] for each in best})
    if len(counts) < 2:
        raise ConfigError(
            "a picture of one number of devices",
            allowed="two or more numbers of devices",
            remedy="give several, as in --devices 8..1024",
        )
    batch = "local_batch" if weak else "global_batch"
    in_order = sorted(best, key=lambda point: point["devices"])
    curves = grouped(in_order, lambda point: tuple(map(point.get, (*_CURVE, batch))))
    common: dict[str, Any] = {"x_ticks": _ticks(counts), "x_label": "devices", "log_x": True, "y_text": "{:.0%}".format}
    first = [_point_of(each, points) for each in next(iter(curves.values()))]
    efficiency = _curves(
        curves,
        lambda each: (each["scaling_efficiency"], *(each[end] / each["devices"] for end in _SPEEDUPS)),
        common,
        title="Scaling efficiency",
        subtitle="speedup over the number of devices; the band is the interval of the speedup",
        y_span=(0.0, 1.2),
    )
    of_training = [
        _curves(
            curves,
            functools.partial(_with_ends, name),
            common | {"y_text": amount},
            title=title,
            y_span=(0.0, 1.08 * max(each[f"{name}_high"] for each in best)),
            subtitle="of all samples; the band is its interval"
            if name != "tokens_per_s"
            else "the band is its interval",
        )
        for name, title in _OF_TRAINING.items()
        if name in best[0]
    ]
    shares = _shares(first, common, of_first=len(curves) > 1)
    return Chart(panels=[efficiency, shares, *of_training], height_in=4.4)


def _with_ends(name: str, point: Point) -> tuple[float, float, float]:
    return point[name], point[f"{name}_low"], point[f"{name}_high"]


_SPEEDUPS = ("speedup_low", "speedup_high")
_OF_TRAINING = {"hours": "Hours", "cost": "Cost", "tokens_per_s": "Tokens a second"}


def _curves(
    curves: Mapping[tuple[Any, ...], Sequence[Point]],
    of: Callable[[Point], tuple[float, float, float]],
    common: Mapping[str, Any],
    **panel: Any,
) -> Lines:
    """Return a panel with a line and its band for each curve, named by what they differ in.

    ``of`` gives the value of a point, and the ends of its interval.
    """
    differs = [len({name[place] for name in curves}) > 1 for place in range(len(_CURVE) + 1)]
    series = []
    for number, (name, of_curve) in enumerate(curves.items()):
        y, low, high = zip(*map(of, of_curve), strict=True)
        series.append(
            Series(
                name=", ".join(_words(part) for part, shown in zip(name, differs, strict=True) if shown) or "predicted",
                x=[each["devices"] for each in of_curve],
                y=y,
                low=low,
                high=high,
                look=number if len(curves) > 1 else "predicted",
            )
        )
    return Lines(series=series, names="legend" if len(curves) > 1 else "none", **panel, **common)


def _shares(points: Sequence[Point], common: Mapping[str, Any], *, of_first: bool) -> Lines:
    """Return the panel of the parts of a curve's steps; ``of_first``: there are other curves."""
    return Lines(
        title="Where the time of a step goes",
        subtitle="share of the predicted step" + " (of the first curve)" * of_first,
        series=[
            Series(
                name=name,
                x=[point["devices"] for point in points],
                y=[part(point) / point["predicted_step_s"] for point in points],
                look=number,
            )
            for number, (name, part) in enumerate(_PARTS.items())
            if any(part(point) > 0 for point in points)
        ],
        y_span=(0.0, 1.05),
        names="legend",
        **common,
    )


def _exposed_s(point: Point) -> float:
    return float(point["predicted_exposed_communication_s"])


def _waiting_s(point: Point) -> float:
    return float(point["waiting_for_slowest_s"] + point["waiting_for_input_s"])


_PARTS: dict[str, Callable[[Point], float]] = {
    "computation": lambda point: point["predicted_step_s"] - _exposed_s(point) - _waiting_s(point),
    "waiting for the slowest device and for input": _waiting_s,
    "exposed communication": _exposed_s,
}


def _point_of(best: Point, points: Sequence[Point]) -> Point:
    """Return the point that the best of a number of devices was taken from."""
    return next(point for point in points if all(point[key] == best[key] for key in best.keys() & point.keys()))


def _ticks(counts: Sequence[int]) -> dict[float, str]:
    return {float(count): f"{count:,}" for count in counts[:: -(-len(counts) // _MOST_TICKS)]}


def _words(part: Any) -> str:
    return f"batch {part:g}" if isinstance(part, (int, float)) else Path(str(part)).stem
