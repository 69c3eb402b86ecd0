"""Rows of measured steps: CSV, TOML and the command line say the same; a mistake is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpsim.errors import ConfigError, FileFormatError
from dpsim.fields import assigned
from dpsim.imports.steps import FIELDS, measured_steps, read_rows
from dpsim.machine import Link, Machine

MACHINE = Machine(name="m", link=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9))
CSV = "devices,local_batch,step_s,images_per_s,fusion_threshold_bytes\n1,32,20ms,,\n2x4,32,,9000,25MiB\n"
TOML = (
    "[[rows]]\ndevices = 1\nlocal_batch = 32\nstep_s = 0.02\n"
    '[[rows]]\ndevices = "2x4"\nlocal_batch = 32\nimages_per_s = 9000\nfusion_threshold_bytes = "25MiB"\n'
)


def test_a_csv_file_a_toml_file_and_the_command_line_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(CSV)
    (tmp_path / "rows.toml").write_text(TOML)
    typed = ["devices=1,local_batch=32,step_s=20ms", "devices=2x4,global_batch=256,images_per_s=9000"]
    flags = [
        ("--row", assigned([typed[0]], "--row", FIELDS)),
        ("--row", assigned([f"{typed[1]},fusion_threshold_bytes=25MiB"], "--row", FIELDS)),
    ]
    found = [measured_steps(read_rows(tmp_path / f"rows.{kind}"), MACHINE) for kind in ("csv", "toml")]
    assert found[0] == found[1] == measured_steps(flags, MACHINE)
    alone, several = found[0]
    assert alone.step_s == 0.02 and alone.plan.devices == 1 and alone.plan.overlap == "thread"
    assert several.step_s == pytest.approx(256 / 9000) and several.plan.layout == "2x4"
    assert several.plan.fusion_threshold_bytes == 25 * 2**20 and several.plan.algorithm == "ring"


def test_flags_hold_for_rows_that_say_nothing_else() -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("a", {"devices": 2, "local_batch": 4, "step_s": 1.0}),
        ("b", {"devices": 2, "local_batch": 4, "step_s": 1.0, "overlap": "thread", "accumulate": "2"}),
    ]
    first, second = measured_steps(rows, MACHINE, overlap="off", accumulate=3)
    assert (first.plan.overlap, first.plan.global_batch) == ("off", 24)
    assert (second.plan.overlap, second.plan.global_batch) == ("thread", 16)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("devices=2,local_batch=4", "step_s or images_per_s"),
        ("devices=2,step_s=1s", "local_batch or global_batch"),
        ("devices=2,local_batch=4,global_batch=8,step_s=1s", "local_batch or global_batch"),
        ("devices=2,local_batch=4,step_s=1s,images_per_s=8", "step_s or images_per_s"),
        ("devices=2,local_batch=4,step_s=1parsec", "parsec"),
        ("devices=2,local_batch=four,step_s=1s", "row 7: "),
        ("devices=2,local_batch=4,step_s=0", "step_s is 0"),
        ("devices=2,local_batch=4,step_s=1 2", "step_s is 1 2"),
        ("devices=2,local_batch=4.5,step_s=1s", "local_batch is 4.5"),
        ("devices=2,local_batch=0,step_s=1s", "local_batch is 0"),
        ("devices=2,local_batch=4", "a row with devices, local_batch\n"),
        ("devices=2,local_batch=4,images_per_s=inf", "images_per_s is inf"),
        ("devices=two,local_batch=4,step_s=1s", "'two'"),
        ("devices=2,local_batch=4,step_s=1s,overlap=always", "overlap|always"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(row: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        measured_steps([("row 7", assigned([row], "--row", FIELDS))], MACHINE)
    assert str(refused.value).startswith("row 7: ")


@pytest.mark.parametrize("text", ["devices", "devices=", "devices=1,devices=2", "=3", ""])
def test_what_is_no_row_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="fields, each once"):
        assigned([text], "--row", FIELDS)


def test_an_unknown_field_of_a_row_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown field in --row 'overlp'(?s:.)*did you mean 'overlap'"):
        assigned(["devices=2,overlp=off"], "--row", FIELDS)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.csv", "devices,step_s\n1\n", "line 2: not as many values"),
        ("rows.csv", "devices,step_s\n", "no rows"),
        ("rows.csv", "devices,devices,step_s\n1,2,3\n", "line 1: columns twice: devices"),
        ("rows.toml", "[[row]]\ndevices = 1\n", r"allowed: \[\[rows\]\] with devices"),
        ("rows.toml", "rows = 3\n", "no list of tables"),
        ("rows.toml", "rows = [", "rows.toml"),
        ("rows.csv", "\udcff", "rows.csv"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FileFormatError, match=words):
        read_rows(path)
    with pytest.raises(FileFormatError):
        read_rows(tmp_path / "missing.csv")
