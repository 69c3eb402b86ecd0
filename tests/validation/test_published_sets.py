"""Published sets are read as they stand; mistakes are refused with their line; sealed outcomes stay sealed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_files import EXPERIMENTS

from dpsim.errors import FileFormatError
from dpsim.validation.audit import audit
from dpsim.validation.published import FOLDER, opened, read_set, read_sets, seal

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
    assert len(sets) == 13 and all(each.provenance.licence_text.strip() for each in sets.values())
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


def test_sealed_outcomes_are_unknown_until_their_salt_is_public() -> None:
    sets = read_sets(EXAMPLE)
    sealed = [row for row in sets["example"].rows if row.seal]
    assert [row.line for row in sealed] == [9, 10] and all(row.outcome is None for row in sealed)
    public = opened(sets, EXAMPLE / "outcomes.json")["example"]
    stated = json.loads((EXAMPLE / "outcomes.json").read_text())["outcomes"]
    assert {str(row.line): row.outcome for row in public.rows if row.seal} == {k: float(v) for k, v in stated.items()}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("salt", "0" * 32, "another seal"),
        ("outcomes", {"9": "0.0001"}, "another seal"),
        ("outcomes", {"8": "8.27e-05"}, "was not sealed"),
        ("dataset", "other", "outcomes of 'other'"),
        ("salt", "short", "a salt of 5 characters"),
    ],
)
def test_outcomes_that_do_not_fit_their_seals_are_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    raw = json.loads((EXAMPLE / "outcomes.json").read_text()) | {key: value}
    (tmp_path / "outcomes.json").write_text(json.dumps(raw))
    with pytest.raises(FileFormatError, match=said):
        opened(read_sets(EXAMPLE), tmp_path / "outcomes.json")


def test_a_seal_depends_on_all_that_it_seals() -> None:
    salt = "a" * 32
    seals = [seal(salt, "x", 2, "1.0"), seal("b" * 32, "x", 2, "1.0"), seal(salt, "y", 2, "1.0")]
    seals += [seal(salt, "x", 3, "1.0"), seal(salt, "x", 2, "1.00")]
    assert len(set(seals)) == len(seals)


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


@pytest.mark.parametrize(
    ("old", "new", "kind", "lines"),
    [
        ("4,1x4,1048576,0.0001872", "4,1x4,1048576,0.000035", "falls with size", "5 and 6"),
        ("4,1x4,16777216,0.002534", "4,1x4,16777216,0.0001872", "too fast", "7"),
        ("2,1x2,1048576,0.0001188", "2,1x2,1048576,0.00018722", "copied", "3 and 6, 4 and 7"),
    ],
)
def test_the_audit_names_the_rows_that_cannot_be(folder: Path, old: str, new: str, kind: str, lines: str) -> None:
    changed(folder, 'outcome = "time_s"', 'outcome = "time_s"\nfastest_link_bytes_per_s = 5e10', "example.toml")
    if kind == "copied":
        changed(folder, "4,1x4,1048576,0.0001872", "4,1x4,1048576,0.00018722")
        changed(folder, "2,1x2,16777216,0.001732", "2,1x2,16777216,0.0025341")
        changed(folder, "4,1x4,16777216,0.002534", "4,1x4,16777216,0.0025341")
    assert audit(read_sets(folder)) == []
    changed(folder, old, new)
    found = [(doubt.kind, doubt.lines) for doubt in audit(read_sets(folder))]
    assert found == [(kind, lines)]


def test_the_audit_finds_what_is_doubtful_in_the_published_tables() -> None:
    kinds = {(doubt.dataset, doubt.kind) for doubt in audit(read_sets())}
    assert ("bcaffe_steps", "copied") in kinds and ("deepbench", "falls with size") in kinds
    assert not {kind for dataset, kind in kinds if dataset == "nccl_a100"}
