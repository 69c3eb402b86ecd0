"""``dpsim predict --target-loss``: steps times the predicted step, and the recommended devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from published_files import EXPERIMENTS

from dpsim import codec
from dpsim.records.convergence import Convergence, ConvergenceFile

Dpsim = Callable[..., tuple[int, str, str]]
FILES = (
    "--workload",
    EXPERIMENTS / "machines" / "googlenet_k80.toml",
    "--machine",
    EXPERIMENTS / "machines" / "k80_10gbe.toml",
)


@pytest.fixture
def convergence(tmp_path: Path) -> Path:
    path = tmp_path / "convergence.json"
    fit = Convergence(
        model="googlenet",
        dataset="pictures",
        target_loss=0.5,
        min_steps=100.0,
        noise_batch=256.0,
        batches=(64, 128, 256),
        learning_rate=0.1,
        reference_batch=64,
        momentum=0.9,
    )
    codec.write(path, ConvergenceFile(convergence=(fit,)))
    return path


def test_points_have_the_time_to_the_target_and_a_sentence_recommends_devices(convergence: Path, dpsim: Dpsim) -> None:
    flags = ("--devices", "1,2,4,32", "--local-batch", "64", "--target-loss", f"0.5:{convergence}")
    code, out, err = dpsim("predict", *FILES, *flags, "--json")
    assert code == 0, err
    shown = json.loads(out)
    for point in shown["points"]:
        steps = 100 * (1 + 256 / point["global_batch"])
        assert point["steps_to_target"] == pytest.approx(steps)
        assert point["time_to_target_s"] == pytest.approx(steps * point["predicted_step_s"])
        share = 1 / (1 + point["global_batch"] / 256)
        assert point["goodput_images_per_s"] == pytest.approx(point["images_per_s"] * share)
    advice, rough = shown["summary"]["time_to_target"]
    assert "Training loss 0.5 (googlenet on pictures)" in advice and "device" in advice
    assert "treat those at 2048 as rough" in rough
    code, out, err = dpsim("predict", *FILES, *flags)
    assert code == 0 and "target" in out and "Training loss 0.5 (googlenet on pictures)" in " ".join(out.split())


def test_a_target_without_a_fit_is_answered_with_those_there_are(convergence: Path, dpsim: Dpsim) -> None:
    flags = ("predict", *FILES, "--devices", "2", "--target-loss")
    code, _, err = dpsim(*flags, f"0.1:{convergence}")
    assert code == 2 and "0.5 (googlenet)" in err and "Traceback" not in err
    for wrong in ("0.5", f"low:{convergence}", f"nan:{convergence}"):
        code, _, err = dpsim(*flags, wrong)
        assert code == 2 and "like 0.5:FOLDER/convergence.json" in err
