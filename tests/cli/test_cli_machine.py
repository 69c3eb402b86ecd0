"""``dpsim calibrate`` of machine files: shown, compared and merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import benchmark_outputs as outputs
import msgspec
import pytest

from dpsim import codec
from dpsim import machine as machines

Dpsim = Callable[..., tuple[int, str, str]]
POINTS = [(1024, 4.62), (65536, 50.43), (1048576, 631.29)]


def listed(*files: Path) -> str:
    return ",".join(map(str, files))


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
    code, out, _ = dpsim("calibrate", "--show", files[0], "--plot", tmp_path / "m.svg")
    assert code == 0 and "fitted to mpi on 2" in out and "1 MiB" in out
    assert "time of one allreduce" in (tmp_path / "m.svg").read_text()
    code, _, err = dpsim("calibrate", "--show", files[0], "--plot", tmp_path / "m.pdf")
    assert code == 2 and ".png, .svg" in err


def test_calibrate_prints_a_line_a_table_and_show_every_time(dpsim: Dpsim, tmp_path: Path) -> None:
    (log := tmp_path / "four.txt").write_text(outputs.osu(POINTS))
    asked = ("calibrate", "--from", log, "--devices", "4", "--output", tmp_path / "m.json")
    code, out, _ = dpsim(*asked)
    bus = 1.5 * 1048576 / 631.29e-6 / 1e9
    line = f"mpi on 4 devices: 1 KiB in 4.62 us, bus bandwidth up to {bus:.3g} GB/s ({8 * bus:.4g} Gbit/s)"
    assert code == 0 and line in out and "50.4 us" not in out
    code, out, _ = dpsim("calibrate", "--show", tmp_path / "m.json")
    assert code == 0 and "50.4 us" in out


@pytest.mark.parametrize(("rate", "share"), [("25gbit", 0.80), ("20gbit", 1.0), ("10gbit", 2.0)])
def test_calibrate_says_what_share_of_the_line_rate_a_log_reached(
    rate: str, share: float, dpsim: Dpsim, tmp_path: Path
) -> None:
    """2.5 GB/s of bus bandwidth on 4 devices: 1.5 times 1 MB in 600 us."""
    (log := tmp_path / "four.txt").write_text(outputs.osu([(1000, 20.0), (1_000_000, 600.0)]))
    asked = ("calibrate", "--from", log, "--devices", "4", "--line-rate", rate, "--output", tmp_path / "m.json")
    code, out, err = dpsim(*asked)
    assert code == 0 and f"bus bandwidth up to 2.5 GB/s (20 Gbit/s), {share:.0%} of " in out
    assert ("more than the line rate was reached" in err) == (share > 1)
    (table,) = json.loads(dpsim(*asked, "--json")[1])["summary"]["imported"]
    assert (table["busbw_bytes_per_s"], table["share_of_line_rate"]) == pytest.approx((2.5e9, share))
    inside = [*asked[:4], "1x4", *asked[5:]]
    code, out, err = dpsim(*inside)
    assert code == 0 and "2.5 GB/s (20 Gbit/s)\n" in out and not err, "the rate is of the link between nodes"
    assert "share_of_line_rate" not in json.loads(dpsim(*inside, "--json")[1])["summary"]["imported"][0]


def test_a_line_rate_is_one_of_a_log(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("calibrate", "--line-rate", "25gbit", "--output", tmp_path / "m.json")
    assert code == 2 and "--line-rate: without --from nothing is imported" in err
    (log := tmp_path / "four.txt").write_text(outputs.osu(POINTS))
    code, _, err = dpsim("calibrate", "--from", log, "--line-rate", "25", "--output", tmp_path / "m.json")
    assert code == 2 and "'25' is not understood" in err and not (tmp_path / "m.json").exists()


def test_a_machine_written_by_hand_may_name_units(dpsim: Dpsim, tmp_path: Path) -> None:
    link = 'schema = "dpsim.machine/1"\nname = "e"\n[link]\nlatency_s = "20us"\nbandwidth_bytes_per_s = "25gbit"\n'
    (file := tmp_path / "e.toml").write_text(link)
    assert (read := machines.read(file).link) is not None
    assert (read.latency_s, read.bandwidth_bytes_per_s) == pytest.approx((20e-6, 3.125e9))
    assert "20 us, 3.12 GB/s (25 Gbit/s) each way" in dpsim("calibrate", "--show", file)[1]
    file.write_text(link.replace("25gbit", "25gbits"))
    code, _, err = dpsim("calibrate", "--show", file)
    assert code == 2 and "e.toml" in err and "'25gbits' is not understood" in err and "1gbit or 200mbit" in err


def test_two_machines_are_compared_where_both_have_a_time(files: list[Path], dpsim: Dpsim) -> None:
    code, out, _ = dpsim("calibrate", "--compare", listed(files[0], files[2]), "--json")
    assert code == 0
    assert [round(point["ratio"], 2) for point in json.loads(out)["points"]] == [2.0, 2.0, 2.0]
    code, _, err = dpsim("calibrate", "--compare", listed(files[0], files[1]))
    assert code == 2 and "in common" in err


def test_machines_are_compared_table_by_table_with_their_lines(files: list[Path], dpsim: Dpsim, tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    assert dpsim("calibrate", "--merge", listed(files[0], files[1]), "--output", both)[0] == 0
    code, out, _ = dpsim("calibrate", "--compare", listed(both, files[2], files[0]), "--plot", tmp_path / "all.svg")
    text = " ".join(out.split())
    assert code == 0 and "mpi on 2 devices, float32" in text and "Without a counterpart" in text
    drawn = (tmp_path / "all.svg").read_text()
    assert all(f"{name}: mpi on" in drawn for name in ("both.json", "slow.json", "two.json"))
    summary = json.loads(dpsim("calibrate", "--compare", listed(both, files[2]), "--json")[1])["summary"]
    assert [(each["machine"], each["devices"]) for each in summary["unmatched"]] == [("both.json", 4)]
    first, second = (line for line in summary["lines"] if line["devices"] == 2)
    assert second["alpha_s"] == pytest.approx(2 * first["alpha_s"])
    assert second["bandwidth_bytes_per_s"] == pytest.approx(first["bandwidth_bytes_per_s"] / 2)


def test_a_time_between_two_sizes_is_interpolated(files: list[Path], dpsim: Dpsim, tmp_path: Path) -> None:
    log, path = tmp_path / "other.txt", tmp_path / "other.json"
    log.write_text(outputs.osu([(size, us) for size, us in POINTS if size != 65536]))
    assert dpsim("calibrate", "--from", log, "--devices", "2", "--output", path)[0] == 0
    points = json.loads(dpsim("calibrate", "--compare", listed(files[0], path), "--json")[1])["points"]
    assert [(point["size_bytes"], point["interpolated"]) for point in points] == [
        (1024, False),
        (65536, True),
        (1048576, False),
    ]
    between_us = 4.62 + (631.29 - 4.62) * (65536 - 1024) / (1048576 - 1024)
    assert points[1]["b_time_s"] == pytest.approx(between_us * 1e-6, rel=1e-3)


def test_a_machine_is_not_compared_alone_nor_emulated_with_real(
    files: list[Path], dpsim: Dpsim, tmp_path: Path
) -> None:
    code, _, err = dpsim("calibrate", "--compare", listed(files[0]))
    assert code == 2 and "two or more" in err
    emulated = tmp_path / "emulated.json"
    codec.write(emulated, msgspec.structs.replace(machines.read(files[0]), emulated_network=True))
    code, _, err = dpsim("calibrate", "--compare", listed(files[0], emulated))
    assert code == 2 and "the network of emulated.json is emulated and that of two.json is real" in err
    assert "1.00" in dpsim("calibrate", "--compare", listed(files[0], files[0]))[1]


def test_several_machines_become_one_with_a_link_fitted_to_all(files: list[Path], dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    codec.write(files[0], msgspec.structs.replace(machines.read(files[0]), slow_devices=(2.0,), contention=1.5))
    assert dpsim("calibrate", "--merge", listed(files[0], files[1]), "--output", path)[0] == 0
    merged = machines.read(path)
    assert (merged.slow_devices, merged.contention) == ((2.0,), 1.5)
    assert [table.devices for table in merged.allreduce] == [2, 4]
    assert merged.link is not None and merged.link.fitted_to == "mpi on 2, mpi on 4"
    code, _, err = dpsim("calibrate", "--merge", listed(files[0], files[2]), "--output", path)
    assert code == 2 and "two allreduce tables of mpi, 2, float32" in err
    assert dpsim("calibrate", "--merge", listed(files[0]), "--output", path)[0] == 2
    before = files[0].read_bytes()
    code, _, err = dpsim("calibrate", "--merge", listed(files[0], files[1]), "--output", files[0])
    assert code == 2 and "this command reads it" in err and files[0].read_bytes() == before
