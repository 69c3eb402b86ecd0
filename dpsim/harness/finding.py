"""What one probe of ``doctor`` found."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """The result of one probe; ``found`` describes it, and ``remedy`` says what to do unless the state is ok."""

    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
    name: str = ""
