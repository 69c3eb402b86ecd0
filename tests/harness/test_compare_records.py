"""Damaged or foreign records are refused with a FileFormatError, never with another error."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_factory import sweep

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.harness.sweep.compare import compare
from dpsim.records.sweep import Predictions, Results, read_predictions, read_results
from dpsim.report.page import markdown
from dpsim.report.sweep.content import content
from dpsim.report.sweep.warnings import warnings

PREDICTIONS, RESULTS = sweep(networks=("node",), rounds=2, per_round=1)
RAW: dict[str, Any] = {
    "predictions": codec.to_builtins(PREDICTIONS),
    "results": codec.to_builtins(RESULTS),
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**18, 10**30),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from(["inf", "-inf", "nan", -1, 0, 1e308, 1e-320, "node", [], {}, [0.0], "paced:"]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a nested value."""
    actual: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        actual.append((value, key))
        actual += _slots(inner)
    return actual


def _resealed(predictions: Predictions, results: Results) -> Results:
    """Results that name these predictions, so that the comparison has more than the hash to refuse them by."""
    return msgspec.structs.replace(
        results, predictions_sha256=codec.digest(predictions), experiment=predictions.experiment
    )


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data(), which=st.sampled_from(["predictions", "results"]))
def test_changed_records_read_or_raise_a_file_format_error(data: st.DataObject, which: str, tmp_path: Path) -> None:
    raw = copy.deepcopy(RAW)
    slots = _slots(raw[which])
    interesting = [s for s in slots if not isinstance(s[0], list)]
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(interesting if data.draw(st.booleans()) else slots))
        action = data.draw(st.sampled_from(["set", "delete", "twice"]))
        if action == "set":
            container[key] = data.draw(VALUES)
        elif action == "delete" and isinstance(container, dict):
            container.pop(key, None)
        elif isinstance(container, list):
            container.append(copy.deepcopy(container[-1]))
    try:
        for name in raw:
            (tmp_path / f"{name}.json").write_text(json.dumps(raw[name]), encoding="utf-8")
        predictions = read_predictions(tmp_path / "predictions.json")
        results = read_results(tmp_path / "results.json")
        if which == "predictions" and data.draw(st.booleans()):
            results = _resealed(predictions, results)
        comparison = compare(predictions, results)
        assert markdown(content(comparison, (), ()), ()).encode()
        warnings(comparison)
    except FileFormatError as error:
        assert error.given


@settings(max_examples=20)
@given(cut=st.floats(0, 1), junk=st.binary(max_size=4))
def test_cut_or_scribbled_files_raise_a_file_format_error(
    cut: float, junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "results.json"
    whole = json.dumps(RAW["results"]).encode()
    at = int(cut * (len(whole) - 1))
    path.write_bytes(whole[:at] + junk)
    with pytest.raises(FileFormatError):
        read_results(path)


def test_other_predictions_than_those_measured_against_are_refused() -> None:
    later = msgspec.structs.replace(PREDICTIONS, predicted_at="2025-01-02T00:00:00+00:00")
    with pytest.raises(FileFormatError, match="SHA-256") as caught:
        compare(later, RESULTS)
    assert caught.value.allowed
    assert caught.value.remedy


def test_results_of_another_experiment_are_refused() -> None:
    other = msgspec.structs.replace(RESULTS, experiment=msgspec.structs.replace(RESULTS.experiment, seed=7))
    with pytest.raises(FileFormatError, match="different experiments"):
        compare(PREDICTIONS, other)


def _first_run(**changes: Any) -> Results:
    run = msgspec.structs.replace(RESULTS.points[0], **changes)
    return msgspec.structs.replace(RESULTS, points=(run, *RESULTS.points[1:]))


@pytest.mark.parametrize(
    "changes",
    [
        {"step_s": ()},
        {"step_s": (math.nan, 1.0)},
        {"step_s": (-1.0, 1.0)},
        {"step_s": (0.0, 1.0)},
        {"step_s": (1.0,)},
        {"exposed_communication_s": (-1.0, 0.0)},
        {"round": (1,)},
    ],
)
def test_samples_that_cannot_have_been_measured_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FileFormatError):
        compare(PREDICTIONS, _first_run(**changes))


def _predictions(points: tuple[Any, ...]) -> tuple[Predictions, Results]:
    changed = msgspec.structs.replace(PREDICTIONS, points=points)
    return changed, msgspec.structs.replace(RESULTS, predictions_sha256=codec.digest(changed))


def test_a_measured_point_that_was_not_predicted_is_refused() -> None:
    with pytest.raises(FileFormatError, match="was not predicted"):
        compare(*_predictions(PREDICTIONS.points[1:]))


def test_a_point_held_twice_is_refused() -> None:
    with pytest.raises(FileFormatError, match="twice"):
        compare(*_predictions((PREDICTIONS.points[0], *PREDICTIONS.points)))


def test_a_prediction_without_its_nulls_is_refused() -> None:
    bare = tuple(msgspec.structs.replace(p, null_step_s={}) for p in PREDICTIONS.points)
    with pytest.raises(FileFormatError, match="lacks the null"):
        compare(*_predictions(bare))


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(FileFormatError, match="Unicode"):
        compare(PREDICTIONS, msgspec.structs.replace(RESULTS, warnings=("\ud800",)))
    with pytest.raises(FileFormatError, match="Unicode"):
        compare(msgspec.structs.replace(PREDICTIONS, predicted_at="\ud800"), RESULTS)
