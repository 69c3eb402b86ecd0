"""Published sets are read as they stand; mistakes are refused with their line."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_files import EXPERIMENTS

from dpsim.errors import FileFormatError
from dpsim.validation.published import FOLDER, read_set, read_sets

EXAMPLE = EXPERIMENTS / "validation_example"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example set, to be changed."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "own"))


def changed(folder: Path, old: str, new: str, name: str = "example.csv") -> Path:
    path = folder / "sets" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return folder / "sets" / "example.toml"


def test_the_sets_of_the_package_hold_what_their_sources_published() -> None:
    sets = read_sets()
    assert len(sets) == 26 and all(each.provenance.licence_text.strip() for each in sets.values())
    (row,) = (row for row in sets["deepbench"].rows if row.line == 38)
    assert row.values == {
        "system": "M40",
        "devices": 4,
        "layout": "1x4",
        "size_bytes": 400000,
        "std_s": 3.319715e-06,
        "implementation": "NCCL 2.0 MPI",
    }
    assert row.outcome == 0.0001780733
    wfbp = sets["bcaffe_steps"].rows[1]
    assert (wfbp.values["method"], wfbp.values["devices"], wfbp.outcome) == ("WFBP", 2, 299.32)
    largest = max(sets["nccl_a100"].rows, key=lambda r: (r.values["devices"], r.values["size_bytes"]))
    assert largest.values == {"devices": 8, "layout": "1x8", "size_bytes": 2**30} and largest.outcome == 0.0081964


def test_a_set_without_a_cluster_is_refused_and_told_what_one_is(folder: Path) -> None:
    path = changed(folder, 'cluster = "example"\n', "", "example.toml")
    with pytest.raises(FileFormatError, match="names no cluster") as refused:
        read_set(path)
    assert "the machines that were measured" in str(refused.value.allowed)


def test_every_file_of_the_sets_is_in_the_wheel() -> None:
    import tomllib

    declared = tomllib.loads((EXPERIMENTS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in declared["dpsim.validation"] for path in FOLDER.glob(pattern)}
    data = {path for path in FOLDER.rglob("*.*") if path.suffix in (".toml", ".csv")}
    assert data == packaged


@pytest.mark.parametrize(
    ("old", "new", "place", "allowed"),
    [
        ("devices,layout", "layout,devices", "line 1: columns layout, devices", "devices, layout, size_bytes"),
        ("0.0001188", "-0.0001188", "line 3: time_s is -0.0001188", "above 0"),
        ("0.0001188", "fast", "line 3: time_s is 'fast'", "a number"),
        ("2,1x2,65536", "2.5,1x2,65536", "line 2: devices is 2.5", "a whole number"),
        ("2,1x2,65536,1.595e-05", "2,1x2,65536", "line 2: 3 cells", "4, one a column"),
    ],
)
def test_what_a_table_gets_wrong_is_refused_with_its_line(
    folder: Path, old: str, new: str, place: str, allowed: str
) -> None:
    with pytest.raises(FileFormatError) as refused:
        read_set(changed(folder, old, new))
    assert place in refused.value.given and allowed in refused.value.allowed


def test_an_outcome_that_is_no_time_is_refused(folder: Path) -> None:
    with pytest.raises(FileFormatError, match="outcome is 'size_bytes'"):
        read_set(changed(folder, 'outcome = "time_s"', 'outcome = "size_bytes"', "example.toml"))


@given(
    rows=st.lists(
        st.tuples(
            st.integers(2, 4096),
            st.integers(1, 2**50),
            st.floats(1e-9, 1e6, allow_subnormal=False),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_is_written_into_a_table_is_what_is_read(
    rows: list[tuple[int, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    shutil.copy(EXAMPLE / "sets" / "example.toml", folder / "example.toml")
    with (folder / "example.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["devices", "layout", "size_bytes", "time_s"])
        writer.writerows([devices, f"1x{devices}", size, repr(seconds)] for devices, size, seconds in rows)
    read = read_set(folder / "example.toml").rows
    assert [(r.values["devices"], r.values["size_bytes"], r.outcome) for r in read] == rows
    assert [r.line for r in read] == list(range(2, len(rows) + 2))


def test_doubts_name_rows_of_their_table() -> None:
    for published in read_sets().values():
        lines = {str(row.line) for row in published.rows}
        for doubt in published.provenance.doubts:
            assert lines >= set(re.findall(r"\d+", doubt.lines)) and doubt.kind and doubt.text
