"""Flags of ``dpsim predict`` for what files leave open: a refusal names the flag, and what says it already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from published_files import EXPERIMENTS

Dpsim = Callable[..., tuple[int, str, str]]
MACHINES = EXPERIMENTS / "machines"


def predicted(dpsim: Dpsim, folder: Path, flags: str, of_machine: str = "", of_workload: str = "") -> tuple[int, str]:
    """Exit code and errors of a prediction whose files state a little more than the published ones."""
    files = []
    for name, more in (("googlenet_k80", of_workload), ("k80_10gbe", of_machine)):
        files.append(folder / f"{name}.toml")
        first, rest = (MACHINES / files[-1].name).read_text().split("\n", 1)
        files[-1].write_text(f"{first}\n{more}\n{rest}")
    workload, machine = files
    code, _, said = dpsim(
        *f"predict --workload {workload} --machine {machine} --devices 2 --local-batch 64".split(), *flags.split()
    )
    return code, said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *(
            (f"--assume compute_slowdown={bad}", "a finite number of 1 or more")
            for bad in ("0.5", "0", "-1", "nan", "inf")
        ),
        *((f"--assume contention={bad}", "a finite number of 1 or more") for bad in ("0.5", "-1", "nan", "inf")),
        *(
            (f"--assume fixed_share={bad}", "to 1 (the same at every local batch)")
            for bad in ("-0.1", "2", "nan", "inf")
        ),
        *(
            (f"--assume collective_overhead_s={bad}", "write it like 50us")
            for bad in ("20", "-1us", "nan", "inf", "word")
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_flag(dpsim: Dpsim, tmp_path: Path, flags: str, said: str) -> None:
    code, error = predicted(dpsim, tmp_path, flags)
    assert code == 2
    assert error.startswith(f"dpsim: {flags}") and said in error


@pytest.mark.parametrize(
    ("flags", "of_machine", "of_workload", "said"),
    [
        ("--assume compute_slowdown=1.1", "compute_slowdown = [{devices = 2, factor = 1.2}]", "", "compute_slowdown"),
        ("--assume compute_slowdown=1.1", "", "step_spread = [0.9, 1.1]", "step_spread of the workload"),
        ("--assume fixed_share=0.1", "fixed_share = 0.0", "", "fixed_share of the machine"),
        ("--assume contention=1.5", "contention = 1.0", "", "contention of the machine"),
        (
            "--assume collective_overhead_s=20us",
            "collective_overhead_s = 1e-5",
            "",
            "collective_overhead_s of the machine",
        ),
    ],
)
def test_what_a_file_says_already_is_named(
    dpsim: Dpsim, tmp_path: Path, flags: str, of_machine: str, of_workload: str, said: str
) -> None:
    code, error = predicted(dpsim, tmp_path, flags, of_machine, of_workload)
    assert code == 2
    assert f"dpsim: {flags}: " in error and "stated already, by" in error and said in error
    assert predicted(dpsim, tmp_path, flags)[0] == 0


def test_accumulation_takes_a_list_and_a_million_micro_batches_are_refused_by_name(dpsim: Dpsim) -> None:
    asked = f"predict --workload {MACHINES / 'googlenet_k80.toml'} --machine 10gbe --devices 4 --local-batch 16".split()
    code, text, _ = dpsim(*asked, "--set", "accumulate=1,4", "--json")
    points = json.loads(text)["points"]
    assert code == 0 and [(each["accumulate"], each["global_batch"]) for each in points] == [(1, 64), (4, 256)]
    assert "micro-batches" in dpsim(*asked, "--set", "accumulate=1,4")[1].splitlines()[2]
    code, _, said = dpsim(*asked, "--set", "accumulate=1000000")
    assert code == 2 and "1000000 micro-batches of" in said and "allowed" in said


def test_settings_with_the_same_bits_have_one_letter(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    grid = ["--devices", "2,4", "--algorithm", "ring,direct", "--fusion-threshold", "0,inf", "--local-batch", "16"]
    files = ["--workload", MACHINES / "googlenet_k80.toml", "--machine", MACHINES / "k80_10gbe.toml"]
    _, out, _ = dpsim("predict", *files, *grid, "--json")
    points = json.loads(out)["points"]
    assert [point["bits"] for point in points] == [*"AABCAADD"]
    _, out, _ = dpsim("predict", *files, *grid)
    assert "overlap  bits" in out
    _, out, _ = dpsim("predict", *files, "--devices", "2", *grid[2:])
    assert "bits" not in out.splitlines()[2], "a column of equal letters"
