"""A study of training quality: leaves stand for devices, runs are kept, predictions come before what they predict."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.quality.fits import (
    Runs,
    cases,
    compare_steps,
    gap_cases,
    mean_interval,
    predict_steps,
    steps_cases,
    steps_of,
)
from dpsim.harness.quality.study import CONVERGENCE, path_of, results, run_all, study_quality
from dpsim.harness.train.train import train
from dpsim.launch.workers import executor
from dpsim.progress import no_progress
from dpsim.records.quality import (
    PREDICTIONS,
    RECORD,
    DivergenceStudy,
    Evaluation,
    GapStudy,
    QualityStudy,
    StepsStudy,
    TrainingCase,
    TrainingRun,
    median,
    read_quality,
    read_study,
)
from dpsim.records.train import TrainConfig
from dpsim.report.quality import answers, write
from dpsim.study.runners.fit import bound_copy, open_training
from dpsim.study.runners.fit import train as train_case

GAP = GapStudy(
    model="mlp:8,norm=batch",
    dataset="digits:noise=0.35,samples=64",
    fitted=(2, 4),
    held_out=(8,),
    others=("mlp:8,norm=layer",),
    global_batch=16,
    epochs=2,
)
STEPS = StepsStudy(
    model="mlp:8", dataset="digits", target_loss=2.0, fitted=(16, 32, 64), held_out=(48,), seeds=3, most_samples=4000
)
STUDY = QualityStudy(
    name="small",
    gap=(GAP,),
    divergence=(
        DivergenceStudy(model="mlp:8,norm=batch", dataset="digits", local_batches=(2, 8), steps=2, global_batch=16),
    ),
    steps_to_target=(STEPS,),
)


REPORT = Path(__file__).parents[2] / "reports" / "accuracy" / "quality"


def test_the_committed_report_meets_its_targets_and_damage_is_refused() -> None:
    record = read_quality(REPORT)
    derived = results(record)
    for gap in derived.gap:
        assert gap.points[0].gap.visible and median(gap.errors["predicted"]) <= 0.25
    for each in derived.divergence:
        assert median(each.errors()) <= 0.2 and median(each.errors()) < median(each.errors("independent_rows"))
    for steps in derived.steps_to_target:
        inside = [p.held_out and not p.outside for p in steps.points if p.held_out]
        for error, power_law, within in zip(steps.errors["predicted"], steps.errors["power law"], inside, strict=True):
            assert error <= (0.1 if within else 0.2) and error < power_law
    replace = msgspec.structs.replace
    early = replace(record.runs[-1], measured_at="2000-01-01T00:00:00.000Z")
    for damaged, reason in (
        (replace(record, predictions_sha256="0"), "the digest"),
        (replace(record, runs=record.runs[:-1]), "1 of its runs are missing"),
        (replace(record, runs=(*record.runs[:-1], early)), "1 held-out runs are older"),
        (replace(record, divergence=record.divergence[:-1]), "not one prediction and one measurement"),
    ):
        with pytest.raises(FileFormatError, match=reason):
            results(damaged)


def test_leaves_of_one_rank_train_as_so_many_devices_with_local_statistics() -> None:
    common = {"model": "cnn:4,8", "global_batch": 16, "steps": 6, "network": "node"}
    other = train(TrainConfig.of(devices=1, leaves=8, batch_norm="leaf", **common), no_progress)
    for devices in (2, 4):
        ranks = train(TrainConfig.of(devices=devices, batch_norm="local", **common), no_progress)
        leaves = train(TrainConfig.of(devices=1, leaves=devices, batch_norm="leaf", **common), no_progress)
        assert leaves.losses == pytest.approx(ranks.losses, rel=1e-5)
        assert leaves.test_loss == pytest.approx(ranks.test_loss, rel=1e-3)
        assert other.losses != pytest.approx(ranks.losses, rel=1e-3)  # so the comparison can tell them apart


@pytest.mark.slow
def test_a_study_predicts_before_it_trains_what_is_held_out_and_keeps_finished_runs(tmp_path: Path) -> None:
    first = cases(STUDY, held_out=False)[0]
    run_all([first], tmp_path, no_progress)
    kept = path_of(tmp_path, first).stat().st_mtime_ns
    with executor("2") as pool:
        actual = study_quality(STUDY, tmp_path, no_progress, pool)
    assert path_of(tmp_path, first).stat().st_mtime_ns == kept
    record = read_quality(tmp_path)
    by_case = {run.case: run for run in record.runs}
    assert all(by_case[c].measured_at >= record.predictions.predicted_at for c in cases(STUDY, held_out=True))
    assert all(by_case[c].measured_at <= record.predictions.predicted_at for c in cases(STUDY, held_out=False))
    assert record.predictions_sha256 == codec.digest(record.predictions)
    assert "emulated" in record.emulation
    assert [point.local_batch for point in actual.gap[0].points] == [2, 4, 8]
    assert all(value > 0 for value in actual.divergence[0].measured) and len(actual.divergence[0].measured) == 4
    assert all(point.median for point in actual.steps_to_target[0].points)
    assert study_quality(STUDY, tmp_path, no_progress) == actual
    assert (tmp_path / CONVERGENCE).exists()
    text = " ".join(answers(actual))
    assert "Divergence of statistics" in text and "Steps to target" in text and "leaves of one rank" in text
    written = {path.name for path in write(tmp_path, actual)}
    assert {"report.md", "index.html", "gap.svg", "divergence.svg", "steps_to_target.svg"} <= written
    other = msgspec.structs.replace(STUDY, name="other")
    with pytest.raises(FileFormatError, match="is of another study"):
        study_quality(other, tmp_path, no_progress)
    (tmp_path / RECORD).unlink()
    with pytest.raises(FileFormatError, match=PREDICTIONS):
        study_quality(other, tmp_path, no_progress)


def test_a_study_in_bfloat16_trains_and_takes_gradients_in_it() -> None:
    study = STUDY.multiplied_in("bfloat16")
    every = [*cases(study, held_out=False), *cases(study, held_out=True)]
    assert {case.compute_dtype for case in every} == {"bfloat16"}
    case = msgspec.structs.replace(steps_cases(STEPS, 16)[0], steps=2)
    rounded = msgspec.structs.replace(case, compute_dtype="bfloat16")
    exact, actual, again = train_case(case), train_case(rounded), train_case(rounded)
    assert actual.losses == again.losses != exact.losses
    assert actual.losses == pytest.approx(exact.losses, rel=1e-2)
    trainer, _ = open_training(rounded)
    assert bound_copy(rounded, trainer)[0].compute_dtype == "bfloat16"
    trainer.close()


def test_the_declared_studies_can_be_read_and_a_gap_needs_10_seeds() -> None:
    from dpsim.experiments import quality

    for path in Path(quality.__path__[0]).glob("*.toml"):
        study = read_study(path)
        assert study.gap and study.divergence and study.steps_to_target
    with pytest.raises(ConfigError, match="a gap from 9 seeds") as caught:
        msgspec.structs.replace(GAP, seeds=9)
    assert "10 or more" in caught.value.allowed
    with pytest.raises(ConfigError, match="steps to a target fitted at"):
        msgspec.structs.replace(STEPS, fitted=(16, 32))
    with pytest.raises(ConfigError, match="local batch 3"):
        msgspec.structs.replace(GAP, held_out=(3,))


def _run(case: TrainingCase, steps: float | None) -> TrainingRun:
    """A run that reaches its target after so many steps, or never."""
    last = 10**6 if steps is None else math.ceil(steps) + 1
    target = case.target_loss
    end = target * 1.1 if steps is None else target * math.exp(-0.1 * (last - steps))
    middle = target * 1.2 if steps is None else target * math.exp(0.1 * (steps - last + 2))
    norms = {"small_norm": 3.0, "big_norm": 1.25}
    evaluations = (Evaluation(step=last - 2, loss=middle, **norms), Evaluation(step=last, loss=end, **norms))
    return TrainingRun(
        case=case,
        measured_at="",
        loss_every=1,
        losses=(1.0,),
        training_set_loss=1.0,
        test_loss=1.0,
        test_accuracy=0.5,
        evaluations=evaluations,
    )


def _runs(never: int = 0) -> Runs:
    return {
        case: _run(case, None if batch == never and case.seed == 0 else 10 * (1 + 40 / batch) * (1 + 0.01 * case.seed))
        for batch in (*STEPS.fitted, *STEPS.held_out)
        for case in steps_cases(STEPS, batch)
    }


def test_steps_of_held_out_batches_are_predicted_from_a_curve() -> None:
    runs = _runs()
    assert steps_of(_run(steps_cases(STEPS, 16)[0], 12.3)) == pytest.approx(12.3)
    predicted = predict_steps(STEPS, runs)
    assert predicted.parameters["noise_batch"] == pytest.approx(40, rel=1e-6)
    result = compare_steps(STEPS, predicted, runs)
    assert result.errors["predicted"][0] < 1e-6 < result.errors["power law"][0]
    # at batch b: tr = (3 - 1.25) / (8/b - 1/b) = b/4, |G|^2 = (1.25 - 3/8) / (7/8) = 1; the mean of 4, 8, 16
    assert result.gradient_noise_batch == pytest.approx(28 / 3)
    assert result.noise_interval is not None and result.noise_interval[0] <= 40.0001


def test_a_target_that_a_run_never_reaches_is_said_in_words_and_the_others_stay() -> None:
    runs = _runs(never=32)
    predicted = predict_steps(STEPS, runs)
    assert not predicted.parameters and "Global batch 32: not every run reached the target" in predicted.reason
    result = compare_steps(STEPS, predicted, runs)
    assert [len(point.steps) for point in result.points] == [3, 2, 3, 3]


def test_processes_train_as_this_one_and_save_every_run(tmp_path: Path) -> None:
    every = [msgspec.structs.replace(case, steps=2) for case in gap_cases(GAP, 2)[:3]]
    with executor("2") as pool:
        runs = run_all(every, tmp_path, no_progress, pool)
    assert [runs[case].losses for case in every] == [train_case(case).losses for case in every]
    assert all(path_of(tmp_path, case).exists() for case in every)


def test_an_interval_needs_two_seeds() -> None:
    with pytest.raises(ConfigError, match="1 seeds"):
        mean_interval([1.0])
    assert not mean_interval([-1.0, 1.0]).visible
