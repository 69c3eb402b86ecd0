"""``Collective``: a collective but for its size, which is what its cost is asked for; and the layout of its devices.

A layout is ``8`` devices about whose nodes nothing is known, or ``2x4``: 2 nodes of 4 devices each. Rank r is on node
r // 4 of ``2x4``. In a flat layout (``8``, stored as the empty text) every device is its own node.
"""

from __future__ import annotations

import re
from typing import Literal

from dpsim.codec import Noun
from dpsim.errors import ConfigError

CollectiveKind = Literal["allreduce", "reduce-scatter", "all-gather", "ordered-sum", "send", "copy"]
"""What a collective brings about: every rank has the sum; rank r has shard r of the sum; every rank has all shards.

An ``ordered-sum`` is an allreduce of few numbers for which computation stops, such as those of global batch norm: every
rank sends its numbers to every other, and all add them in one order (``dpsim.comm.ordered_sum``).

A ``send`` is one message from a device to another, from the moment it is posted until it has arrived: always on 2
``devices``, whose ``layout`` says whether they are in one node (``1x2``) or in two (``2x1``).

A ``copy`` sends nothing: every device copies an array inside its memory, as it does with the shard that it keeps.
"""


class Collective(Noun, frozen=True):
    """A collective by ``algorithm`` on ``devices`` in ``layout`` (``2x4``; empty: flat) that sends ``wire_dtype``."""

    algorithm: str
    devices: int
    layout: str = ""
    wire_dtype: str = "float32"
    kind: CollectiveKind = "allreduce"


_NUMBER = re.compile(r"0*([1-9][0-9]{0,8})", re.ASCII)
_LAYOUT = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


def parse_devices(token: int | str) -> tuple[int, str]:
    """(devices, layout) of ``8``, which is (8, ""), or of ``2x4``, which is (8, "2x4"). Raises ``ConfigError``."""
    text = str(token)
    if _NUMBER.fullmatch(text):
        return int(text), ""
    if not _LAYOUT.fullmatch(text):
        raise ConfigError(
            f"devices is {text!r}", allowed="a whole number of 1 or more, or nodes x devices of a node like 2x4"
        )
    nodes, of_a_node = node_counts(text, 1)
    return nodes * of_a_node, text


def node_counts(layout: str, devices: int) -> tuple[int, int]:
    """(nodes, devices of a node) of ``2x4``: (2, 4); of a flat layout: (``devices``, 1). Raises ``ConfigError``."""
    if not layout:
        return devices, 1
    match = _LAYOUT.fullmatch(layout)
    if match is None:
        raise ConfigError(f"layout is {layout!r}", allowed="nodes x devices of a node like 2x4, or nothing: flat")
    return int(match.group(1)), int(match.group(2))


Level = Literal["inside", "across", "unknown"]


def level(layout: str, *, emulated_network: bool, cores: int) -> Level:
    """Say whether devices in a layout are inside one node or across several.

    Flat devices have a link each where the network is emulated, are in one node where dpsim measured them (``cores`` is
    known), and may be either in tables of other benchmarks.
    """
    if layout:
        return "inside" if node_counts(layout, 1)[0] == 1 else "across"
    return "across" if emulated_network else "inside" if cores else "unknown"


def check_layout(layout: str, devices: int) -> None:
    """Refuse a layout whose product is not ``devices``."""
    nodes, of_a_node = node_counts(layout, devices)
    if nodes * of_a_node != devices:
        raise ConfigError(
            f"layout {layout} is {nodes * of_a_node} devices, and devices is {devices}",
            allowed="a layout whose product is the number of devices",
        )


def group_layout(layout: str, devices: int) -> str:
    """Return the layout of ``devices`` neighbours of a layout; the layout itself where these are all of it."""
    nodes, of_a_node = node_counts(layout, devices)
    if not layout or nodes * of_a_node == devices:
        return layout
    return f"1x{devices}" if devices <= of_a_node else f"{devices // of_a_node}x{of_a_node}"


def spread_layout(layout: str, apart: int) -> str:
    """Return the layout of devices that stand so far ``apart`` in a layout: every second of ``2x4``: ``2x2``."""
    if not layout or apart == 1:
        return layout
    nodes, of_a_node = node_counts(layout, 1)
    return f"{nodes}x{of_a_node // apart}" if of_a_node % apart == 0 else f"{nodes * of_a_node // apart}x1"


def neighbours(layout: str, devices: int) -> dict[str, int]:
    """Return the layouts that two devices of a layout can have, each with a rank that has it with rank 0.

    ``{"": 1}`` in a flat layout; in ``2x4`` ranks 0 and 1 are in one node and ranks 0 and 4 in two: ``{"1x2": 1,
    "2x1": 4}``.
    """
    if not layout:
        return {"": 1} if devices > 1 else {}
    nodes, of_a_node = node_counts(layout, devices)
    inside, across = {"1x2": 1} if of_a_node > 1 else {}, {"2x1": of_a_node} if nodes > 1 else {}
    return inside | across
