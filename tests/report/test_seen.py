"""What a figure says there is to see in it follows from the numbers that it draws."""

from __future__ import annotations

from typing import Any

import pytest

from dpsim.report.charts import Bars, Cell, Chart, Dot, Lines, Look, Map, Mark, Panel, Rows, Series
from dpsim.report.seen import seen

TEXTS: dict[str, Any] = {"title": "here", "subtitle": "", "x_label": "devices"}
X = (1.0, 2.0, 4.0)


def said(*panels: Panel) -> str:
    return seen(Chart(panels=panels, height_in=3.0))


def lines(measured: tuple[float, ...], predicted: tuple[float, ...], **more: Any) -> Lines:
    looks: tuple[Look, Look] = ("measured", "predicted")
    series = [Series(name=look, x=X, y=y, look=look) for look, y in zip(looks, (measured, predicted), strict=True)]
    return Lines(series=series, **TEXTS, **more)


def rows(*values: float, log: bool = False, **look: Any) -> Rows:
    dots = [Dot(value=value, low=value * 0.9, high=value * 1.1, look="measured", **look) for value in values]
    return Rows(rows={f"row {i}": [dot] for i, dot in enumerate(dots)}, log=log, **TEXTS)


def test_where_scaling_stops_is_said() -> None:
    assert said(lines((1, 2, 3), (1, 2, 3))) == "Measured and predicted are highest at devices 4 (3)."
    assert (
        said(lines((1, 2, 1.5), (1, 2, 3)))
        == "Measured is highest at devices 2 (2), predicted is highest at devices 4 (3)."
    )


def test_points_that_were_held_out_of_a_fit_were_measured_too() -> None:
    held_out = Series(name="", x=(8.0,), y=(9.0,), look="held out")
    fitted = lines((1, 2, 3), (1, 2, 3))
    panel = Lines(series=[*fitted.series, held_out], **TEXTS)
    assert said(panel) == "Measured is highest at devices 8 (9), predicted is highest at devices 4 (3)."


def test_a_marked_point_is_the_best_even_where_it_is_the_lowest() -> None:
    marks = [Mark(text="", x=2.0, y=1.0, look="measured"), Mark(text="", x=4.0, y=1.0, look="predicted")]
    ticks = {1.0: "0", 2.0: "64\nKiB", 4.0: "inf"}
    panel = lines((3, 1, 2), (3, 2, 1), marks=marks, x_ticks=ticks)
    assert said(panel) == "Measured is best at devices 64 KiB, predicted is best at devices inf."


def test_the_distance_of_a_cloud_of_points_from_its_line_is_said() -> None:
    cloud = [Series(name="", x=(1.0, 2.0, 4.0), y=(1.1, 2.2, 4.4), look=0, dots=True)]
    assert said(Lines(series=cloud, **TEXTS)) == "Half of the 3 dots lie within 10.0% of the line."
    level = [Series(name="", x=(1.0, 4.0), y=(1.0, 1.0), look="ideal"), *cloud]
    assert said(Lines(series=level, **TEXTS)) == "Half of the 3 dots lie within 120% of the line."


def test_the_highest_of_many_lines_is_said() -> None:
    two = [Series(name=f"line {i}", x=X, y=(1.0, 2.0, 3.0 - i), look=i) for i in range(2)]
    assert said(Lines(series=two, **TEXTS)) == "At devices 4, the highest is line 0 (3)."


@pytest.mark.parametrize("panel", [Lines(series=[], **TEXTS), Rows(rows={}, **TEXTS), Bars(bars=[], **TEXTS)])
def test_an_empty_panel_says_that_it_is(panel: Panel) -> None:
    assert said(panel) == "Nothing was measured here."


def test_curves_that_only_fall_are_not_merely_highest_where_they_begin() -> None:
    assert (
        said(lines((1, 0.8, 0.5), (1, 0.8, 0.6)))
        == "Measured is highest at devices 1 (1) and lowest at devices 4 (0.5), "
        "predicted is highest at devices 1 (1) and lowest at devices 4 (0.6)."
    )
    assert said(lines((1, 1, 1), (1, 1, 1))) == "Measured and predicted are 1 everywhere."


def test_the_highest_row_is_named_as_a_row_even_if_its_name_is_none() -> None:
    assert said(rows(1000, 3000, 2000)) == 'Measured is highest in row "row 1" (3,000).'
    panel = Rows(rows={"none": [Dot(value=9, low=8, high=10, look="measured")]}, **TEXTS)
    assert said(panel) == 'Measured is highest in row "none" (9).'


def test_of_ratios_each_side_of_1_is_counted_and_how_many_bars_do_not_cross_it() -> None:
    sides = "1 of 3 dots lies left of 1, 1 with the whole bar; 2 of 3 dots lie right of 1, 1 with the whole bar"
    assert said(rows(1.5, 1.01, 0.4, log=True)) == f"{sides}; the furthest is row 2 (0.40)."
    assert said(rows(*[0.2] * 12, 0.95, log=True)).startswith("13 of 13 dots lie left of 1, 12 with the whole bar; ")
    assert said(rows(1.0, log=True)) == "Every dot lies at 1."
    assert "0 with the whole bar" in said(rows(1.5, log=True, faint=True))


def test_the_share_of_exposed_communication_is_said() -> None:
    def bars(*exposed: float) -> Bars:
        return Bars(
            bars=[(f"{i}", {"forward": 1.0, "exposed communication": s}, {}) for i, s in enumerate(exposed)], **TEXTS
        )

    assert (
        said(bars(1.0, 3.0))
        == "Exposed communication takes 75.0% of the measured step at devices 1 and 50.0% at devices 0."
    )
    assert said(bars(0.0, 0.0)) == "No setting leaves more than 1% of its step to exposed communication."


def test_the_best_cell_is_said() -> None:
    cells = {("1", "a"): Cell(share=0.5, text="10", below=""), ("2", "a"): Cell(share=1.0, text="20 ★", below="")}
    panel = Map(cells=cells, across=("1", "2"), down=("a",), y_label="norm", **TEXTS)
    assert said(panel) == "The best cell is devices 2, norm a (20)."


@pytest.mark.parametrize("count", [2, 4, 6])
def test_panels_are_named_and_what_is_left_out_is_counted(count: int) -> None:
    sentence = said(*[lines((1, 2, 3), (1, 2, 3))] * count)
    assert sentence.count("here: ") == min(count, 4)
    assert sentence.endswith(f"; {count - 4} more panels.") is (count > 4)
