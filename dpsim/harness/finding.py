"""What one probe of ``doctor`` found."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dpsim.codec import Noun

State = Literal["ok", "warn", "fail"]


class Finding(Noun, frozen=True):
    """The result of one probe; ``found`` describes it, and ``remedy`` says what to do unless the state is ok."""

    name: str
    state: State
    found: str
    remedy: str = ""


class Result(NamedTuple):
    """The result of a probe without its name."""

    state: State
    text: str
    remedy: str = ""
