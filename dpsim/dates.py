"""Moments as records carry them."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp() -> str:
    """The present time in UTC, to the millisecond, as records carry it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def day(moment: str) -> str:
    """``3 May``, of another year with it, of a moment as records carry it; today with its time of day."""
    then, now = (each.astimezone() for each in (datetime.fromisoformat(moment), datetime.now(UTC)))
    if then.date() == now.date():
        return f"{then:%H:%M} today"
    return f"{then.day} {then:%B}" + f" {then.year}" * (then.year != now.year)
