"""``dpsim reproduce``: the same bits where they are promised; caught, placed and explained where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim import codec
from dpsim.harness.reproduce.against import compare_with_saved
from dpsim.optimizer import AdamW, Sgd
from dpsim.records.reproduce import RECORD, DigestCase, ReproduceRecord, Reproduction, RunOutcome, plan_name, read

Dpsim = Callable[..., tuple[int, str, str]]
OnRanks = Callable[..., Any]
PICTURES, ROWS = "synthetic:6x5x2,classes=3,train=45,test=3", "synthetic:4x4x1,classes=3,train=37,test=3"
TINY: dict[str, Any] = {"dataset": PICTURES, "global_batch": 20, "steps": 3, "fusion_thresholds_bytes": (0.0,)}
CASES = [
    (
        TINY
        | {
            "model": "mlp:9,8,dropout=0.2",
            "dataset": ROWS,
            "global_batch": 29,
            "seed": 3,
            "overlaps": ("poll",),
            "fusion_thresholds_bytes": (300.0,),
        },
        (2, 3, 4, 5, 8),
    ),
    (TINY | {"model": "mlp:9,8", "algorithms": ("ring", "direct"), "optimizer": AdamW()}, (2, 5)),
    (TINY | {"model": "cnn:4,6", "batch_norms": ("leaf", "global")}, (3, 8)),
    (TINY | {"model": "cnn:4,6", "leaves": 11, "optimizer": Sgd(nesterov=True), "overlaps": ("thread",)}, (4, 5)),
    (TINY | {"model": "cnn:4,norm=group,dropout=0.3"}, (5,)),
    (TINY | {"model": "cnn:4,norm=layer"}, (3, 8)),
    (TINY | {"model": "cnn:4,norm=instance"}, (2,)),
    (TINY | {"model": "cnn:4,6", "wire_dtype": "float16", "algorithms": ("hierarchical",)}, ("2x2", "3x2", "2x4")),
    (
        TINY
        | {
            "model": "cnn:4,6",
            "wire_dtype": "bfloat16",
            "leaves": 5,
            "batch_norms": ("global",),
            "algorithms": ("halving-doubling", "auto"),
        },
        (3, 5),
    ),
]
"""Trainings and device counts. 45 samples in batches of 20 leave 5 for the third step, so that some ranks get none; 8
divides neither 20 nor 29. All of it on 1 to 8 virtual ranks: test_leaves; fusion and overlaps: test_reproducible."""


@pytest.mark.slow
def test_every_step_has_the_same_bits_on_any_number_of_devices(on_ranks: OnRanks) -> None:
    """In one job, on its first ranks: starting ranks costs more than training."""
    tasks: list[dict[str, Any]] = []
    for case, devices in CASES:
        asked = Reproduction(**case, devices=devices)
        tasks.append({"reproduction": asked, "cases": [DigestCase(plan=plan) for plan in asked.plans()]})
    actual = on_ranks("ranks_reproduce:several", {"tasks": codec.to_builtins(tasks)}, devices=8)
    digests = set()
    for task, ran in zip(tasks, actual, strict=True):
        alone: dict[str, RunOutcome] = {}
        for one, result in zip(task["reproduction"].plans(), ran, strict=True):
            outcome = codec.decode(result, RunOutcome, "outcome")
            assert outcome.ranks_agree and outcome.drift_inputs is None
            assert len(outcome.trajectory.steps) == len(set(outcome.trajectory.steps)) == 3
            assert alone.setdefault(one.batch_norm, outcome) == outcome, one
        digests |= {outcome.trajectory.digest for outcome in alone.values()}
    assert len(digests) == len(CASES) + 1


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report of leaf and local batch norm."""
    from dpsim.cli import app

    folder = tmp_path_factory.mktemp("controls")
    flags = ["--model", "cnn:6,8", "--dataset", PICTURES, "--set", "global_batch=24", "--steps", "3"]
    code = app.run(
        [
            "reproduce",
            *flags,
            "--devices",
            "1,2",
            "--batch-norm",
            "leaf,local",
            "--fusion-threshold",
            "0",
            "--output",
            str(folder),
        ]
    )
    assert code == 0
    return folder


FLAGS = ("--model", "cnn:6,8", "--dataset", PICTURES, "--set", "global_batch=24", "--steps", "3", "--devices", "1")


def test_local_batch_norm_is_caught_and_its_drift_predicted(controls: Path) -> None:
    record = read(controls)
    _, _, leaf_2, local_2 = record.runs
    assert record.identical(leaf_2) and record.kept_promises
    assert not record.identical(local_2)
    difference = record.difference(local_2)
    assert difference is not None
    assert (difference.step, difference.tensor, difference.cause) == (1, "state/bn1.running_mean", "batch norm")
    assert (
        difference.values_known and difference.ulps > 1000 and difference.elements_differing == difference.elements == 6
    )
    assert record.difference(leaf_2) is None
    (drift,), predictions = record.drift, record.predictions
    assert predictions is not None and record.predictions_sha256 == codec.digest(predictions)
    assert record.measured_from < predictions.predicted_at < record.measured_until
    (predicted,) = predictions.points
    assert predicted.parameters is None and predicted.statistics == pytest.approx((1 / 12 - 1 / 24) ** 0.5)
    assert drift.statistics == pytest.approx(predicted.statistics, rel=0.8)
    assert drift.parameters > 1e-5


def test_no_drift_is_predicted_where_operands_are_rounded_to_bfloat16(dpsim: Dpsim, tmp_path: Path) -> None:
    flags = ("--model", "mlp:4,norm=layer", "--dataset", PICTURES, "--set", "global_batch=24", "--steps", "2")
    plain = ("--set", "leaves=0", "--devices", "1,2,3", "--fusion-threshold", "inf")
    code, out, err = dpsim("reproduce", *flags, *plain, "--set", "compute_dtype=bfloat16", "--output", tmp_path)
    assert code == 0, err
    record = read(tmp_path)
    assert record.predictions is not None and len(record.drift) == 2
    assert all(point.parameters is None for point in record.predictions.points)
    assert " ".join(out.split()).count("not predicted for bfloat16: as soon as rounding turns a first operand") == 2
    assert "predicted for bfloat16" in (tmp_path / "report.md").read_text()


def test_the_folder_has_the_report_and_its_records(controls: Path, dpsim: Dpsim) -> None:
    names = {path.name for path in controls.iterdir()}
    assert names == {"reproduce.json", "predictions.json", "index.html", "report.md"}
    text = (controls / "report.md").read_text()
    assert "Batch norm leaf, 8 leaves: identical, 2 runs on 1, 2 devices" in text
    assert "## Drift from one device" in text and "cause: batch norm" in text
    code, out, _ = dpsim("report", controls, "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["summary"]["identical"] is True and len(shown["points"]) == 4
    assert shown["points"][0]["digest"] == shown["points"][2]["digest"] != shown["points"][1]["digest"]
    assert {"digest", "losses_digest", "identical", "first_difference", "parameter_drift"} <= set(shown["points"][0])


def test_plain_sums_are_caught(dpsim: Dpsim) -> None:
    """One training that all ranks add up as a ring: every layer makes the same of every sample, the sums differ.

    Layers one number wide multiply without adding up, so that no processor's BLAS rounds otherwise in another shape.
    """
    code, out, _ = dpsim(
        "reproduce",
        "--model",
        "mlp:1",
        "--dataset",
        "synthetic:1x1x1,classes=3,train=512,test=8",
        "--steps",
        6,
        "--devices",
        2,
        "--set",
        "leaves=0",
        "--algorithm",
        "ring",
        "--fusion-threshold",
        "inf",
        "--json",
    )
    assert code == 0  # nothing was promised
    shown = json.loads(out)
    assert shown["summary"]["identical"] is None
    one, two = shown["points"]
    first = two["first_difference"]
    assert not two["identical"] and one["first_difference"] is None
    assert (first["step"], first["cause"]) == (1, "summation order")
    assert first["tensor"].startswith("optimizer/velocity/dense2.")  # the first layer that backward comes to
    assert 1 <= first["ulps"] < 1000 and first["kept"]
    assert 0.1 < two["parameter_drift"] / two["predicted_parameter_drift"] < 10


def test_a_saved_run_is_held_against(controls: Path, dpsim: Dpsim, tmp_path: Path) -> None:
    record = read(controls)
    other = msgspec.structs.replace(
        record.environment, processor="Another 1", variables={"OPENBLAS_CORETYPE": "Zen"}, numpy="9.9"
    )
    path = tmp_path / "saved.json"
    codec.write(path, changed_bit(msgspec.structs.replace(record, environment=other)))
    code, out, _ = dpsim("reproduce", *FLAGS, "--against", path)
    shown = " ".join(out.split())
    assert code == 0
    assert f"Compared with {path}, batch norm leaf, 8 leaves: step 2, parameters/dense1.weight" in shown
    assert "not held against it, for processor is Another 1 there" in shown and "NumPy is 9.9 there" in shown
    assert "OPENBLAS_CORETYPE is Zen there" in shown and "warning: the saved run is of another machine type" in shown


def test_a_difference_from_a_saved_run_on_the_same_machine_counts(controls: Path, dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    codec.write(path, changed_bit(read(controls)))
    code, out, _ = dpsim("reproduce", *FLAGS, "--against", path)
    assert code == 1 and "not held against it" not in out


def test_another_kernel_table_is_another_machine_type(controls: Path, dpsim: Dpsim, tmp_path: Path) -> None:
    record = read(controls)
    path = tmp_path / "saved.json"
    codec.write(path, msgspec.structs.replace(record, kernel_table="0123456789abcdef"))
    code, out, _ = dpsim("reproduce", *FLAGS, "--against", path)
    assert code == 0 and f"kernel table is 0123456789abcdef there, {record.kernel_table} here" in " ".join(out.split())


def test_a_run_is_identical_to_itself_saved(controls: Path) -> None:
    record = read(controls)
    beside = compare_with_saved(record, record, controls).saved_comparison
    assert beside is not None and beside.across_machines == ()
    assert [plan_name(plan) for plan in beside.compared] == ["1 device", "1 device", "2 devices, 0, auto, off"]
    assert beside.differences == (None, None, None)


def test_losses_that_do_not_have_their_digest_are_refused(controls: Path, dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "forged.json"
    stored = codec.read_raw(controls / RECORD, "reproduce")
    stored["trajectories"][0]["losses"][1] += 1e-9
    path.write_text(json.dumps(stored))
    code, _, err = dpsim("reproduce", *FLAGS, "--against", path)
    assert code == 2 and "the losses of trajectory 0 do not have the digest" in err


def changed_bit(record: ReproduceRecord) -> ReproduceRecord:
    """The record with another digest of dense1.weight from step 2 of its first trajectory on."""
    first, *others = record.trajectories
    place = first.tensors.index("parameters/dense1.weight")
    steps = [list(step) for step in first.steps]
    for step in steps[1:]:
        step[place] = "0" * 16
    changed = msgspec.structs.replace(first, steps=tuple(map(tuple, steps)))
    return msgspec.structs.replace(record, trajectories=(changed, *others))


def test_a_broken_promise_is_told_and_ends_with_1(
    controls: Path, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = read(controls)
    runs = list(record.runs)
    runs[2] = msgspec.structs.replace(runs[2], trajectory=runs[3].trajectory)
    broken = msgspec.structs.replace(record, runs=tuple(runs))
    monkeypatch.setattr("dpsim.harness.reproduce.measure.measure", lambda *_: broken)
    code, out, _ = dpsim("reproduce", *FLAGS)
    assert code == 1
    assert "warning: runs that are promised to be identical are not: 2 devices, 0, auto, off" in out
    assert "Batch norm leaf, 8 leaves: NOT IDENTICAL as promised; 1 of 2 runs differ" in out
    code, out, _ = dpsim("reproduce", *FLAGS, "--json")
    assert code == 1 and json.loads(out)["summary"]["identical"] is False


def test_ranks_that_disagree_keep_no_promise(controls: Path) -> None:
    record = read(controls)
    run = msgspec.structs.replace(record.runs[2], ranks_agree=False)
    assert not msgspec.structs.replace(record, runs=(*record.runs[:2], run, record.runs[3])).kept_promises


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--devices", "9"), "8 leaves cannot feed 9 devices"),
        (("--algorithm", "rings"), "did you mean 'ring'"),
        (("--set", "overlap=auto"), "unknown overlap 'auto'"),
        (("--batch-norm", "leaf,leaf"), "one or more different values"),
        (("--batch-norm", "group"), "unknown batch norm 'group'"),
        (("--set", "leaves=0", "--batch-norm", "leaf"), "batch_norm is leaf, and there are no leaves"),
        (("--set", "leaves=-1"), "leaves is -1"),
        (("--algorithm", "hierarchical", "--devices", "2"), "write it like --devices 2x1"),
        (("--steps", "0"), "steps is 0"),
        (("--set", "leaves=0", "--set", "wire_dtype=float16", "--algorithm", "ring"), "cannot send float16"),
        (("--model", "nml"), "nml"),
        (("--fusion-threshold", "big"), "big"),
        (("--against", "nowhere.json"), "cannot read the reproduce file nowhere.json"),
    ],
)
def test_mistakes_are_told_before_anything_runs(flags: tuple[str, ...], message: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim("reproduce", *flags)
    assert (code, out) == (2, "")
    assert message in err and "allowed:" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", "4"), "steps is 3 there, 4 here"),
        (("--set", "global_batch=25"), "global_batch is 24 there, 25 here"),
        (("--batch-norm", "global"), "no configuration to compare with, for batch norm global with 8 leaves"),
        (("--set", "leaves=9"), "with 9 leaves"),
        (("--set", "wire_dtype=float16"), "wire_dtype is None there, 'float16' here"),
        (("--set", "compute_dtype=bfloat16"), "compute_dtype is 'float32' there, 'bfloat16' here"),
    ],
)
def test_a_run_of_another_training_is_refused(
    flags: tuple[str, str], message: str, controls: Path, dpsim: Dpsim
) -> None:
    def name(flag: str, value: str) -> str:
        return value.partition("=")[0] if flag == "--set" else flag

    pairs = zip(FLAGS[::2], FLAGS[1::2], strict=True)
    given = [word for pair in pairs if name(*pair) != name(*flags) for word in pair]
    code, _, err = dpsim("reproduce", *given, *flags, "--against", controls / RECORD)
    assert code == 2 and message in err
