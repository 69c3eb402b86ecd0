"""``Collective``: a collective but for its size, which is what its cost is asked for; and the ``Layout`` of devices."""

from __future__ import annotations

import re
from typing import Literal, Self

from dpsim.codec import Noun
from dpsim.errors import ConfigError

CollectiveKind = Literal["allreduce", "reduce-scatter", "all-gather", "broadcast", "ordered-sum", "send", "copy"]
"""What a collective brings about: every rank has the sum; rank r has shard r of the sum; every rank has all shards.

An ``ordered-sum`` is an allreduce of few numbers for which computation stops, such as those of global batch norm: every
rank sends its numbers to every other, and all add them in one order (``dpsim.comm.ordered_sum``).

A ``broadcast`` gives every rank what one of them has.

A ``send`` is one message from a device to another, from the moment it is posted until it has arrived: always on 2
``devices``, whose ``layout`` says whether they are in one node (``1x2``) or in two (``2x1``).

A ``copy`` sends nothing: every device copies an array inside its memory, as it does with the shard that it keeps.
"""


Level = Literal["inside", "across", "unknown"]
_SMALLEST_BYTES, _FACTOR = 1024, 4
_NUMBER = re.compile(r"0*([1-9][0-9]{0,8})", re.ASCII)
_LAYOUT = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


class Layout(str):
    """``2x4``: 2 ``nodes`` with 4 devices ``of_a_node`` each, rank r on node r // 4; or flat, the empty text.

    Of the nodes of flat devices nothing is known: each device is a node of its own. A layout is the text that files and
    flags spell it as, which is parsed where it is made. Raises ``ConfigError``.
    """

    nodes: int
    of_a_node: int

    def __new__(cls, text: str = "") -> Self:
        match = _LAYOUT.fullmatch(text)
        if text and match is None:
            raise ConfigError(f"layout is {text!r}", allowed="nodes x devices of a node like 2x4, or nothing: flat")
        layout = super().__new__(cls, text)
        layout.nodes, layout.of_a_node = map(int, match.groups()) if match else (1, 1)
        return layout

    @classmethod
    def of(cls, nodes: int, of_a_node: int) -> Self:
        """Return the layout of so many nodes."""
        return cls(f"{nodes}x{of_a_node}")

    def counts(self, devices: int) -> tuple[int, int]:
        """(nodes, devices of a node): (2, 4) of ``2x4``, (``devices``, 1) of a flat layout."""
        return (self.nodes, self.of_a_node) if self else (devices, 1)

    def level(self, *, emulated_network: bool, cores: int) -> Level:
        """Say whether devices are inside one node or across several.

        Flat devices have a link each where the network is emulated, are in one node where dpsim measured them
        (``cores`` is known), and may be either in tables of other benchmarks.
        """
        if self:
            return "inside" if self.nodes == 1 else "across"
        return "across" if emulated_network else "inside" if cores else "unknown"

    def group(self, devices: int) -> Layout:
        """Return the layout of ``devices`` neighbours; the layout itself where these are all of it."""
        if not self or self.nodes * self.of_a_node == devices:
            return self
        each = min(devices, self.of_a_node)
        return Layout.of(devices // each, each)

    def spread(self, apart: int) -> Layout:
        """Return the layout of devices that stand so far ``apart``: of every second of ``2x4`` it is ``2x2``."""
        if not self or apart == 1:
            return self
        each, left = divmod(self.of_a_node, apart)
        return Layout.of(self.nodes * self.of_a_node // apart, 1) if left else Layout.of(self.nodes, each)

    def neighbours(self, devices: int) -> dict[Layout, int]:
        """Return the layouts that two of the devices can have, each with a rank that has it with rank 0.

        ``{"": 1}`` of a flat layout; of ``2x4``, where ranks 0 and 1 are in one node and ranks 0 and 4 in two,
        ``{"1x2": 1, "2x1": 4}``.
        """
        if not self:
            return {FLAT: 1} if devices > 1 else {}
        inside = {Layout.of(1, 2): 1} if self.of_a_node > 1 else {}
        return inside | ({Layout.of(2, 1): self.of_a_node} if self.nodes > 1 else {})


FLAT = Layout()


def parse_devices(token: int | str) -> tuple[int, Layout]:
    """(devices, layout) of ``8``, which is flat, or of ``2x4``, which is (8, ``2x4``). Raises ``ConfigError``."""
    text = str(token)
    if _NUMBER.fullmatch(text):
        return int(text), FLAT
    if not _LAYOUT.fullmatch(text):
        raise ConfigError(
            f"devices is {text!r}", allowed="a whole number of 1 or more, or nodes x devices of a node like 2x4"
        )
    layout = Layout(text)
    return layout.nodes * layout.of_a_node, layout


def checked_layout(text: str, devices: int) -> Layout:
    """Return the layout of a text. Raises ``ConfigError`` for one whose product is not ``devices``."""
    nodes, of_a_node = (layout := Layout(text)).counts(devices)
    if nodes * of_a_node != devices:
        raise ConfigError(
            f"layout {text} is {nodes * of_a_node} devices, and devices is {devices}",
            allowed="a layout whose product is the number of devices",
        )
    return layout


class Collective(Noun, frozen=True):
    """A collective by ``algorithm`` on ``devices`` in ``layout`` that sends ``wire_dtype``."""

    algorithm: str
    devices: int
    layout: Layout = FLAT
    wire_dtype: str = "float32"
    kind: CollectiveKind = "allreduce"

    @property
    def counts(self) -> tuple[int, int]:
        """(nodes, devices of a node); each flat device is a node."""
        return self.layout.counts(self.devices)


def size_ladder(max_bytes: int) -> list[int]:
    """Return 4 B, then 1 KiB and up by a factor of 4, ending at ``max_bytes`` (rounded down to a multiple of 4)."""
    points = [4]
    size = _SMALLEST_BYTES
    while size < max_bytes:
        points.append(size)
        size *= _FACTOR
    largest = max_bytes // 4 * 4
    return points if largest == points[-1] else [*points, largest]
