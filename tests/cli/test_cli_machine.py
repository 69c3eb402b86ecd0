"""``dpsim machine``: files shown, compared and merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import benchmark_outputs as outputs
import pytest

from dpsim import machine as machines

Dpsim = Callable[..., tuple[int, str, str]]
POINTS = [(1024, 4.62), (65536, 50.43), (1048576, 631.29)]


@pytest.fixture
def files(tmp_path: Path, dpsim: Dpsim) -> list[Path]:
    """Machines of 2 and of 4 devices, and one of 2 that is twice as slow."""
    actual = []
    for name, devices, factor in (("two", 2, 1.0), ("four", 4, 1.0), ("slow", 2, 2.0)):
        log, path = tmp_path / f"{name}.txt", tmp_path / f"{name}.json"
        log.write_text(outputs.osu([(size, factor * us) for size, us in POINTS]))
        assert dpsim("calibrate", "--from", log, "--devices", str(devices), "--output", path)[0] == 0
        actual.append(path)
    return actual


def test_a_machine_is_shown_with_its_link_and_a_picture(files: list[Path], dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, _ = dpsim("machine", "show", files[0], "--plot", tmp_path / "m.svg")
    assert code == 0 and "fitted to mpi on 2" in out and "1 MiB" in out
    assert "time of one allreduce" in (tmp_path / "m.svg").read_text()
    code, _, err = dpsim("machine", "show", files[0], "--plot", tmp_path / "m.pdf")
    assert code == 2 and ".svg or .png" in err


def test_two_machines_are_compared_where_both_have_a_time(files: list[Path], dpsim: Dpsim) -> None:
    code, out, _ = dpsim("machine", "compare", files[0], files[2], "--json")
    assert code == 0
    assert [round(point["ratio"], 2) for point in json.loads(out)["points"]] == [2.0, 2.0, 2.0]
    code, _, err = dpsim("machine", "compare", files[0], files[1])
    assert code == 2 and "in common" in err


def test_several_machines_become_one_with_a_link_fitted_to_all(files: list[Path], dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    assert dpsim("machine", "merge", files[0], files[1], "--output", path)[0] == 0
    merged = machines.read(path)
    assert [table.devices for table in merged.allreduce] == [2, 4]
    assert merged.link is not None and merged.link.fitted_to == "mpi on 2, mpi on 4"
    code, _, err = dpsim("machine", "merge", files[0], files[2], "--output", path)
    assert code == 2 and "two allreduce tables of mpi, 2, float32" in err
    assert dpsim("machine", "merge", files[0], "--output", path)[0] == 2
