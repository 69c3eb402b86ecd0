"""A column is declared once: its value, its data type and its sentence follow from the declaration."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from dpsim.columns import Column, Row, column, columns_of
from dpsim.errors import ConfigError


class Lap(Row):
    """A row with a source, a column that is given, and two that are computed."""

    length_m: float
    time_s = Column[Any, float]("s", "The time.")
    speed = Column[Any, float]("ratio", "The speed.", lambda lap: lap.length_m / lap.time_s)
    splits_s = Column[Any, dict[str, float]]("s", "Parts of the time.", lambda lap: {"half": lap.time_s / 2}, each=True)


def test_a_value_is_given_or_follows_from_others() -> None:
    lap = Lap(length_m=400.0, time_s=50.0)
    assert lap.values() == {"time_s": 50.0, "speed": 8.0, "splits_s": {"half": 25.0}}
    assert lap.speed == 8.0 and Lap(length_m=400.0, time_s=50.0, speed=9.0).values()["speed"] == 9.0


def test_what_is_computed_follows_a_value_that_is_replaced() -> None:
    lap = Lap(length_m=400.0, time_s=50.0)
    assert lap.speed == 8.0
    faster = lap.replaced(time_s=40.0)
    assert faster.speed == 10.0 and lap.speed == 8.0 and faster != lap
    assert faster.replaced(time_s=50.0) == lap and lap != lap.values()


def test_a_name_that_is_no_column_and_a_value_that_is_missing_are_refused() -> None:
    with pytest.raises(TypeError, match="Lap has no tiem_s"):
        Lap(length_m=400.0, tiem_s=50.0)
    with pytest.raises(AttributeError, match="the column time_s of Lap was not given"):
        assert Lap(length_m=400.0).speed


def test_name_and_data_type_follow_from_attribute_and_unit() -> None:
    assert [(each.name, each.dtype) for each in columns_of(Lap).values()] == [
        ("time_s", "float64"),
        ("speed", "float64"),
        ("splits_s.*", "float64"),
    ]
    assert [each.prefix for each in columns_of(Lap).values()] == ["", "", "splits_s."]


def test_a_field_of_a_struct_declares_a_column() -> None:
    class Heat(msgspec.Struct):
        lane: Annotated[int, Column("count", "The lane.")]
        note: str = ""

    (lane,) = columns_of(Heat).values()
    assert (lane.name, lane.dtype, lane.text) == ("lane", "int64", "The lane.")


def test_a_unit_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="column pace in 'min/km'"):
        column("pace", "min/km", "A text.")  # type: ignore[arg-type]
