"""How wide intervals must be by past studies: the factor, its groups, and the file in which studies are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from small_step import machine, plan, workload

from dpsim import codec
from dpsim.machine import Link, Machine
from dpsim.model import past, predict
from dpsim.model.residuals import (
    Residual,
    Residuals,
    conformal_factor,
    group_name,
    learnt_factor,
    ratio,
    shipped,
    widths,
)

GROUP = "node, several devices"


def study(number: int, *ratios: float, group: str = GROUP, kind: str = "beforehand") -> Residual:
    return codec.decode(
        {"study": f"study {number}", "kind": kind, "group": group, "ratios": list(ratios)}, Residual, "residual"
    )


def test_nine_studies_are_needed_and_the_largest_of_nine_counts() -> None:
    nine = [(float(number),) for number in range(1, 10)]
    assert conformal_factor(nine) == 9.0
    assert conformal_factor(nine[:8]) == math.inf
    assert conformal_factor([(float(number),) for number in range(1, 20)]) == 18.0


def test_a_study_weighs_as_much_as_any_other_however_many_settings_it_has() -> None:
    """Nine studies that missed by 1, of which one has 90 settings that missed by 5: a tenth is beyond 1."""
    studies = [(1.0,)] * 19 + [(5.0,) * 90]
    assert conformal_factor(studies) == 1.0
    assert conformal_factor([(1.0,)] * 17 + [(5.0,)] * 3) == 5.0


def test_the_next_study_is_held_with_the_stated_probability() -> None:
    """Whatever the distribution of errors: over many draws, the ratio of a new study lies below the factor."""
    random = np.random.default_rng(3)
    held = []
    for _ in range(2000):
        drawn = random.pareto(1.5, 13)
        held.append(drawn[0] <= conformal_factor([(float(each),) for each in drawn[1:]]))
    assert np.mean(held) + 0.02 >= 0.9 and np.mean(held) < 0.95


def test_a_ratio_is_taken_on_the_side_of_the_error() -> None:
    assert ratio(1.2, 1.0, 0.5, 1.2) == pytest.approx(1.0)
    assert ratio(0.5, 1.0, 0.5, 1.2) == pytest.approx(1.0)
    assert ratio(math.sqrt(1.2), 1.0, 0.5, 1.2) == pytest.approx(0.5)


def test_blind_and_beforehand_and_groups_are_apart() -> None:
    rows = [study(n, 2.0) for n in range(9)] + [study(n, 7.0, kind="blind") for n in range(9)]
    rows += [study(n, 3.0, group="node, 1 device") for n in range(8)]
    known = {width.group: width for width in widths(rows, "beforehand")}
    assert (known[GROUP].factor, known[GROUP].studies) == (2.0, 9)
    assert known["node, 1 device"].studies == known["any"].studies == 0


def test_what_no_study_covers_gets_the_widest_of_the_groups_that_come_with_dpsim() -> None:
    for kind in ("blind", "beforehand"):
        of_group: dict[str, list[tuple[float, ...]]] = {}
        for residual in shipped().residuals:
            if residual.kind == kind and "emulated computation" not in residual.group:
                of_group.setdefault(residual.group, []).append(residual.ratios)
        widest = max(1.0, *map(conformal_factor, of_group.values()))
        assert {width.group: width.factor for width in widths((), kind)}["any"] == widest
    assert len({residual.study for residual in shipped().residuals}) >= 20


def test_an_interval_is_as_many_times_as_wide_and_states_its_level_only_by_studies() -> None:
    plain = predict(workload(), machine(), plan())
    learnt = replace(machine(), interval_widths=widths([study(n, 2.0) for n in range(12)], "beforehand"))
    assumed = replace(machine(), interval_widths=widths((), "beforehand"))
    wide, wider = predict(workload(), learnt, plan()), predict(workload(), assumed, plan())
    assert (wide.interval_level, wide.interval_studies, wide.interval_factor) == (0.9, 12, 2.0)
    assert (wider.interval_level, wider.interval_studies) == (None, 0)
    for end in ("low_s", "high_s"):
        own, doubled = (abs(math.log(getattr(each, end) / each.step_s)) for each in (plain, wide))
        assert doubled == pytest.approx(2 * own, rel=1e-12)
    assert wide.step_s == plain.step_s


def test_groups_tell_networks_counts_emulation_and_scripts_apart() -> None:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    node = Machine(name="made up", link=link)
    paced, shaped = (
        Machine(name="made up", link=link, network=token, emulated_network=True)
        for token in ("paced:50us,1gbit", "shaped:2x1gbit+slow-host=50%")
    )
    flags = {"emulated_compute": False, "script": False}
    names = {group_name(2, node, **flags), group_name(8, node, **flags), group_name(1, node, **flags)}
    names |= {group_name(2, node, **(flags | {name: True})) for name in flags}
    names |= {group_name(2, each, **flags) for each in (paced, shaped)}
    assert len(names) == 6


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DPSIM_STUDIES_DIR", str(tmp_path / "studies"))
    return tmp_path / "studies"


def test_studies_are_kept_by_machine_each_once(studies: Path) -> None:
    past.add("a processor", 2, [study(1, 0.5), study(1, 0.7, group="node, 1 device")])
    past.add("a processor", 2, [study(1, 0.5)])
    past.add("a processor", 2, [study(2, 0.9)])
    assert [row.study for row in past.load("a processor", 2)] == ["study 1", "study 1", "study 2"]
    assert past.load("a processor", 4) == past.load("another processor", 2) == ()


def test_the_oldest_studies_are_forgotten(studies: Path) -> None:
    for number in range(past.MOST + 5):
        past.add("a processor", 2, [study(number, 0.5)])
    kept = [row.study for row in past.load("a processor", 2)]
    assert len(kept) == past.MOST and kept[0] == "study 5"


def test_a_long_file_is_shortened_by_its_oldest_entries_and_loses_no_damaged_line(
    studies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (studies / past.FILE).parent.mkdir()
    (studies / past.FILE).write_bytes(b"{cut off\n")
    for number in range(past.MOST + 5):
        past.add("a processor", 2, [study(number, 0.5)])
    monkeypatch.setattr(past, "_MOST_BYTES", 10)
    past.add("another processor", 2, [study(1, 0.5)])
    lines = (studies / past.FILE).read_bytes().splitlines()
    assert len(lines) == past.MOST + 2 and lines[0] == b"{cut off"
    assert past.load("a processor", 2)[0].study == "study 5" and len(past.load("another processor", 2)) == 1


def test_a_damaged_line_counts_as_no_study_and_stays(studies: Path) -> None:
    past.add("a processor", 2, [study(1, 0.5)])
    path = studies / past.FILE
    path.write_bytes(path.read_bytes()[:-20])  # as where the process was killed
    assert past.load("a processor", 2) == ()
    past.add("a processor", 2, [study(2, 0.5)])
    assert [row.study for row in past.load("a processor", 2)] == ["study 2"]
    assert past.read().damaged == 1 and len(path.read_bytes().splitlines()) == 2


def test_a_folder_that_cannot_be_made_loses_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPSIM_STUDIES_DIR", str(tmp_path / "file" / "studies"))
    past.add("a processor", 2, [study(1, 0.5)])
    assert past.load("a processor", 2) == ()


def test_a_calibrated_machine_learns_from_its_own_studies_and_a_published_one_stays(studies: Path) -> None:
    past.add("a processor", 2, [study(number, 3.0) for number in range(10)])
    published = replace(machine(), relative_uncertainty=None)
    measured = replace(machine(), relative_uncertainty=0.01, calibrated_on="a processor, node, today", cores=2)
    assert past.with_past_studies(published) == published
    known = {width.group: width for width in past.with_past_studies(measured).interval_widths}
    assert (known[GROUP].factor, known[GROUP].studies) == (3.0, 10)
    elsewhere = past.with_past_studies(replace(measured, cores=8))
    assert {width.studies for width in elsewhere.interval_widths} == {0}


def test_the_files_of_studies_are_strict(tmp_path: Path) -> None:
    path = tmp_path / "residuals.json"
    codec.write(path, Residuals(measured_on="here", residuals=(study(1, 0.5),)))
    assert json.loads(path.read_text())["model"] == 1


def test_an_assumed_width_learns_from_few_studies() -> None:
    assert learnt_factor(2.0, []) == pytest.approx(2.0)
    small = [learnt_factor(2.0, [(0.1,)] * count) for count in range(1, 9)]
    assert small == sorted(small, reverse=True) and small[-1] < 1.2
    assert learnt_factor(2.0, [(6.0,), (5.0,)]) > 4.0
    assert learnt_factor(2.0, [(0.5, 0.5)]) == learnt_factor(2.0, [(0.5,)])


@pytest.mark.parametrize("learnt", [1, 4, 8])
def test_what_was_learnt_holds_the_study_that_was_left_out(learnt: int) -> None:
    """Of the studies that come with dpsim, with the assumption and the learnt ones from the others."""
    of_group = [
        residual.ratios
        for residual in shipped().residuals
        if (residual.kind, residual.group) == ("beforehand", "node, several devices")
    ]
    inside = []
    for number, left_out in enumerate(of_group):
        others = of_group[number + 1 :] + of_group[:number]
        factor = learnt_factor(conformal_factor(others), others[:learnt])
        inside.append(sum(each <= factor for each in left_out) / len(left_out))
    assert 0.85 <= sum(inside) / len(inside) <= 0.97
