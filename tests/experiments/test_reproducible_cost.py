"""The experiment that times reproducible training against the plain one: real steps, and the report on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsim import codec
from dpsim.experiments.reproducible_cost import (
    AGAIN,
    PLAIN,
    RECORD,
    STUDY,
    Case,
    Mode,
    cases,
    lines,
    main,
    write_report,
)


@pytest.mark.slow
def test_every_mode_takes_its_turns_and_the_report_shows_them(tmp_path: Path) -> None:
    modes = (Mode(leaves=8), Mode(leaves=8, batch_norm="global"), Mode(leaves=0, batch_norm="global"))
    chosen = [
        Case(model="cnn:4", dataset="digits", devices=2, global_batch=batch, modes=modes, limit=1.1)
        for batch in (16, 32)
    ]
    printed: list[list[str]] = []
    record = STUDY.measure(chosen, done=lambda each: printed.append([*lines(each)]), seconds=0.1)
    for each in record.measured:
        assert list(each.samples) == [PLAIN, *(mode.name for mode in modes), AGAIN]
        assert min(len(rounds) for rounds in each.samples.values()) >= 6
        assert all(0 < step_s < 10 for rounds in each.samples.values() for step_s in rounds)
    codec.write(tmp_path / "cost" / RECORD, record)
    written = write_report(tmp_path / "cost", record)
    shown = (tmp_path / "cost" / "report.md").read_text()
    assert {"index.html", "cost.png"} <= {path.name for path in written}
    assert STUDY.read(tmp_path / "cost" / RECORD) == record
    of = record.measured[0].ratio(modes[0].name, PLAIN)
    assert "| 16 | 8 leaves, batch norm leaf |" in shown and f"| {of.median:.3f} |" in shown
    assert f"{of.median - 1:+.1%} with 8 leaves" in shown
    assert len(printed[0]) == 6 and printed[0][2].endswith("limit 1.10") and "limit" not in printed[0][3]


def test_the_cases_are_those_of_the_claim() -> None:
    limits = {(case.model, case.global_batch, case.devices): case.limit for case in cases() if case.limit}
    assert limits[("resnet20", 128, 1)] == limits[("cnn", 128, 2)] == 1.10
    assert limits[("mlp:2048,2048,2048", 1024, 1)] == 1.20 and limits[("mlp:2048,2048,2048", 1024, 2)] == 1.15


def test_what_fits_no_case_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["reproducible_cost", "--model", "gpt"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert (
        "no case fits; there are cnn, cnn:128,128,128, mlp:2048,2048,2048, mlp:256x8, resnet20"
        in capsys.readouterr().err
    )
