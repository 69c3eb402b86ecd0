"""The ledger: which runs are those of a prediction, what they come to, and what is damaged, changed or turned off."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from published_files import WORKLOAD

import dpsim
from dpsim.dates import day, stamp
from dpsim.ddp_settings import DdpSettings
from dpsim.machine import Machine
from dpsim.model import for_prediction, ledger, past
from dpsim.model.ledger import Run, job_of, keep, score
from dpsim.model.past import Job
from dpsim.model.points import plan_one, predict_grid
from dpsim.model.rows import PredictedRow
from dpsim.plan import Plan
from dpsim.report import ledger as report
from dpsim.setting import Grid
from dpsim.workload import Layer, Tensor, Workload

Dpsim = Callable[..., tuple[int, str, str]]
BEFORE, AFTER = "2026-05-03T10:00:00.000Z", "2026-05-04T10:00:00.000Z"
DDP = DdpSettings(torch="2.13.0", devices=2, parameters_sha256="p" * 64, optimizer="AdamW(exp_avg, exp_avg_sq)")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("CI", "DPSIM_LEDGER", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DPSIM_STUDIES_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def workload(**changed: Any) -> Workload:
    """A script's workload of two layers, at local batches of 8 and 16."""
    layers = [
        Layer(
            name=name,
            forward_s=(1e-3, 2e-3),
            backward_s=(2e-3, 4e-3),
            tensors=(Tensor(name=f"{name}.w", shape=(64, 64)),),
        )
        for name in ("a", "b")
    ]
    fields = {"name": "mine", "local_batches": (8, 16), "layers": tuple(layers), "ddp": DDP, "device": "A processor"}
    return Workload(**fields | changed)


def machine(workload: Workload, name: str = "10gbe") -> Machine:
    return for_prediction(workload, dpsim.read_machine(name))


def rows(of: Workload | None = None, on: str = "10gbe", **grid: Any) -> list[PredictedRow]:
    of = of or workload()
    return predict_grid(of, machine(of, on), Grid.of(**{"devices": 2, "local_batch": 8} | grid)).rows


def run(row: PredictedRow, factor: float = 1.0, **changed: Any) -> Run:
    """A run of what a row predicts, which takes so many times as long as predicted."""
    job = job_of(row.workload, row.plan, ledger.network_of(row.machine))
    fields = {"job": job, "step_s": factor * row.step_s, "steps": 20, "name": "a run", "at": AFTER, "version": "2.13.0"}
    return Run(**fields | changed)


def other(job: Job, **changed: Any) -> Job:
    return msgspec.structs.replace(job, **changed)


def test_a_run_of_a_predicted_job_gets_its_line() -> None:
    (row,) = rows()
    assert keep("predict", [row], BEFORE, {"workload": row.workload}) is not None
    (line,) = report.sentences(score([run(row, 1.01)], AFTER))
    low, high = row.prediction.low_s, row.prediction.high_s
    assert low and high and low < 1.01 * row.step_s < high
    assert line.startswith(f"Predicted on {day(BEFORE)}: ") and ": inside; your last 1 prediction: 1 inside" in line
    (line,) = report.sentences(score([run(row, 10.0, name="another", version="2.4.0")], AFTER))
    assert ": outside, " in line and " above" in line and "your last 2 predictions: 1 inside" in line
    assert "(predicted of PyTorch 2.13.0, run with 2.4.0)" in line


def test_a_layout_is_kept_as_it_is_written() -> None:
    (row,) = rows(devices="2x2")
    assert keep("predict", [row], BEFORE, {}) is not None
    assert past.read().predictions[0].points[0].job.layout == "2x2"
    assert len(score([run(row)], AFTER).scores) == 1


def test_a_run_is_scored_once() -> None:
    (row,) = rows()
    keep("predict", [row], BEFORE, {})
    scored = [score([run(row)], AFTER) for _ in range(2)]
    assert [len(each.all_scores) for each in scored] == [1, 1] and len(past.read().scores) == 1
    assert report.sentences(scored[0]) == report.sentences(scored[1])


def test_the_latest_prediction_before_the_run_is_scored() -> None:
    (row,) = rows()
    for number, at in enumerate(("2026-05-01T10:00:00.000Z", BEFORE, "2026-05-05T10:00:00.000Z")):
        keep(f"command {number}", [row], at, {})
    ((_, entry),) = score([run(row)], AFTER).scores
    assert entry.at == BEFORE


SAME: dict[str, Callable[[], Workload]] = {
    "moved and renamed": lambda: workload(name="mine of other/folder/train2.py"),
    "profiled again": lambda: workload(
        layers=tuple(msgspec.structs.replace(each, forward_s=(3e-3, 4e-3)) for each in workload().layers)
    ),
    "another PyTorch": lambda: workload(ddp=msgspec.structs.replace(DDP, torch="2.3.1")),
    "another source": lambda: workload(source="dpsim profile, some other day"),
    "profiled for other devices": lambda: workload(ddp=msgspec.structs.replace(DDP, devices=8)),
    "an optimizer that was not seen": lambda: workload(ddp=msgspec.structs.replace(DDP, optimizer="")),
    "a device that is not known": lambda: workload(device=""),
    "more batches profiled": lambda: workload(local_batches=(8, 32)),
    "other step times": lambda: workload(step_spread=(0.9, 1.0, 1.2)),
    "buckets in another order": lambda: workload(ddp=msgspec.structs.replace(DDP, bucket_bytes=(1, 2))),
}
OTHERS: dict[str, Callable[[], tuple[Workload, dict[str, Any]]]] = {
    "parameters": lambda: (workload(ddp=msgspec.structs.replace(DDP, parameters_sha256="q" * 64)), {}),
    "optimizer": lambda: (workload(ddp=msgspec.structs.replace(DDP, optimizer="SGD()")), {}),
    "device": lambda: (workload(device="Another processor"), {}),
    "local batch": lambda: (workload(), {"local_batch": 16}),
    "micro-batches": lambda: (workload(), {"accumulate": 2}),
    "bucket cap": lambda: (workload(), {"fusion_threshold_bytes": 2.0**20}),
    "the script's cap": lambda: (workload(ddp=msgspec.structs.replace(DDP, bucket_cap_bytes=2**20)), {}),
    "devices": lambda: (workload(), {"devices": 4}),
    "strategy": lambda: (workload(), {"strategy": "zero1"}),
    "wire": lambda: (workload(), {"wire_dtype": "bfloat16", "algorithm": "direct"}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_job_is_matched(name: str) -> None:
    keep("predict", rows(), BEFORE, {})
    (again,) = rows(SAME[name]())
    assert len(score([run(again)], AFTER).scores) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_another_job_is_not_scored_and_the_ledger_says_why(name: str) -> None:
    keep("predict", rows(), BEFORE, {})
    of, grid = OTHERS[name]()
    (changed,) = rows(of, **grid)
    scored = score([run(changed)], AFTER)
    assert not scored.scores and not past.read().scores
    assert name == "parameters" or "the nearest prediction of this model" in scored.unscored[0]
    assert name == "parameters" or len(report.sentences(scored)) == 1


def test_settings_that_nobody_predicted_are_not_named_beside_those_that_are_scored() -> None:
    keep("predict", rows(), BEFORE, {})
    scored = score([run(rows()[0]), run(rows(local_batch=16)[0])], AFTER)
    assert len(scored.scores) == len(scored.unscored) == len(report.sentences(scored)) == 1


def test_models_of_dpsim_differ_by_what_communicates_and_by_the_order_of_their_tensors() -> None:
    own = workload(ddp=None)
    plan, _ = plan_one(own, machine(own), Grid.of(devices=2, local_batch=8))
    ring, direct = (job_of(own, msgspec.structs.replace(plan, algorithm=each), "node") for each in ("ring", "direct"))
    assert [what for what, *_ in ledger.differences(ring, direct)] == ["communication"]
    swapped = workload(ddp=None, layers=own.layers[::-1])
    assert ledger.parameters_digest(own) != ledger.parameters_digest(swapped)


def test_one_device_has_no_buckets_strategy_or_network() -> None:
    own = workload()
    jobs = [
        job_of(own, Plan(devices=1, global_batch=8, fusion_rule=rule, fusion_threshold_bytes=cap), network)
        for rule, cap, network in (("ddp", 1e6, "node"), ("per-tensor", None, "10gbe"))
    ]
    assert jobs[0] == jobs[1]


def test_layouts_are_compared_where_both_say_how_nodes_are() -> None:
    job = run(rows()[0]).job
    for one, another, same in (("8", "2x4", True), ("2x4", "2x4", True), ("2x4", "4x2", False), ("8", "4", False)):
        differing = ledger.differences(other(job, layout=one), other(job, layout=another))
        assert bool(differing) is not same


def test_a_job_of_which_the_network_is_not_known_is_scored_if_one_was_predicted() -> None:
    (one,) = rows(on="10gbe")
    keep("predict", [one], BEFORE, {})
    unknown = run(one, job=other(run(one).job, network=""))
    assert len(score([unknown], AFTER).scores) == 1
    keep("predict", [one, *rows(on="25gbe")], "2026-05-03T11:00:00.000Z", {})
    assert "it was predicted on" in score([unknown], AFTER).unscored[0]


def test_too_few_clean_steps_are_no_score() -> None:
    (row,) = rows()
    keep("predict", [row], BEFORE, {})
    (sentence,) = report.sentences(score([run(row, steps=19)], AFTER))
    assert sentence == "Not scored: 19 clean steps were measured, and at least 20 are needed"


def test_nothing_is_said_of_jobs_that_nobody_predicted() -> None:
    assert report.sentences(score([run(rows()[0])], AFTER)) == []


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"DPSIM_LEDGER": "off"}, {"CI": "1", "DPSIM_LEDGER": "on"}])
def test_it_can_be_turned_off(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert keep("predict", rows(), BEFORE, {}) is None and not folder.exists()


@pytest.mark.parametrize("line", ['ledger = "off"', "ledger = false"])
def test_a_line_of_configuration_ends_it(line: str, folder: Path) -> None:
    ledger.configuration().parent.mkdir(parents=True)
    ledger.configuration().write_text(line)
    assert keep("predict", rows(), BEFORE, {}) is None and not folder.exists()
    ledger.configuration().write_text("no toml")
    assert keep("predict", rows(), BEFORE, {}) is not None


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPSIM_STUDIES_DIR", str(tmp_path / "file" / "kept"))
    assert keep("predict", rows(), BEFORE, {}) is None
    assert score([run(rows()[0])], AFTER).scores == ()


def test_a_changed_entry_is_not_scored(folder: Path) -> None:
    (row,) = rows()
    keep("predict", [row], BEFORE, {})
    file = folder / past.FILE
    file.write_text(file.read_text().replace('"factor":', '"factor":3'))
    assert score([run(row)], AFTER).scores == ()
    assert any("changed since it was written" in each for each in report.lines(past.read()))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda line: line[:-30], "damaged"),
        (lambda line: b"\x00\xff\n", "damaged"),
        (lambda line: b'{"kind":"prediction","future":1}\n', "another version"),
        (lambda line: b'{"kind":"something"}\n', "another version"),
    ],
)
def test_a_line_that_cannot_be_used_stays_and_others_are_scored(
    damage: Callable[[bytes], bytes], said: str, folder: Path
) -> None:
    (row,) = rows()
    keep("predict", [row], BEFORE, {})
    file = folder / past.FILE
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    keep("predict", [row], BEFORE, {})
    assert len(score([run(row)], AFTER).scores) == 1
    assert file.read_bytes().startswith(damaged.rstrip(b"\n"))
    assert any(said in each and "left as it is" in each for each in report.lines(past.read()))


def test_processes_take_turns(folder: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(keep, [(f"process {number}", rows(), BEFORE, {}) for number in range(20)], chunksize=1)
    kept = past.read()
    assert len(kept.predictions) == 20 and kept.damaged == 0
    assert len({entry.command for entry in kept.predictions}) == 20


def test_scored_predictions_narrow_the_intervals_of_their_machine_alone() -> None:
    of = workload()
    row, elsewhere = rows(of)[0], rows(of, on="25gbe")[0]
    wide = row.prediction
    for number in range(9):
        keep("predict", [row], f"2026-05-03T10:00:0{number}.000Z", {})
        score([run(row, 1.001, name=f"run {number}", at=f"2026-05-03T10:00:0{number}.500Z")], AFTER)
    narrow = rows(of)[0].prediction
    assert wide.low_s and narrow.low_s and narrow.low_s > wide.low_s and narrow.interval_studies == 9
    assert rows(of, on="25gbe")[0].prediction == elsewhere.prediction
    assert rows(workload(device="Another processor"))[0].prediction.interval_studies == 0


def test_an_entry_keeps_the_fastest_thresholds_of_a_large_grid(folder: Path) -> None:
    caps = [1000.0 * number for number in range(1, 80)]
    every = rows(fusion_threshold_bytes=caps, devices=[2, 4])
    keep("predict", every, BEFORE, {})
    (entry,) = past.read().predictions
    assert len(entry.points) == ledger.MOST_POINTS and entry.left_out == len(every) - ledger.MOST_POINTS
    fastest = min((row for row in every if row.plan.devices == 4), key=lambda row: row.step_s)
    assert run(fastest).job in [point.job for point in entry.points]


def test_the_command_line_keeps_an_entry_says_so_once_and_reports(dpsim: Dpsim, folder: Path, tmp_path: Path) -> None:
    line = f"predict --workload {WORKLOAD} --machine 10gbe --devices 2 --local-batch 16".split()
    first, second = (dpsim(*line) for _ in range(2))
    assert (first[0], second[0]) == (0, 0) and first[1] == second[1]
    assert "DPSIM_LEDGER=off ends it" in first[2] and second[2] == ""
    assert [entry.command for entry in past.read().predictions] == ["predict", "predict"]
    code, out, _ = dpsim("report", "--ledger", "--output", tmp_path / "page")
    assert code == 0 and "No prediction has been scored yet" in out and "2 command lines waiting" in out
    assert "Waiting for a run" in (tmp_path / "page" / "index.html").read_text()


def test_a_page_and_tune_leave_an_entry_each(dpsim: Dpsim, tmp_path: Path) -> None:
    files = ("--workload", str(WORKLOAD), "--machine", "10gbe", "--devices", "8")
    assert dpsim("predict", *files, "--page", tmp_path / "page.html")[0] == 0
    assert dpsim("tune", *files)[0] == 0
    assert [entry.command for entry in past.read().predictions] == ["page", "tune"]


def test_python_keeps_an_entry_when_it_is_told() -> None:
    dpsim.predict(str(WORKLOAD), "10gbe", devices=2)
    assert not past.read().predictions
    dpsim.predict(str(WORKLOAD), "10gbe", devices=2, ledger=True)
    assert [entry.command for entry in past.read().predictions] == ["python"]


def test_what_is_shared_has_no_names(dpsim: Dpsim, tmp_path: Path) -> None:
    (row,) = rows(workload(name="secret of secret.py"))
    keep("predict", [row], BEFORE, {})
    score([run(row)], AFTER)
    code, out, _ = dpsim("report", "--ledger", "--share", tmp_path / "scores.json")
    text = (tmp_path / "scores.json").read_text()
    assert code == 0 and "scores.json" in out and "secret" not in text and "AdamW" not in text and "10 Gbit" not in text
    (shared,) = json.loads(text)["scores"]
    assert shared["inside"] and shared["at"] == AFTER[:10] and shared["job"]["parameters"] == "parameter 1"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ledger",), "there is no ledger in"),
        (("--share", "x.json"), "--share without --ledger"),
        (("folder", "--ledger"), "folder with --ledger"),
        (("--ledger", "--check"), "--check with --ledger"),
    ],
)
def test_a_ledger_that_cannot_be_shown_is_one_message(
    flags: tuple[str, ...], said: str, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dpsim("report", *flags)
    assert code == 2 and not out and said in err and "Traceback" not in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_only_be_read_is_read(folder: Path) -> None:
    (row,) = rows()
    keep("predict", [row], BEFORE, {})
    for path in (folder / past.FILE, folder):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert keep("predict", [row], BEFORE, {}) is None
        assert len(score([run(row)], AFTER).scores) == 1
    finally:
        folder.chmod(stat.S_IRWXU)


def test_moments_are_named_by_their_day() -> None:
    assert day("2019-05-03T12:00:00.000Z") == "3 May 2019" and day(stamp()).endswith(" today")
