"""Writes the what-if page: the world, the engine and the charts in one HTML file that needs no server and no network."""

from __future__ import annotations

from importlib import resources

ENGINE = ("fusion", "lowering", "algorithms", "costs", "uncertainty", "prices", "walk", "predict")


def engine() -> str:
    """Return the engine: plain JavaScript whose ``predict(world, setting)`` is ``dpsim.predict`` of that setting."""
    folder = resources.files("dpsim.explore") / "engine"
    return "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in ENGINE)
