"""Models from one place: built-in tokens, and functions of the user's own in files and packages, in every command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from nn_setup import Recorder, batch_for, bound

from dpsim.errors import ConfigError
from dpsim.harness.train.resume import changed_model, run_of, stored
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.records.train import TrainConfig
from dpsim.replica import Batch, Capabilities
from dpsim.runtime.checkpoint import Checkpoint, Header
from dpsim.study import models
from dpsim.study.profile import ProfileConfig, profile

Dpsim = Callable[..., tuple[int, str, str]]
SHAPE, CLASSES = (8, 8, 1), 10
DATA = "synthetic:4x4x1,classes=10,train=96,test=8"
OWN = """
from __future__ import annotations
from dataclasses import dataclass
import numpy as np
import dpsim

@dataclass
class Softmax:  # a dataclass needs its module in sys.modules
    classes: int

    def __call__(self, w, x, labels):
        x, target = x.reshape(len(x), -1), np.eye(self.classes, dtype=x.dtype)[labels]
        p = np.exp(x @ w["w"])
        p /= p.sum(axis=1, keepdims=True)
        return -np.log(p[target > 0]).sum(), int((p.argmax(axis=1) == labels).sum()), {"w": x.T @ (p - target)}

def model(input_shape, classes):
    start = {"w": np.zeros((int(np.prod(input_shape)), classes), np.float32)}
    return dpsim.FunctionReplica(start, Softmax(classes))

def other(input_shape, classes):
    return len(input_shape)

def nothing(input_shape, classes):
    pass

def unfit(input_shape, classes):
    return dpsim.FunctionReplica({"w": np.zeros(3, np.int32)}, None)

def silent(input_shape, classes):
    replica = model(input_shape, classes)
    inner = replica.forward_backward
    class Quiet:
        def __getattr__(self, name):
            return lambda layer=0: None
    replica.forward_backward = lambda batch, events: inner(batch, Quiet())
    return replica

def bare(input_shape, classes):
    replica = model(input_shape, classes)
    replica._layers = ()
    return replica

if __name__ == "__main__":
    raise SystemExit("this is not run")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package in the current folder, of a name that no other test imports."""
    name = f"package_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "networks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield f"python:{name}.networks:model"


def test_a_token_names_a_built_in_model_a_file_or_a_module(own: str, package: str) -> None:
    built_in = models.load("mlp:4", SHAPE, CLASSES)
    assert built_in.replica().layers[0].name == "flatten" and built_in.source_digest == ""
    from_file, from_module = models.load(own, SHAPE, CLASSES), models.load(package, SHAPE, CLASSES)
    assert from_file.name == own and from_file.source_digest == from_module.source_digest != ""
    for model in (from_file, from_module, models.load(f"{own}:model", SHAPE, CLASSES)):
        (layer,) = model.replica().layers
        assert layer.tensors[0].shape == (64, 10)
        assert model.replica() is not model.replica()


def test_a_file_is_read_again_when_it_changes(own: str) -> None:
    before = models.load(own, SHAPE, CLASSES).source_digest
    Path(own).write_text(OWN.replace("def other", "def another"))
    assert models.load(f"{own}:another", SHAPE, CLASSES).source_digest != before


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / f"neighbour_{tmp_path.name}.py").write_text(OWN)
    (tmp_path / "network.py").write_text(f"from neighbour_{tmp_path.name} import model\n")
    assert models.load(str(tmp_path / "network.py"), SHAPE, CLASSES).replica().layers[0].kind == "function"


MISTAKES = (
    ("nothing.py", "", "there is no such file"),
    ("own.py:none", None, "own.py has no function 'none'"),
    ("own.py:other", None, "other returned an object of type int without layers"),
    ("own.py:nothing", None, "nothing returned None without layers"),
    ("own.py:unfit", None, "own.py, line 28: parameters of dtype int32"),
    ("own.py:bare", None, "the layers of the replica are ()"),
    ("broken.py", "def model(input_shape, classes):\n    return unknown_name\n", "broken.py, line 2: NameError"),
    ("broken.py", "import sys\nsys.exit('no')\n", "broken.py, line 2: SystemExit: no"),
    ("broken.py", "1 +\n", "broken.py, line 1: SyntaxError"),
    (
        "broken.py",
        "import no_such_module\n",
        "broken.py, line 1: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    ("broken.py", "def model(shape):\n    pass\n", "TypeError: model() takes 1 positional argument but 2 were given"),
    ("python:no_such_package.module:model", None, "there is no module 'no_such_package.module'"),
    ("python:json:dumped", None, "json has no function 'dumped'"),
)


@pytest.mark.parametrize(("token", "text", "message"), MISTAKES, ids=lambda value: None)
def test_a_mistake_is_explained(
    token: str, text: str | None, message: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text:
        (tmp_path / token).write_text(text)
    with pytest.raises(ConfigError) as caught:
        models.load(token, SHAPE, CLASSES).replica()
    assert message in str(caught.value) and f"model {token!r}" in str(caught.value)
    assert caught.value.allowed and caught.value.remedy


def test_label_smoothing_is_refused_where_the_model_computes_its_own_loss(own: str) -> None:
    with pytest.raises(ConfigError, match=r"label smoothing 0.1 with the model .*own.py"):
        models.load(own, SHAPE, CLASSES, label_smoothing=0.1)


def test_a_profile_needs_the_announcements_of_every_layer(own: str) -> None:
    with pytest.raises(ValueError, match="announced no layer in a step"):
        profile(ProfileConfig(model=f"{own}:silent", dataset=DATA, local_batches=(4,), seconds=0.1), lambda _: None)


@pytest.mark.parametrize("leaves", [0, 4])
def test_a_model_of_the_users_own_is_profiled(own: str, leaves: int) -> None:
    plan = Plan(devices=1, global_batch=8, leaves=leaves, batch_norm=Plan.default_batch_norm(leaves))
    config = ProfileConfig(model=own, local_batches=(4, 8), seconds=0.1, plan=plan)
    workload = profile(config, lambda _: None)
    assert [tensor.name for tensor in workload.tensors] == ["w"]
    assert all(seconds > 0 for layer in workload.layers for seconds in layer.backward_s)


_SWEPT = "--devices 1,2 --global-batch 32 --network node --set overlap=off --budget 1s --output swept"
COMMANDS = {
    "train": "train --devices 2 --global-batch 32 --steps 3",
    "profile": "profile --local-batch 4,8 --output workload.json",
    "reproduce": "reproduce --devices 1,2 --steps 3 --set global_batch=16",
    "sweep": f"sweep fusion-threshold {_SWEPT}",
    "devices": f"sweep devices --steps 3 {_SWEPT}",
}


def _run(dpsim: Dpsim, command: str, model: str) -> dict[str, Any]:
    code, out, err = dpsim(*COMMANDS[command].split(), "--dataset", DATA, "--model", model, "--json")
    assert code == 0, err
    return dict(json.loads(out))


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("sweep", "devices") else name for name in COMMANDS],
)
def test_every_command_takes_a_file(
    command: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpsim: Dpsim
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = _run(dpsim, command, "own.py:model")
    if command == "reproduce":
        assert shown["summary"]["identical"] is True
    if command == "devices":
        assert (tmp_path / "swept" / "drift.json").exists()


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_ranks_import_a_package_from_the_current_folder(command: str, package: str, dpsim: Dpsim) -> None:
    assert _run(dpsim, command, package)["points"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_a_model_that_cannot_be_used(
    command: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpsim: Dpsim
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = dpsim(*COMMANDS[command].split(), "--dataset", DATA, "--model", "own.py:other")
    assert code == 2
    assert "other returned an object of type int" in err and "to do:" in err and "Traceback" not in err


def test_a_checkpoint_knows_the_source_of_the_model(own: str) -> None:
    config, model = TrainConfig.of(model=own), models.load(own, SHAPE, CLASSES)
    header = Header(
        step=1,
        epoch=0,
        batch=1,
        seed=0,
        training_samples=9,
        plan=config.plan,
        run=run_of(config, model.source_digest),
    )
    checkpoint = Checkpoint(header=header, tensors={})
    assert stored(checkpoint) == config and changed_model(checkpoint, model) is None
    Path(own).write_text(OWN + "# another\n")
    warning = changed_model(checkpoint, models.load(own, SHAPE, CLASSES))
    assert warning is not None and "changed since the checkpoint" in warning and model.source_digest in warning
    before_digests = msgspec.structs.replace(header, run=run_of(config) | {"workload": None, "link_alpha_s": 0.0})
    assert stored(Checkpoint(header=before_digests, tensors={})) == config


def test_a_network_waits_for_nothing_and_adds_leaves_itself_and_a_function_implements_no_protocol(own: str) -> None:
    network, function = build_model("cnn:2", SHAPE, CLASSES), models.load(own, SHAPE, CLASSES).replica()
    assert [name for name, able in vars(Capabilities.of(network)).items() if able is None] == ["emulated", "adding"]
    assert set(vars(Capabilities.of(function)).values()) == {None}


def test_warming_up_leaves_parameters_and_statistics_as_they_are() -> None:
    network = build_model("cnn:2", SHAPE, CLASSES)
    parameters, _ = bound(network)
    before = {name: value.copy() for name, value in (parameters | network.state()).items()}
    network.normalise_batches("global", lambda arrays: pytest.fail("another rank is asked"))
    network.warm_up()
    assert all(np.array_equal(before[name], value) for name, value in (parameters | network.state()).items())


def test_an_observer_sees_each_layer_forward_and_backward_and_changes_nothing() -> None:
    seen: list[tuple[str, str, int]] = []
    gradients = []
    for observed in (False, True):
        network = build_model("mlp:3", SHAPE, CLASSES)
        _, result = bound(network)
        if observed:
            network.observe(lambda what, layer, values, out: seen.append((what, layer, len(out))))
        x, labels = batch_for(network, 5)
        network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 5)), Recorder())
        gradients.append(result)
    assert all(np.array_equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    names = ["flatten", "dense1", "relu1", "dense2"]
    assert seen == [*(("forward", n, 5) for n in names), *(("input_gradient", n, 5) for n in reversed(names[2:]))]
