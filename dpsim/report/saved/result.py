"""``SavedResult``: what every kind of result offers as data. pandas and matplotlib are loaded when they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from dpsim.errors import ConfigError
from dpsim.records.columns import FRAMES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from dpsim.columns import AnyColumn


class SavedResult(ABC):
    """A result as tables and a figure. The columns of the tables are those of ``dpsim.records.columns``.

    ``docs/results.md`` explains every column.
    """

    kind: ClassVar[str]
    """The kind of result, as in ``dpsim.records.columns.FRAMES``."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What was run, in a line."""

    @abstractmethod
    def points(self) -> list[dict[str, Any]]:
        """Return the points as ``--json`` prints them."""

    @abstractmethod
    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the result's main figure on ``ax``, or on a new figure of pyplot, and return the axes."""

    def frame(self) -> pd.DataFrame:
        """Return a row for each point, with the columns of ``--json``."""
        from dpsim.report.frames import table

        return table(self.points(), self.columns("points"))

    @abstractmethod
    def samples(self) -> pd.DataFrame:
        """Return a row for each raw sample."""

    def timeline(self) -> pd.DataFrame:
        """Return a row for each event, measured and predicted. Raises ``ConfigError`` where no timeline is kept."""
        raise ConfigError(
            f"the result of {self.kind} has no timeline",
            allowed=f"its tables: {', '.join(self.tables)}",
            remedy="only a sweep keeps timelines: load the folder of a sweep",
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that this result has."""
        return tuple(FRAMES[self.kind])

    def columns(self, name: str) -> tuple[AnyColumn, ...]:
        """Return the columns of one of the tables."""
        return FRAMES[self.kind][name]

    def table(self, name: str) -> pd.DataFrame:
        """Return one of the tables by its name."""
        frames = {"points": self.frame, "samples": self.samples, "timeline": self.timeline}
        return frames[name]()

    def __repr__(self) -> str:
        calls = {"points": "frame()", "samples": "samples()", "timeline": "timeline()"}
        return f"{self.title}\n  {', '.join(f'.{calls[name]}' for name in self.tables)}, .plot()"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.title)}</p>{self.frame().to_html(max_rows=60)}"
