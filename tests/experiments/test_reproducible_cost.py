"""The experiment that times reproducible training against the plain one: real steps, and the report on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsim import codec
from dpsim.experiments.reproducible_cost.__main__ import main
from dpsim.experiments.reproducible_cost.cases import AGAIN, PLAIN, SCHEMA, Case, CostRecord, Measured, Mode, cases
from dpsim.experiments.reproducible_cost.show import lines, ratio, write
from dpsim.harness.measurement.environment import environment
from dpsim.launch.jobs import on_ranks


@pytest.mark.slow
def test_every_mode_takes_its_turns_and_the_report_shows_them(tmp_path: Path) -> None:
    modes = (Mode(leaves=8), Mode(leaves=8, batch_norm="global"), Mode(leaves=0, batch_norm="global"))
    measured = []
    for batch in (16, 32):
        case = Case(model="cnn:4", dataset="digits", devices=2, global_batch=batch, modes=modes, limit=1.1)
        argument = {"case": codec.to_builtins(case), "seconds": 0.1}
        steps_s = on_ranks("dpsim.experiments.reproducible_cost.measure:measure", argument, devices=2)
        assert list(steps_s) == [PLAIN, *(mode.name for mode in modes), AGAIN]
        assert min(len(rounds) for rounds in steps_s.values()) >= 6
        assert all(0 < step_s < 10 for rounds in steps_s.values() for step_s in rounds)
        measured.append(Measured(case=case, step_s={name: tuple(rounds) for name, rounds in steps_s.items()}))
    record = CostRecord(environment=environment(), measured_from="a", measured_until="b", measured=tuple(measured))
    page = write(tmp_path / "cost", record)
    shown = (tmp_path / "cost" / "report.md").read_text()
    assert page.exists() and (tmp_path / "cost" / "cost.png").exists()
    assert codec.read(tmp_path / "cost" / "cost.json", CostRecord, "cost", SCHEMA) == record
    of = ratio(measured[0], modes[0].name)
    assert "| 16 | 8 leaves, batch norm leaf |" in shown and f"| {of.median:.3f} |" in shown
    assert f"{of.median - 1:+.1%} with 8 leaves" in shown
    printed = list(lines(measured[0]))
    assert len(printed) == 6 and printed[2].endswith("limit 1.10") and "limit" not in printed[3]


def test_the_cases_are_those_of_the_claim() -> None:
    limits = {(case.model, case.global_batch, case.devices): case.limit for case in cases() if case.limit}
    assert limits[("resnet20", 128, 1)] == limits[("cnn", 128, 2)] == 1.10
    assert limits[("mlp:2048,2048,2048", 1024, 1)] == 1.20 and limits[("mlp:2048,2048,2048", 1024, 2)] == 1.15


def test_what_fits_no_case_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["reproducible_cost", "--model", "gpt"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no case fits; there are cnn, mlp:2048,2048,2048, resnet20" in capsys.readouterr().err
