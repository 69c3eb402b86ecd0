"""Logs as people have them: of each file in ``logs/``, what ``truth.toml`` says is read, or it is refused so."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import benchmark_outputs as outputs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.errors import DpsimError
from dpsim.imports import ImportConfig, import_machine

LOGS = Path(__file__).parent / "logs"
TRUTH: dict[str, dict[str, Any]] = tomllib.loads((LOGS / "truth.toml").read_text())


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_a_log_is_read_as_its_truth_says_or_refused_in_its_words(name: str) -> None:
    truth = TRUTH[name]
    devices = (truth["given"],) if "given" in truth else ()
    config = ImportConfig(files=(str(LOGS / f"{name}.txt"),), devices=devices)
    if "refused" in truth:
        with pytest.raises(DpsimError) as refused:
            import_machine(config)
        assert [word for word in truth["refused"] if word not in str(refused.value)] == [], refused.value
        return
    (table,) = import_machine(config)[1]
    cost = table.cost
    assert (cost.devices, cost.kind) == (truth["devices"], truth["kind"])
    assert cost.layout == truth.get("layout", cost.layout)
    rows = [(size, round(time_s * 1e6, 3)) for size, time_s in zip(cost.sizes_bytes, cost.time_s, strict=True)]
    assert rows == [tuple(row) for row in truth["rows"]]
    assert truth.get("note", "") in " ".join([*table.notes, *table.doubts])


def test_every_log_has_its_truth() -> None:
    assert {path.stem for path in LOGS.glob("*.txt")} == set(TRUTH) and len(TRUTH) >= 60


POINTS = [(2**14 * 4**step, round(21.37 * 2.3**step, 2)) for step in range(6)]
IN_PLACE = [(size, round(us * 0.93, 2)) for size, us in POINTS]
HOSTS = ["ada"] * 4 + ["bob"] * 4
VALID: dict[str, tuple[str, list[tuple[int, float]], str]] = {
    "nccl": (outputs.nccl(POINTS, IN_PLACE, 8, lines_of_ranks=outputs.ranks(HOSTS)), IN_PLACE, "allreduce"),
    "spread": (outputs.nccl(POINTS, IN_PLACE, 8, each=True, stamp=True), IN_PLACE, "allreduce"),
    "old": (
        outputs.nccl(POINTS, IN_PLACE, 8, root=False, checked="error", wrong="2e-07", program_line="#"),
        IN_PLACE,
        "allreduce",
    ),
    "gather": (
        outputs.nccl(POINTS, IN_PLACE, 8, program="all_gather_perf", redop="none", program_line="#"),
        IN_PLACE,
        "all-gather",
    ),
    "osu": (outputs.osu(POINTS, full=True), POINTS, "allreduce"),
    "imb": (outputs.imb({8: POINTS}), POINTS, "allreduce"),
}
NOISE = (
    "",
    "...",
    "[snip]",
    "# a comment of 3 words",
    "ada:12:34 [0] NCCL INFO Channel 00/02 : 0 1 2 3 4 5 6 7",
    "[ada:00017] 3 more processes have sent help message help-mpi-btl.txt",
    "real    0m9.481s",
    "#  Rank  7 Group  0 Pid   1007 on        bob device  7 [0000:01:00] NVIDIA H100",
    "# Collective test starting: all_reduce_perf",
    "1048576",
    "1048576 262144",
    "65536  16384  float  sum  -1  12.00",
)
TAGS = ("", "0: ", "[1,0]<stdout>:", "2031-05-04T10:11:12.5Z ", "[10:11:12] ", "pod-3 | ", "(worker pid=7) ", "> ")
PLACES = st.floats(0, 1, exclude_max=True)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), PLACES, st.sampled_from(NOISE)),
        st.tuples(st.just("drop"), PLACES, st.integers(1, 12)),
        st.tuples(st.just("begin"), PLACES, st.none()),
        st.tuples(st.just("end"), PLACES, st.none()),
        st.tuples(st.just("wrap"), PLACES, st.integers(20, 150)),
    ),
    max_size=3,
)


def changed(text: str, changes: list[tuple[str, float, Any]]) -> list[str]:
    """Return the lines of a log of which lines were inserted, dropped or wrapped, and its begin or end cut off."""
    for how, place, what in changes:
        lines = text.split("\n")
        line, character = int(place * len(lines)), int(place * len(text))
        if how == "insert":
            lines.insert(line, what)
        elif how == "drop":
            del lines[line : line + what]
        elif how == "wrap":
            lines[line : line + 1] = [lines[line][:what], lines[line][what:]]
        text = text[character:] if how == "begin" else text[:character] if how == "end" else "\n".join(lines)
    return text.split("\n")


@given(kind=st.sampled_from(sorted(VALID)), changes=CHANGES, tag=st.sampled_from(TAGS), told=st.booleans())
@settings(max_examples=500)
def test_rows_that_remain_whole_are_read_or_the_log_is_refused(
    kind: str, changes: list[tuple[str, float, Any]], tag: str, told: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text, points, collective = VALID[kind]
    lines = changed(text, changes)
    path = tmp_path_factory.getbasetemp() / "changed.txt"
    path.write_text("".join(f"{tag}{line}\n" for line in lines))
    row_of = {line.split()[0]: line.strip() for line in text.split("\n") if line.split()[:1] != []}
    remaining = {line.strip() for line in lines}
    expected = [point for point in points if row_of[str(point[0])] in remaining]
    try:
        tables = import_machine(ImportConfig(files=(str(path),), devices=(8,) * told, keep_outliers=True))[1]
    except DpsimError as error:
        assert error.given and (changes or not (told or kind in ("nccl", "imb"))), error
        return
    actual = [
        (size, round(time_s * 1e6, 3))
        for table in tables
        for size, time_s in zip(table.cost.sizes_bytes, table.cost.time_s, strict=True)
    ]
    assert actual == expected
    assert {(table.cost.devices, table.cost.kind) for table in tables} == {(8, collective)}
