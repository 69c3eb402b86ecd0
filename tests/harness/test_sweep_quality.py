"""The quality of training beside the times of a sweep: what is declared, what is refused, and the time to a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from report_factory import sweep

from dpsim.errors import ConfigError
from dpsim.harness.quality.fits import cases
from dpsim.harness.sweep import quality
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.quality import QUALITY, study_of
from dpsim.harness.sweep.questions import completed
from dpsim.harness.sweep.sweep import Study, plan_text
from dpsim.records.convergence import Convergence
from dpsim.records.quality import RECORD
from dpsim.records.sweep import Experiment
from dpsim.report.sweep.content import target_sentence
from dpsim.setting import settings_of
from dpsim.units import format_duration

Dpsim = Callable[..., tuple[int, str, str]]
NORMS = {"model": "cnn:2,2", "overlap": "off", "optimizer": {"kind": "sgd", "learning_rate": 0.03, "momentum": 0.8}}


def experiment(question: str, **fields: Any) -> Experiment:
    return completed(
        Experiment(question=question, base=NORMS | fields.pop("base", {}), axes={"local_batch": (4, 8, 16)}, **fields)
    )


def test_a_sweep_over_batch_norm_with_seeds_studies_the_gap_and_the_statistics() -> None:
    study = study_of(experiment("batch-norm", seeds=10, epochs=3))
    assert study is not None
    (gap,), (divergence,) = study.gap, study.divergence
    assert (gap.model, gap.seeds, gap.epochs, gap.learning_rate, gap.momentum) == ("cnn:2,2", 10, 3, 0.03, 0.8)
    assert gap.others == ("cnn:2,2,norm=none", "cnn:2,2,norm=group")
    assert divergence.model == "cnn:2,2"
    assert study_of(experiment("batch-norm")) is None


def test_a_sweep_over_the_local_batch_with_a_target_studies_the_steps_to_it() -> None:
    study = study_of(experiment("local-batch", target_loss=0.5))
    assert study is not None and not study.gap
    (steps,) = study.steps_to_target
    assert (steps.model, steps.target_loss, steps.learning_rate) == ("cnn:2,2", 0.5, 0.03)


def test_the_trainings_are_announced_before_the_start() -> None:
    announced = "beside that 80 trainings, whose time is said before they start (--seeds 0 leaves them out)"
    assert plan_text(Study.of(experiment("batch-norm", seeds=10))).endswith(announced)
    plain = plan_text(Study.of(experiment("batch-norm")))
    assert " settings, some of them twice, about " in plain and "s for the report" in plain
    assert "trainings, whose time is said before they start" in plan_text(
        Study.of(experiment("local-batch", target_loss=0.5))
    )
    devices = completed(Experiment(question="devices", base={"global_batch": 64}, steps=50))
    assert plan_text(Study.of(devices)).endswith(
        "beside that trainings of 50 steps, whose time is said before they start"
    )


def test_the_time_of_the_trainings_is_said_before_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared, said = experiment("batch-norm", seeds=10), list[str]()
    monkeypatch.setattr(quality, "study_quality", lambda *_: None)
    monkeypatch.setattr(quality, "cores", lambda: 2)
    (setting,) = settings_of((declared.rows[0],))
    of_setting = SimpleNamespace(setting=setting, step_s=1e-3 * setting.plan.global_batch / setting.plan.devices)
    predictions: Any = SimpleNamespace(experiment=declared, points=[of_setting])
    study = study_of(declared)
    assert study is not None
    quality.measure_quality(study, predictions, tmp_path, said.append)
    samples = sum(case.steps * case.global_batch for held in (False, True) for case in cases(study, held_out=held))
    assert said == [
        f"the quality: 80 trainings, 2 at a time, take about {format_duration(samples * 0.5e-3)} on a quiet machine"
    ]
    (tmp_path / quality.QUALITY).mkdir()
    (tmp_path / quality.QUALITY / RECORD).touch()
    quality.measure_quality(study, predictions, tmp_path, said.append)
    assert len(said) == 1


def test_quality_is_studied_in_the_compute_dtype_of_the_sweep() -> None:
    base = {"compute_dtype": "bfloat16"}
    studies = (
        study_of(experiment("batch-norm", seeds=10, base=base)),
        study_of(experiment("local-batch", target_loss=0.5, base=base)),
    )
    parts = [part for study in studies if study for part in (*study.gap, *study.divergence, *study.steps_to_target)]
    assert [part.compute_dtype for part in parts] == ["bfloat16"] * 3
    assert all(", products in bfloat16" in part.name for part in parts)
    both = experiment("local-batch", target_loss=0.5)
    both = msgspec.structs.replace(both, axes=both.axes | {"compute_dtype": ("float32", "bfloat16")})
    with pytest.raises(ConfigError, match="compute dtypes float32 and bfloat16"):
        study_of(both)


@pytest.mark.parametrize(
    ("question", "fields", "message"),
    [
        ("batch-norm", {"seeds": 3}, "a gap from 3 seeds"),
        ("batch-norm", {"seeds": 10, "base": {"optimizer": {"kind": "adamw"}}}, "quality of training with AdamW"),
        ("batch-norm", {"target_loss": 0.5}, "target_loss 0.5 in a sweep over another question"),
        ("local-batch", {"seeds": 10}, "seeds 10 and target_loss 0 in a sweep over another question"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused(question: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_of(experiment(question, **fields))


def test_the_flags_declare_it_and_are_refused_before_anything_runs(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("sweep", "batch-norm", "--seeds", "2", "--output", tmp_path / "out")
    assert code == 2 and "a gap from 2 seeds" in err and not (tmp_path / "out").exists()
    code, _, err = dpsim("sweep", "local-batch", "--target-loss", "-1", "--output", tmp_path / "out")
    assert code == 2 and "target_loss is -1" in err


def test_time_to_target_is_steps_times_step_and_names_the_devices_that_pay() -> None:
    comparison = compare(*sweep(networks=("node",)))
    convergence = Convergence(
        model="cnn",
        dataset="digits",
        target_loss=0.5,
        min_steps=10.0,
        noise_batch=100.0,
        batches=(32, 128),
        learning_rate=0.1,
        reference_batch=64,
        momentum=0.9,
    )
    alone, together = (
        [p.replaced(measured_step_s=s, predicted_step_s=s, global_batch=b, local_batch=b / p.devices)]
        for p, s, b in zip(
            (next(p for p in comparison.scored if p.devices == d) for d in (1, 2)), (1.0, 0.5), (100, 100), strict=True
        )
    )
    text = target_sentence("node", [*alone, *together], convergence)
    assert "training to loss 0.5 is fastest with local batch 50 on 2 devices: 20 steps, 10 s" in text
    assert "goodput 100 of 200 samples/s" in text and "All 2 devices pay (predicted: 2)" in text
    slow = [together[0].replaced(measured_step_s=0.99)]
    assert "Beyond 1 device more do not pay (predicted: 2)" in target_sentence("node", [*alone, *slow], convergence)
    large = [together[0].replaced(global_batch=400, measured_step_s=0.1)]
    assert "global batch 400 is outside the batches" in target_sentence("node", [*alone, *large], convergence)


@pytest.mark.slow
def test_the_report_of_a_sweep_shows_what_the_norm_does_to_training(dpsim: Dpsim, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsim.study.inputs._LEAST_S", 0.1)
        code, _, err = dpsim(
            *("sweep", "batch-norm", "--model", "cnn:2,2", "--network", "paced:50us,1gbit", "--local-batch", "4"),
            *("--budget", "0", "--batch-norm", "local,group", "--dataset", "digits:noise=0.2,samples=128"),
            *("--seeds", "10", "--epochs", "1", "--output", tmp_path / "out"),
        )
    assert code == 0, err
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Batch norm, cnn:2,2 on digits:noise=0.2,samples=128, B = 64" in text
    assert "Divergence of statistics, cnn:2,2" in text and (tmp_path / "out" / "gap.svg").exists()
    assert (tmp_path / "out" / QUALITY / "quality.json").exists()
    code, out, _ = dpsim("report", tmp_path / "out", "--json")
    assert code == 0 and len(json.loads(out)["points"]) == 4
    assert "Divergence of statistics" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
