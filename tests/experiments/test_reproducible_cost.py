"""The experiment that times reproducible training against the plain one: real steps, and the report on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsim import codec
from dpsim.experiments.reproducible_cost import (
    AGAIN,
    PLAIN,
    RECORD,
    Case,
    CostRecord,
    Mode,
    cases,
    lines,
    main,
    measure,
    read,
    write_report,
)
from dpsim.harness.measurement.environment import environment


@pytest.mark.slow
def test_every_mode_takes_its_turns_and_the_report_shows_them(tmp_path: Path) -> None:
    modes = (Mode(leaves=8), Mode(leaves=8, batch_norm="global"), Mode(leaves=0, batch_norm="global"))
    measured = []
    for batch in (16, 32):
        case = Case(model="cnn:4", dataset="digits", devices=2, global_batch=batch, modes=modes, limit=1.1)
        measured.append(measure(case, 0.1))
        assert list(measured[-1].step_s) == [PLAIN, *(mode.name for mode in modes), AGAIN]
        assert min(len(rounds) for rounds in measured[-1].step_s.values()) >= 6
        assert all(0 < step_s < 10 for rounds in measured[-1].step_s.values() for step_s in rounds)
    record = CostRecord(environment=environment(), measured_from="a", measured_until="b", measured=tuple(measured))
    codec.write(tmp_path / "cost" / RECORD, record)
    written = write_report(tmp_path / "cost", record)
    shown = (tmp_path / "cost" / "report.md").read_text()
    assert {"index.html", "cost.png"} <= {path.name for path in written}
    assert read(tmp_path / "cost") == record
    of = measured[0].ratio(modes[0].name)
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
