"""A profile has the times between the announcements of a replica; so every layer must announce itself."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.errors import ConfigError
from dpsim.replica import LayerSpec
from dpsim.runtime.recorder import StepMarks


def check_announcements(model: str, layers: Sequence[LayerSpec], names: Sequence[str], marks: StepMarks) -> None:
    """Check that every micro-batch of a step announced the forward and backward of every layer, in order.

    ``names`` are the names of the schedule's operations. Raises ``ConfigError``.
    """
    expected = [f"forward {layer.name}" for layer in layers] + [f"backward {layer.name}" for layer in reversed(layers)]
    computed = [names[operation] for operation, _ in marks.compute]
    announced = [name for name in computed if name.startswith(("forward ", "backward "))]
    if not announced or announced != expected * (len(announced) // len(expected)):
        raise ConfigError(
            f"model {model!r} announced {', '.join(announced) or 'no layer'} in a step",
            allowed=f"in this order: {', '.join(expected)}",
            remedy="call events.forward_done(layer) and events.backward_done(layer) for every layer: "
            "a profile has the times between these calls",
        )
