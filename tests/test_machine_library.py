"""Machines by name: each has a source, a date and a doubt, and predicts what its file does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from published_files import WORKLOAD

import dpsim
from dpsim import machine
from dpsim.errors import ConfigError, FileFormatError
from dpsim.machine_library import library
from dpsim.model import predict_points
from dpsim.setting import Grid

Dpsim = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", library())
def test_each_has_a_source_a_date_a_doubt_and_a_link(name: str) -> None:
    known = machine.read(name)
    assert re.fullmatch(r"20\d\d(-[01]\d)?", known.date)
    assert re.search(r"https://|IEEE", known.source) and known.calibrated_on and known.name
    assert known.link is not None and not known.allreduce
    assert 0.05 <= (known.link.relative_uncertainty or 0.0) <= 0.5
    assert known == machine.read(library()[name])


def test_names_are_those_of_the_package_in_the_order_of_their_numbers() -> None:
    names = list(library())
    packaged = {file.name for file in resources.files("dpsim").joinpath("machines").iterdir()}
    assert {f"{name}.toml" for name in names} == packaged
    assert names.index("10gbe") < names.index("25gbe") < names.index("100gbe-roce")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown machine '25gb'.*100gbe-roce.*did you mean '25gbe'"):
        machine.read("25gb")
    with pytest.raises(ConfigError, match="unknown machine 'nvlink'"):
        machine.read("nvlink+10gbe")
    with pytest.raises(ConfigError, match="a\\+b"):
        machine.read("nvlink3-8gpu+10gbe+25gbe")
    with pytest.raises(FileFormatError):
        machine.read("missing.toml")


def test_a_file_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(library()["hdr-ib"], "25gbe")
    with pytest.raises(FileFormatError):
        machine.read("25gbe")  # the file is no JSON


def test_two_names_are_the_links_inside_nodes_and_between_them() -> None:
    both, inside, across = map(machine.read, ("nvlink3-8gpu+25gbe", "nvlink3-8gpu", "25gbe"))
    assert both.link is not None and both.link_in_node is not None
    assert inside.link is not None and across.link is not None
    assert both.link == across.link
    assert both.link_in_node.bandwidth_bytes_per_s == inside.link.bandwidth_bytes_per_s
    assert both.link_in_node.relative_uncertainty == across.link.relative_uncertainty
    assert inside.source in both.source and across.source in both.source


def test_python_takes_names_too_and_the_doubt_widens_the_interval() -> None:
    workload = dpsim.read_workload(WORKLOAD)
    (point,), summary = predict_points(workload, dpsim.read_machine("10gbe"), Grid.of(devices=8, local_batch=16))
    assert any("published (2019), not measured here" in caution for caution in summary["cautions"])
    certain = machine.read("10gbe")
    assert certain.link is not None
    certain = msgspec.structs.replace(certain, link=msgspec.structs.replace(certain.link, relative_uncertainty=0.0))
    (other,), _ = predict_points(workload, certain, Grid.of(devices=8, local_batch=16))
    assert other["predicted_step_s"] == point["predicted_step_s"]
    assert point["predicted_high_s"] > other["predicted_high_s"]


def test_the_list_has_every_name_and_show_has_its_source(dpsim: Dpsim) -> None:
    code, text, _ = dpsim("calibrate", "--list")
    assert code == 0 and all(f"\n{name} " in text for name in library())
    code, text, _ = dpsim("calibrate", "--show", "ndr-ib")
    assert code == 0 and "nccl-tests/issues/290" in text and "(2025-03)" in text and "known to 20%" in text


def test_an_upgrade_by_names_says_what_it_gains_and_whether_that_is_certain(dpsim: Dpsim) -> None:
    flags = f"--workload {WORKLOAD} --local-batch 16 --devices 8 --machine"
    code, text, _ = dpsim("predict", *flags.split(), "10gbe,25gbe,100gbe-tcp")
    assert code == 0
    (certain,) = re.findall(r"25gbe takes .* instead of .*: ([0-9.]+) times as fast \((.*)\), more than is unc", text)
    assert float(certain[0]) > float(certain[1].split(" to ")[0]) > 1
    code, text, _ = dpsim("predict", *flags.split(), "100gbe-roce,hdr-ib")
    assert code == 0 and "no certain difference" in text
