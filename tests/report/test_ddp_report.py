"""Reports of PyTorch's DDP call things by DDP's names, and show dpsim's own runtime where it was measured beside it."""

from __future__ import annotations

import msgspec
import pytest
from report_factory import PACED, sweep

from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.questions import QUESTIONS
from dpsim.harness.sweep.questions.threshold import OWN_RUNTIME
from dpsim.records.comparison import Comparison
from dpsim.report.charts import Lines
from dpsim.report.content import Facts
from dpsim.report.sweep.content import answers, content, tables
from dpsim.report.sweep.warnings import warnings
from dpsim.report.words import field_name, threshold_noun


@pytest.fixture(scope="module")
def of_ddp() -> Comparison:
    """A comparison as one of a script under DDP has it, on two devices alone, with dpsim's own runtime beside."""
    predictions, results = sweep(networks=(PACED,), devices=(2,), overlaps=("thread",))
    others = [
        msgspec.structs.replace(point, setting=msgspec.structs.replace(point.setting, compute="emulated"))
        for point in results.points
        if not point.setting.repeat
    ]
    comparison = compare(predictions, msgspec.structs.replace(results, other_points=tuple(others)))
    experiment = msgspec.structs.replace(comparison.experiment, script="/somewhere/train.py")
    of_runtime = {
        "points": tuple(each.replaced(runtime="torch-ddp-mpi") for each in comparison.points),
        "groups": tuple(msgspec.structs.replace(each, runtime="torch-ddp-mpi") for each in comparison.groups),
    }
    return msgspec.structs.replace(comparison, experiment=experiment, **of_runtime)


def drawn(comparison: Comparison) -> Lines:
    """The only panel of the main figure."""
    (panel,) = QUESTIONS["fusion-threshold"].chart(comparison).panels
    assert isinstance(panel, Lines)
    return panel


def test_the_threshold_of_ddp_is_its_bucket_cap(of_ddp: Comparison) -> None:
    assert (field_name("fusion_threshold_bytes"), threshold_noun("dpsim")) == ("fusion threshold", "threshold")
    assert field_name("fusion_threshold_bytes", "torch-ddp-gloo") == threshold_noun("torch-ddp-gloo") == "bucket cap"
    none: Facts = ()
    page = content(of_ddp, none, none)
    assert page.heading == "train.py under PyTorch's DDP: predicted, then measured"
    assert page.question.startswith("Which bucket cap from 0 to inf")
    assert all("bucket cap" in text and "threshold" not in text for text in answers(of_ddp))
    assert drawn(of_ddp).x_label == "bucket cap"


def test_without_one_device_there_is_no_column_of_speedups(of_ddp: Comparison) -> None:
    heads = [column.head for column in tables(of_ddp)[0].columns]
    assert "bucket cap" in heads and "speedup" not in heads and "predicted speedup" not in heads
    predictions, results = sweep()
    assert "speedup" in [column.head for column in tables(compare(predictions, results))[0].columns]


def test_the_figure_shows_dpsims_own_runtime_as_emulated(of_ddp: Comparison) -> None:
    assert OWN_RUNTIME in {series.name for series in drawn(of_ddp).series} and "emulated" in OWN_RUNTIME
    without = compare(*sweep(networks=(PACED,), devices=(2,), overlaps=("thread",)))
    assert OWN_RUNTIME not in {series.name for series in drawn(without).series}


def test_doubts_say_by_what_ddp_communicated(of_ddp: Comparison) -> None:
    few = msgspec.structs.replace(of_ddp, points=tuple(point.replaced(samples=3) for point in of_ddp.points))
    (doubt,) = (warning for warning in warnings(few) if warning.kind == "few-samples")
    assert f"{PACED} (emulated), PyTorch DDP by an MPI hook, 2 devices" in doubt.text
