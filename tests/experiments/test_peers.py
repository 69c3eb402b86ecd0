"""The comparison with PyTorch: pairing, layouts, the search for the best setting, the ranks' job, and its errors."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nn_setup import Recorder, batch_for, bound
from process_tree import command_of

from dpsim.data import epoch_batches, load_dataset
from dpsim.errors import ConfigError, DpsimError
from dpsim.experiments.peers import measure, result
from dpsim.experiments.peers.__main__ import main
from dpsim.experiments.peers.result import SystemResult
from dpsim.experiments.peers.setting import (
    SYSTEMS,
    PeerComparison,
    Setting,
    Work,
    changed,
    choices,
    first_setting,
    shown,
)
from dpsim.nn import MODELS, build_model
from dpsim.replica import Batch
from dpsim.study.statistics import median_ratio

GLOO, OWN = first_setting("ddp-gloo"), first_setting("dpsim")


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


# Ratios from paired rounds.


def test_what_slows_a_whole_round_leaves_the_ratio_alone() -> None:
    own = np.exp(np.random.default_rng(0).standard_normal(12))  # rounds that differ tenfold
    ratio = median_ratio(list(1.5 * own), list(own))
    assert ratio.median == pytest.approx(1.5)
    assert ratio.low == pytest.approx(1.5) and ratio.high == pytest.approx(1.5)


def test_a_ratio_that_scatters_from_round_to_round_has_a_wide_interval() -> None:
    random = np.random.default_rng(1)
    ratio = median_ratio(list(random.uniform(1, 2, 12)), list(random.uniform(1, 2, 12)))
    assert ratio.low < ratio.median - 0.05 and ratio.high > ratio.median + 0.05
    assert median_ratio([3.0], [2.0]) == median_ratio([3.0, 3.0], [2.0, 2.0])


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([float("nan")], [1.0])])
def test_rounds_that_cannot_be_paired_are_refused(above: list[float], below: list[float]) -> None:
    with pytest.raises(ConfigError, match="paired rounds"):
        median_ratio(above, below)


# The same network in both layouts.


@given(st.lists(st.integers(1, 4), min_size=1, max_size=2) | st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_layouts_convert_there_and_back(shape: list[int]) -> None:
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    there = result.to_torch(value)
    assert there.flags.c_contiguous and result.from_torch(there).flags.c_contiguous
    assert np.array_equal(result.from_torch(there), value)


def test_pytorch_has_outputs_first() -> None:
    kernel_KKio = np.arange(3 * 3 * 2 * 5).reshape(3, 3, 2, 5)
    assert result.to_torch(kernel_KKio)[4, 1, 0, 2] == kernel_KKio[0, 2, 1, 4]
    dense_io = np.arange(6).reshape(2, 3)
    assert result.to_torch(dense_io)[2, 1] == dense_io[1, 2]


def test_tensors_are_matched_by_their_order_and_shapes() -> None:
    ours = {"conv1.weight": (3, 3, 2, 5), "dense1.weight": (5, 7), "dense1.bias": (7,)}
    theirs = {"0.weight": (5, 2, 3, 3), "2.weight": (7, 5), "2.bias": (7,)}
    assert result.match(ours, theirs) == dict(zip(theirs, ours, strict=True))
    with pytest.raises(DpsimError, match=r"first 2.weight \(5, 7\) and dense1.weight"):
        result.match(ours, theirs | {"2.weight": (5, 7)})
    with pytest.raises(DpsimError, match="4 tensors in PyTorch's, 3 in dpsim's"):
        result.match(ours, theirs | {"3.weight": (1,)})


def test_other_gradients_or_losses_are_not_timed() -> None:
    reference = {"a": np.array([3.0, -4.0]), "b": np.array([0.5])}
    errors = result.gradient_errors({"a": np.array([3.0, -4.5]), "b": np.array([0.5])}, reference)
    assert errors == {"a": pytest.approx(0.1), "b": 0.0}
    with pytest.raises(DpsimError, match=r"someone does not train as dpsim does: the first gradient of a differs"):
        result.require_agreement("someone", "resnet20", errors, 0.0)
    with pytest.raises(DpsimError, match=r"the first gradient of a differs by 0.01 .*\n.*within 0.001"):
        result.require_agreement("someone", "mlp", {"a": 0.01}, 0.0)
    with pytest.raises(DpsimError, match=r"the losses of 5 steps differ"):
        result.require_agreement("someone", "mlp", {"a": 1e-6}, result.loss_error([2.0, 1.0], [2.0, 1.001]))
    result.require_agreement("someone", "mlp", {"a": 1e-6}, result.loss_error([2.0, 1.0], [2.0, 1.0 + 1e-6]))
    for bad in (np.nan, np.inf):
        assert result.gradient_errors({"a": np.array([bad, 1.0])}, {"a": np.ones(2)}) == {"a": float("inf")}
        assert result.loss_error([bad], [1.0]) == float("inf")


@pytest.mark.parametrize("devices", [1, 3])
def test_no_step_has_a_short_batch(devices: int) -> None:
    work = Work(model="mlp:4", devices=devices, local_batch=5)
    samples = len(load_dataset(work.dataset).train_y)
    assert {len(batch) for batch in epoch_batches(samples, work.global_batch, 0, 0)} == {5 * devices}


# The search.


def test_the_search_keeps_the_best_of_each_choice_and_drops_the_others() -> None:
    costs = {"optimizer": {"foreach": 3.0, "fused": 1.0}, "bucket_cap_mb": {1: 0.5, 25: 0.0, 100: 2.0}}
    built: set[Setting] = set()

    def times_of(settings: list[Setting]) -> list[float]:
        built.update(settings)
        return [sum(cost[dict(setting)[field]] for field, cost in costs.items()) for setting in settings]

    dimensions: list[list[dict[str, Any]]] = [[{"optimizer": "fused"}], [{"bucket_cap_mb": 1}, {"bucket_cap_mb": 100}]]
    best, tried = measure.search(GLOO, dimensions, times_of, built.remove)
    assert best == changed(GLOO, {"optimizer": "fused"})
    assert built == {best}
    assert [(choice, step_s) for _, step_s, choice in tried] == [(0, 3.0), (0, 1.0), (1, 1.0), (1, 1.5), (1, 3.0)]
    assert measure.search(GLOO, [], times_of, built.remove) == (GLOO, [])


@pytest.mark.parametrize("model", ["mlp", "resnet20"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_whatever_wins_each_choice_gives_a_setting_that_can_run(system: str, model: str) -> None:
    work = Work(model=model, devices=1 if system == "torch" else 2)
    for winner in range(3):
        actual: set[Setting] = set()

        def times_of(settings: list[Setting], wins: int = winner, seen: set[Setting] = actual) -> list[float]:
            seen.update(settings)
            return [float(i != min(wins, len(settings) - 1)) for i in range(len(settings))]

        measure.search(first_setting(system), choices(system, work), times_of, lambda _: None)
        for setting in actual:
            values = dict(setting)
            assert shown(setting)
            if system == "dpsim":
                work.plan(values)
            else:  # what DDP has copied cannot be reduced after backward
                assert values["bucket_view"] or values["allreduce"] not in ("started", "after")
    formats = {dict(setting).get("memory_format", "") for setting in actual}
    assert ("channels-last" in formats) == (model == "resnet20" and system != "dpsim")


# How long is timed.


def test_a_visit_has_as_many_steps_as_its_time_holds() -> None:
    actual = [measure.counted_steps(step_s, 0.6, 6) for step_s in (math.inf, 1.0, 0.2, 0.15, 0.1, 0.001)]
    assert actual == [2, 2, 3, 4, 6, 6]
    assert measure.counted_steps(0.2, 0.6, 1) == 1


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 10), (0.5, 14)])
def test_rounds_end_when_the_ratios_are_known_or_at_the_most(
    monkeypatch: pytest.MonkeyPatch, noise: float, expected: int
) -> None:
    random = np.random.default_rng(0)

    class Training:
        errors = (0.0, 0.0)

        def __init__(self, system: str) -> None:
            self.factor = 1 if system == "dpsim" else 2

        def drop(self) -> None:
            pass

        def visit(self, seconds: float, *, communicate: bool = True) -> float:
            return float(random.uniform(1.0, 1.0 + noise)) * self.factor

    class Trainings(contextlib.nullcontext["Trainings"]):
        def __init__(self, comparison: PeerComparison) -> None:
            super().__init__(self)

        def build(self, system: str, work: Work, setting: Setting) -> Training:
            return Training(system)

    monkeypatch.setattr(measure, "_Trainings", Trainings)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    results = measure.measure(PeerComparison(rounds=14), lambda _: None)
    assert [len(result.step_s) for result in results] == [expected] * 5
    assert [len(result.alone_step_s) for result in results] == [0, 0] + [expected] * 3


# Jobs.


def test_a_job_obeys_until_it_is_closed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    job = measure.start_job("dpsim", Work(model="mlp:6,5", devices=2, local_batch=3), tmp_path, {}, pin=True)
    reference = str(tmp_path / "reference.npz")
    build = {"do": "build", "training": 7, "setting": dict(OWN), "save": True, "reference": reference}
    first, second = job.ask(build)
    assert max(first["gradient_errors"].values()) == 0.0 and "gradient_errors" not in second
    assert len(first["loss_sums"]) == len(second["loss_sums"]) == result.CHECKED_STEPS
    for communicate in (True, False):
        replies = job.ask({"do": "visit", "training": 7, "steps": 3, "communicate": communicate})
        assert [len(reply["end_s"]) for reply in replies] == [3, 3]
        assert all(reply["end_s"] == sorted(reply["end_s"]) for reply in replies)
    assert len(ranks()) == 2
    until_s = time.monotonic() + 20
    while {rank.status() for rank in ranks()} != {psutil.STATUS_SLEEPING}:
        assert time.monotonic() < until_s, "ranks that wait do not sleep"
    job.ask({"do": "drop", "training": 7})
    job.close()
    assert not ranks()


def ranks() -> list[psutil.Process]:
    """The rank processes of jobs that this process started."""
    return [
        p for p in psutil.Process().children(recursive=True) if {"dpsim.launch.worker", "-P"} < set(command_of(p)[:4])
    ]


def test_what_a_rank_raises_reaches_the_caller(tmp_path: Path) -> None:
    job = measure.start_job("dpsim", Work(model="mlp:6", devices=2, local_batch=3), tmp_path, {}, pin=True)
    setting = {"type": "dpsim", "overlap": "psychic"}
    with pytest.raises(DpsimError, match="overlap"):
        job.ask({"do": "build", "training": 0, "setting": setting, "save": False, "reference": ""})
    job.close()


# The command.


def test_dpsim_alone_trains_the_same_with_every_setting(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--model", "mlp:16,8", "--devices", "1,2", "--local-batch", "4", "--systems", "dpsim"]
    file = tmp_path / "peers.json"
    code, out, err = command(capsys, *options, "--rounds", "2", "--steps", "2", "--output", file)
    assert code == 0 and "medians of 2 interleaved rounds" in out, err
    printed = json.loads(file.read_text())
    assert {key: printed[key] for key in ("schema", "command")} == {"schema": "dpsim.output/1", "command": "peers"}
    actual = [(point["system"], point["devices"], point["global_batch"]) for point in printed["points"]]
    assert actual == [("dpsim", 1, 4), ("dpsim", 2, 8)]
    for point in printed["points"]:
        assert point["gradient_error"] < 1e-5 and point["loss_error"] < 1e-5
        assert len(point["rounds_step_s"]) == 2
        assert point["images_per_s"] == pytest.approx(point["global_batch"] / point["measured_step_s"])
        assert (point["step_without_communication_s"] is None) == (point["devices"] == 1)
    assert len(printed["points"][1]["tried"]) > 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "mpl"], "did you mean 'mlp'"),
        (["--model", "resnet20:3"], "unknown model"),
        (["--systems", "dpsim,gloo"], "did you mean 'ddp-gloo'"),
        (["--systems", "ddp-gloo"], "all are compared with it"),
        (["--devices", "2,2"], "different ones"),
        (["--rounds", "0"], "rounds is 0"),
        (["--local-batch", "0"], "local batch is 0"),
        (["--output", "/proc/nothing/x.json"], "cannot write"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "") and said in err


def test_without_pytorch_the_remedy_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else actual(name, *rest)
    )
    code, out, err = command(capsys, "--model", "mlp:4")
    assert (code, out) == (2, "")
    assert "PyTorch is not installed" in err and "pip install torch" in err


def test_inside_an_mpi_job_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setattr(measure.rank_info, "job", lambda: measure.rank_info.MpiJob(launcher="mpiexec", rank=0, size=2))
    with pytest.raises(ConfigError, match="inside an MPI job"):
        measure.measure(PeerComparison(systems=("dpsim",)), print)


def test_the_table_names_the_fastest_peer_and_the_setting_of_each() -> None:
    def measured(system: str, devices: int, setting: Setting, step_s: float) -> SystemResult:
        alone = (step_s / 2,) * 3 if devices > 1 else ()
        return SystemResult(system, devices, setting, 0.0, 0.0, ((setting, step_s, 0),), (step_s,) * 3, alone)

    by_mpi = changed(GLOO, {"allreduce": "started", "bucket_view": True, "thread_level": "single"})
    results = [
        measured("dpsim", 1, OWN, 0.02),
        measured("torch", 1, first_setting("torch"), 0.01),
        measured("dpsim", 2, OWN, 0.02),
        measured("ddp-gloo", 2, GLOO, 0.05),
        measured("ddp-mpi", 2, by_mpi, 0.03),
    ]
    comparison = PeerComparison(local_batch=10)
    points = result.points(comparison, results)
    assert [point["images_per_s_ratio"] for point in points] == [None, 0.5, None, 2.5, 1.5]
    assert points[3]["exposed_communication_s"] == pytest.approx(0.025)
    assert points[3]["images_per_s"] == pytest.approx(400)
    printed = result.summary(points)
    assert printed["best_peer"] == {"1": {"system": "torch", "ratio": 0.5}, "2": {"system": "ddp-mpi", "ratio": 1.5}}
    rows = [tuple(column.cell(point) for column in result.COLUMNS) for point in points]
    assert rows[3] == ("ddp-gloo", "2", "400", "50 ms", "25 ms", "25 ms", "2.50 (2.50 to 2.50)")
    assert "thread_level single" in result.notes(results)[4]
    assert "thread_level" not in result.notes(results)[3]


# With PyTorch.


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_every_system_trains_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--model", "mlp:24,16", "--devices", "2", "--local-batch", "6", "--rounds", "2", "--steps", "2"]
    code, _, err = command(capsys, *options, "--output", file := tmp_path / "peers.json")
    assert code == 0, err
    printed = json.loads(file.read_text())
    systems = [(point["system"], point["devices"]) for point in printed["points"]]
    assert systems == [("dpsim", 1), ("torch", 1), ("dpsim", 2), ("ddp-gloo", 2), ("ddp-mpi", 2)]
    for point in printed["points"]:
        assert point["gradient_error"] < 1e-4 and point["loss_error"] < 1e-4
    assert set(printed["summary"]["images_per_s_ratio"]) == {"torch-1", "ddp-gloo-2", "ddp-mpi-2"}


@pytest.mark.torch
@pytest.mark.parametrize("model", ["mlp:12,9", "resnet20"])
def test_gradients_are_the_same_in_float64(model: str) -> None:
    if model.startswith("resnet") and model not in MODELS:
        pytest.skip("dpsim has no resnet20 yet")
    import torch

    from dpsim.experiments.peers.torch_training import build as build_in_torch

    work = Work(model=model, devices=1)
    module, names = build_in_torch(work)
    network = build_model(work.token, work.shape, 10, np.float64)
    parameters, gradients = bound(network)
    x, labels = batch_for(network, 5, classes=10)
    for name, value in module.double().named_parameters():
        parameters[names[name]][...] = result.from_torch(value.detach().numpy())
    sums = network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 5)), Recorder())
    pictures = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    loss = torch.nn.functional.cross_entropy(module(pictures), torch.from_numpy(labels), reduction="sum")
    loss.backward()
    assert sums.loss == pytest.approx(loss.item(), rel=1e-10)
    actual = {names[name]: result.from_torch(value.grad.numpy()) for name, value in module.named_parameters()}
    assert max(result.gradient_errors(actual, gradients).values()) < 1e-9


@pytest.mark.torch
def test_resnet20_has_the_published_size() -> None:
    import torch

    from dpsim.experiments.peers.torch_training import resnet20

    model = resnet20(3)
    assert sum(value.numel() for value in model.parameters()) == 269_722
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 10)
    assert len([value for value in model.parameters() if value.ndim == 4]) == 19
