"""Whatever happens to a benchmark's output: an error of dpsim's own, or a machine without a number of its invention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmark_outputs as outputs
import pytest
from file_edits import EDITS, Edit, edited
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpsim.errors import DpsimError, FileFormatError
from dpsim.imports import ImportConfig, import_machine
from dpsim.machine import Machine

Points = list[tuple[int, float]]
POINTS = [(2**20 * 2**step, round(31.07 * 1.93**step, 2)) for step in range(8)]
IN_PLACE = [(size, round(us * 0.93, 2)) for size, us in POINTS]
HOSTS = ["alpha"] * 4 + ["beta"] * 4
TEXTS: dict[str, str] = {
    "nccl": outputs.nccl(POINTS, IN_PLACE, 8, lines_of_ranks=outputs.ranks(HOSTS)),
    "json": outputs.nccl_json(POINTS, IN_PLACE, ["alpha", "beta"], 4),
    "osu": outputs.osu(IN_PLACE),
    "osu -f": outputs.osu(IN_PLACE, full=True, datatype="MPI_FLOAT"),
    "imb": outputs.imb({2: IN_PLACE, 8: IN_PLACE}),
}
KINDS = st.sampled_from(sorted(TEXTS))
LETTERS = st.text(st.sampled_from("#[]()-+,;:xé*e\x00\ufeff"), min_size=1, max_size=3)
SPACES = st.text(st.sampled_from(" \t\n\r\x0b\u2028"), min_size=1, max_size=3)


def read(folder: Path, data: bytes, **given: Any) -> Machine | DpsimError:
    path = folder / "damaged.txt"
    path.write_bytes(data)
    try:
        return import_machine(ImportConfig(files=(str(path),), **given))[0]
    except DpsimError as error:
        assert error.given
        return error


def check(kind: str, actual: Machine | DpsimError, tolerance: float = 0.0) -> None:
    """An error that says where, or tables of which every point stands in the original."""
    if isinstance(actual, DpsimError):
        assert kind == "json" or not isinstance(actual, FileFormatError) or ", line " in actual.given
        return
    original = dict(IN_PLACE)
    for cost in actual.allreduce:
        for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True):
            assert abs(time_s * 1e6 / original[size] - 1) <= max(tolerance, 1e-9), (kind, size, time_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


def given_for(kind: str) -> dict[str, Any]:
    return {"devices": (8,)} if kind.startswith("osu") else {}


@pytest.mark.parametrize("kind", sorted(TEXTS))
def test_a_file_that_was_cut_off_anywhere_gives_no_wrong_number(kind: str, folder: Path) -> None:
    data = TEXTS[kind].encode()
    refused = 0
    for end in [*range(0, len(data), 23), *range(len(data) - 150, len(data))]:
        actual = read(folder, data[:end], **given_for(kind))
        check(kind, actual)
        refused += isinstance(actual, DpsimError)
    assert refused > 30


@given(kind=KINDS, place=st.floats(0, 1, exclude_max=True), length=st.integers(1, 12))
@settings(max_examples=300)
def test_characters_that_are_lost_give_no_wrong_number(kind: str, place: float, length: int, folder: Path) -> None:
    data = TEXTS[kind].encode()
    at = int(place * len(data))
    check(kind, read(folder, data[:at] + data[at + length :], **given_for(kind)), tolerance=0.001)


@given(kind=KINDS, place=st.floats(0, 1, exclude_max=True), over=LETTERS, between=SPACES)
@settings(max_examples=300)
def test_characters_that_are_no_digits_give_no_wrong_number(
    kind: str, place: float, over: str, between: str, folder: Path
) -> None:
    data = TEXTS[kind].encode()
    at = int(place * len(data))
    actual = read(folder, data[:at] + over.encode() + data[at + len(over.encode()) :], **given_for(kind))
    check(kind, actual, tolerance=0.001)
    check(kind, read(folder, data[:at] + between.encode() + data[at:], **given_for(kind)), tolerance=0.001)


@given(kind=st.sampled_from(["nccl", "json"]), place=st.floats(0, 1, exclude_max=True), digits=st.integers(0, 999))
@settings(max_examples=300)
def test_digits_that_changed_are_noticed_where_a_file_says_a_time_twice(
    kind: str, place: float, digits: int, folder: Path
) -> None:
    data, new = TEXTS[kind].encode(), str(digits).encode()
    at = int(place * len(data))
    check(kind, read(folder, data[:at] + new + data[at + len(new) :]), tolerance=0.001)


@given(kind=KINDS, first=st.integers(0, 60), second=st.integers(0, 60), how=st.sampled_from(["drop", "again", "swap"]))
@settings(max_examples=200)
def test_lines_that_are_lost_doubled_or_exchanged_give_no_wrong_number(
    kind: str, first: int, second: int, how: str, folder: Path
) -> None:
    lines = TEXTS[kind].split("\n")
    first, second = first % len(lines), second % len(lines)
    if how == "drop":
        del lines[first]
    elif how == "again":
        lines.insert(second, lines[first])
    else:
        lines[first], lines[second] = lines[second], lines[first]
    check(kind, read(folder, "\n".join(lines).encode(), **given_for(kind)))


@given(kind=KINDS, edits=EDITS, format=st.sampled_from([None, "nccl-tests", "osu", "imb"]))
@settings(max_examples=400)
@example(kind="nccl", edits=[], format="osu")
def test_damage_anywhere_gives_an_error_of_ours_or_a_machine(
    kind: str, edits: list[Edit], format: Any, folder: Path
) -> None:
    read(folder, edited(TEXTS[kind].encode(), edits, 400), format=format, devices=(8,))


@given(data=st.binary(max_size=200), format=st.sampled_from([None, "nccl-tests", "osu", "imb"]))
@settings(max_examples=100)
def test_any_bytes_at_all_are_answered(data: bytes, format: Any, folder: Path) -> None:
    assert isinstance(read(folder, data, format=format, devices=(2,)), DpsimError)
