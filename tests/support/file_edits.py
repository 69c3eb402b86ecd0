"""Random damage to the bytes of a file, for tests of readers."""

from __future__ import annotations

from hypothesis import strategies as st

Edit = tuple[str, float, bytes]
HOW = st.sampled_from(["cut", "overwrite", "insert", "delete"])
EDITS = st.lists(st.tuples(HOW, st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


def edited(data: bytes, edits: list[Edit], head: int) -> bytes:
    """``data`` with some bytes changed; half of the places lie in its first ``head`` bytes, where its meaning is."""
    for how, place, new in edits:
        inside = head if place < 0.5 else len(data)
        at = int(2 * (place % 0.5) * inside)
        if how == "cut":
            data = data[:at]
        elif how == "overwrite":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        else:
            data = data[:at] + data[at + len(new) :]
    return data
