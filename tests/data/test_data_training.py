"""Training and evaluation on data sets in files, through the command line and on 1 to 4 ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import pictures, write_cifar

Dpsim = Callable[..., tuple[int, str, str]]
TESTS = 7  # samples: no number of ranks divides it


def trained(dpsim: Dpsim, dataset: str, devices: int) -> dict[str, Any]:
    code, out, err = dpsim(
        "train",
        "--model",
        "mlp:8",
        "--dataset",
        dataset,
        "--devices",
        str(devices),
        "--global-batch",
        "10",
        "--steps",
        "12",
        "--learning-rate",
        "0.001",
        "--json",
    )
    assert code == 0, err
    actual: dict[str, Any] = json.loads(out)
    return actual


@pytest.mark.slow
def test_cifar_in_a_relative_folder_trains_and_tests_alike_on_any_number_of_ranks(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "my data, new", test=TESTS)
    monkeypatch.chdir(tmp_path)
    actual = [trained(dpsim, "cifar10:my data, new", devices) for devices in (1, 2, 3)]
    losses = [run["points"][0]["losses"] for run in actual]
    correct = [run["summary"]["test_accuracy"] * TESTS for run in actual]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert correct[0] == correct[1] == correct[2] == pytest.approx(round(correct[0]))
    assert losses[0][-1] < 0.8 * losses[0][0] and correct[0] > 0


def test_evaluation_on_files_is_exact_at_any_number_of_ranks(together: Callable[..., Any], tmp_path: Path) -> None:
    """Also with fewer test samples than ranks, and with samples that have no height and width."""
    write_cifar(tmp_path / "some", test=TESTS)
    write_cifar(tmp_path / "few", test=2)
    x, y = pictures(57, (9,), classes=3)
    np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], x_test=x[50:], y_test=y[50:])
    tokens = [(f"cifar10:{tmp_path}/some", TESTS), (f"cifar10:{tmp_path}/few", 2), (f"npz:{tmp_path}/rows.npz", TESTS)]
    cases = [{"model": "mlp:8", "dataset": token, "seed": 3, "plan": {"global_batch": 10}} for token, _ in tokens]
    alone, *others = together(*(("ranks_runtime:evaluated", {"cases": cases}, n) for n in (1, 2, 3, 4)))
    for devices, actual in enumerate(others, start=2):
        for (token, size), (expected,), sums in zip(tokens, alone, actual, strict=True):
            assert len(sums) == devices
            for each in sums:
                assert (each["samples"], each["correct"]) == (size, expected["correct"]), token
                assert each["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_data_set_that_is_not_there_is_a_mistake_however_many_ranks_look_for_it(dpsim: Dpsim, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"\0" * 3072)
    code, out, err = dpsim("train", "--dataset", f"cifar10:{tmp_path}", "--devices", "3", "--steps", "1")
    assert (code, out) == (2, "") and "Traceback" not in err
    assert err.count("test_batch.bin has 3072 bytes") == 1 and "allowed: one or more whole records" in err
