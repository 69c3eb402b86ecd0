"""The Python API on 1 to 4 ranks: a user's own model, callbacks, who is who, and refusals."""

from __future__ import annotations

import functools
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import dpsim
from dpsim.arguments import PredictionSettings, TrainingSettings
from dpsim.launch import jobs
from dpsim.plan import Plan

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    env = {"PYTHONPATH": str(Path(__file__).parent / "support")}
    actual = {}
    for devices in (1, 2, 3, 4):
        argument = {"folder": str(tmp_path_factory.mktemp("run"))}
        actual[devices] = jobs.on_ranks("ranks_api:everything", argument, devices=devices, env=env, timeout_s=240)
    return actual


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_every_rank_knows_itself_and_gets_the_same_result(devices: int, runs: dict[int, list[dict[str, Any]]]) -> None:
    ranks = runs[devices]
    assert [mine["rank"] for mine in ranks] == list(range(devices))
    assert all(mine["size"] == devices and mine["local"] == [mine["rank"], devices] for mine in ranks)
    for key in ("accuracy", "losses", "digest", "short"):
        assert all(mine[key] == ranks[0][key] for mine in ranks)
    assert ranks[0]["short"][0] == 3


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_model_of_ones_own_trains_alike_on_any_number_of_ranks(
    devices: int, runs: dict[int, list[dict[str, Any]]]
) -> None:
    one, several = runs[1][0], runs[devices][0]
    assert one["losses"][0] == pytest.approx(math.log(10), rel=1e-6)
    assert several["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["accuracy"] > 0.8 and several["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)


@pytest.mark.parametrize("devices", [1, 3])
def test_callbacks_are_told_everything_on_all_ranks_or_on_one(
    devices: int, runs: dict[int, list[dict[str, Any]]]
) -> None:
    for mine in runs[devices]:
        seen = mine["everywhere"]
        kinds = [entry if isinstance(entry, str) else entry[0] for entry in seen]
        assert kinds == ["begin", *["step"] * 15, "epoch", *["step"] * 15, "epoch", "end"]  # 1438 samples, 100 a step
        assert [entry[1:4] for entry in seen if entry[0] == "epoch"] == [[1, 15, 30], [2, 30, 30]]
        assert seen[-1] == ["end", mine["accuracy"]] and mine["tests"][-1] == mine["accuracy"]
        assert mine["last"] == (seen if mine["rank"] == devices - 1 else [])
    steps = [[entry[1:] for entry in mine["everywhere"] if entry[0] == "step"] for mine in runs[devices]]
    for of_ranks in zip(*steps, strict=True):
        assert sum(samples for samples, _ in of_ranks) == of_ranks[0][1]
    first = next(entry for entry in runs[devices][0]["everywhere"] if entry[0] == "epoch")
    sizes = [whole for _, whole in steps[0][:15]]
    total = sum(loss * size for loss, size in zip(runs[devices][0]["losses"], sizes, strict=False))
    assert first[4] == pytest.approx(total / sum(sizes))
    assert 0 < first[5] < 1


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_run_goes_on_from_its_checkpoints_to_the_same_bits(
    devices: int, runs: dict[int, list[dict[str, Any]]]
) -> None:
    assert all(mine["resumed"] == [8, True, True] for mine in runs[devices])


def test_mistakes_say_what_was_given_and_what_is_allowed(runs: dict[int, list[dict[str, Any]]]) -> None:
    epochs, field, devices, algorithm, gradients, one_shot = runs[2][1]["refused"]
    assert "0 epochs" in epochs and "allowed: 1 or more" in epochs
    assert "unknown argument of fit: 'fusionrule'" in field and "did you mean 'fusion_rule'" in field
    assert "'devices'" in devices
    assert "unknown algorithm 'rign'" in algorithm
    assert "weight (10, 64)" in gradients and "weight (64, 10), bias (10,)" in gradients
    assert "a one-shot allreduce of" in one_shot and "allowed: at most 64 KiB" in one_shot


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_all_ranks_refuse_what_one_of_them_finds_wrong(devices: int, runs: dict[int, list[dict[str, Any]]]) -> None:
    assert len({mine["refused"][-1] for mine in runs[devices]}) == 1


def test_settings_are_typed_as_in_a_plan_and_stand_in_the_signature() -> None:
    of_plan = {name: kind for name, kind in get_type_hints(Plan).items() if name != "devices"} | {"layout": str}
    training = get_type_hints(TrainingSettings) | {"global_batch": int}
    assert training == {name: of_plan[name] for name in training} and set(training) == set(of_plan)
    others = {"layout", "fusion_threshold_bytes"}
    assert set(get_type_hints(PredictionSettings)) - {"local_batch"} == set(of_plan) - others
    assert {*training} <= set(inspect.signature(dpsim.fit).parameters)
    assert {"devices", "threshold", "local_batch", "strategy"} <= set(inspect.signature(dpsim.predict).parameters)
    assert dpsim.predict.__module__ == "dpsim.entry"


def test_ranks_know_what_the_program_that_starts_them_registered(tmp_path: Path) -> None:
    script = tmp_path / "registers.py"
    script.write_text(
        "from dataclasses import replace\n"
        "from helper import NAME\n"
        "from dpsim.fusion_rules import FUSION_RULES\n"
        "from dpsim.launch import jobs, program\n"
        "FUSION_RULES.register(replace(FUSION_RULES['one'], name=NAME))\n"
        "if __name__ == '__main__':\n"
        "    with program.on_ranks_too():\n"
        "        print(jobs.on_ranks('ranks_api:registered', {'rule': NAME}, devices=2))\n"
    )
    (tmp_path / "helper.py").write_text("NAME = 'mine'\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)
    done = run([sys.executable, script], env=environment)
    assert done.stdout == "[True, True]\n", done.stderr
    script.write_text(script.read_text().replace("if __name__ == '__main__':", "if True:"))
    done = run([sys.executable, script], env=environment)
    assert "registers.py starts ranks while a rank reads what it registers" in done.stderr


def test_a_folder_named_dpsim_where_a_program_runs_does_not_hide_the_package(tmp_path: Path) -> None:
    (tmp_path / "dpsim" / "dpsim").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import dpsim; print(dpsim.fit.__name__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "fit\n", done.stderr


def test_an_uncaught_exception_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import dpsim, numpy as np\n"
        "def model(w, x, labels):\n"
        "    if dpsim.rank() == 1:\n"
        "        raise ZeroDivisionError('the reason')\n"
        "    return 0.0, 0, {'w': np.zeros(1, np.float32)}\n"
        "dpsim.fit(dpsim.FunctionReplica({'w': np.zeros(1, np.float32)}, model), 'digits', global_batch=64)\n"
    )
    done = _mpiexec(2, script)
    assert done.returncode != 0 and "ZeroDivisionError: the reason" in done.stderr


def test_a_mistake_on_rank_0_alone_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "resumes.py"
    script.write_text(
        "import dpsim, numpy as np\n"
        "data = dpsim.load_dataset('digits')\n"
        "model = dpsim.build_model('mlp:4', data.input_shape, data.classes)\n"
        "dpsim.fit(model, data, global_batch=64, resume='nowhere')\n"
    )
    done = _mpiexec(2, script)
    assert done.returncode == 2 and "dpsim: there is no folder nowhere" in done.stderr


def test_a_name_that_dpsim_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="rnak"):
        dpsim.rnak  # noqa: B018
    assert set(dpsim.__all__) <= set(dir(dpsim)) and all(hasattr(dpsim, name) for name in dpsim.__all__)


def _mpiexec(ranks: int, script: Path) -> subprocess.CompletedProcess[str]:
    path = jobs.mpiexec_path()
    assert path is not None
    command: list[str | Path] = [path, "-n", str(ranks), sys.executable, script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    return run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
