"""``TorchReplica`` alone: its layers, what it announces and when, its memory, and what it refuses."""

from __future__ import annotations

import contextlib
import re
import subprocess
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from nn_setup import Recorder, bound

from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.replica import AddingReplica, Array, Batch, DeviceReplica, LeafReplica, WarmUpReplica
from dpsim.runtime.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
from torch_modules import CLASSES, MODULES, SHAPE  # noqa: E402

from dpsim.torch.module import TorchReplica, state  # noqa: E402

pytestmark = pytest.mark.torch
nn = torch.nn
Dpsim = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).parents[2] / "docs" / "torch-module.md"


def replica_of(build: Any) -> TorchReplica:
    return TorchReplica(build, SHAPE)


def batch_of(samples: int, **where: int) -> Batch:
    random = np.random.default_rng(samples)
    x = random.standard_normal((samples, *SHAPE)).astype(np.float32)
    return Batch(x=x, labels=random.integers(0, CLASSES, samples), leaves=(0, samples), **where)


def step(replica: TorchReplica, batch: Batch, events: Any = None) -> dict[str, Array]:
    """Copies of the gradients of a batch, written over NaN."""
    _, gradients = bound(replica)  # type: ignore[arg-type]
    replica.forward_backward(batch, events or Recorder())
    return {name: value.copy() for name, value in gradients.items()}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_a_torch_module_are_sums_over_the_batch(name: str) -> None:
    replica, batch = replica_of(MODULES[name]), batch_of(5)
    torch.manual_seed(0)
    alone = MODULES[name]().train()
    gradients = step(replica, batch)
    if name != "dropout":  # whose random numbers are seeded by the sample
        x, labels = torch.from_numpy(batch.x), torch.from_numpy(batch.labels)
        torch.nn.functional.cross_entropy(alone(x), labels, reduction="sum").backward()
        for each, parameter in alone.named_parameters():
            if parameter.requires_grad:
                expected = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
                np.testing.assert_allclose(gradients[each], expected, rtol=1e-5, atol=1e-6)
    assert all((np.isfinite(value)).all() for value in gradients.values())


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("samples", [0, 3])
def test_every_torch_layer_is_announced_once_in_each_direction_and_in_order(name: str, samples: int) -> None:
    replica, recorder = replica_of(MODULES[name]), Recorder()
    gradients = step(replica, batch_of(samples), recorder)
    numbers = range(len(replica.layers))
    forward = [("forward", number) for number in numbers]
    backward = [(what, number) for number in reversed(numbers) for what in ("ready", "backward")]
    assert recorder.events == [*forward, ("loss", -1), *backward]
    assert samples or not any(value.any() for value in gradients.values())


@pytest.mark.parametrize("name", MODULES)
def test_torch_gradients_are_final_when_they_are_announced(name: str) -> None:
    replica = replica_of(MODULES[name])
    _, gradients = bound(replica)  # type: ignore[arg-type]
    early: dict[str, Array] = {}
    before = {each: value.copy() for each, value in gradients.items()}

    class Copies(Recorder):
        def gradients_ready(self, layer: int) -> None:
            super().gradients_ready(layer)
            early.update({t.name: gradients[t.name].copy() for t in replica.layers[layer].tensors})
            if layer and name == "dense":  # the memory of what comes earlier in forward may be another layer's yet
                for tensor in replica.layers[0].tensors:
                    np.testing.assert_array_equal(gradients[tensor.name], before[tensor.name])

    replica.forward_backward(batch_of(4), Copies())
    assert early.keys() == gradients.keys()
    for each, value in gradients.items():
        np.testing.assert_array_equal(early[each], value)


def test_torch_layers_are_in_the_order_of_computation_and_unused_ones_first() -> None:
    def names(name: str) -> list[str]:
        return [layer.name for layer in replica_of(MODULES[name]).layers]

    assert names("dense") == ["1", "3"]
    assert names("tied") == ["first", "second", "third", "output"]
    assert {*names("unused")[:2]} == {"spare", "output"} and names("unused")[2:] == ["module", "hidden"]
    layers = replica_of(MODULES["tied"]).layers
    assert [tensor.name for layer in layers for tensor in layer.tensors].count("second.weight") == 1
    norm = next(layer for layer in replica_of(MODULES["normalised"]).layers if layer.name == "norm")
    assert (norm.kind, norm.batch_norm_channels, norm.tensors[0].shape) == ("BatchNorm2d", 3, (3,))


def test_torch_parameters_and_gradients_are_views_of_the_bound_memory() -> None:
    replica = replica_of(MODULES["dense"])
    parameters, gradients = bound(replica)  # type: ignore[arg-type]
    for _ in range(2):
        replica.forward_backward(batch_of(4), Recorder())
    for name, parameter in replica.module.named_parameters():
        assert parameter.data_ptr() == parameters[name].ctypes.data
        assert parameter.grad.data_ptr() == gradients[name].ctypes.data
    others = {name: np.full_like(value, np.nan) for name, value in gradients.items()}
    replica.bind(parameters, others)
    replica.forward_backward(batch_of(4), Recorder())
    assert all((others[name] == value).all() for name, value in gradients.items())


def test_buffers_and_frozen_torch_parameters_are_state() -> None:
    replica = replica_of(MODULES["normalised"])
    state = replica.state()
    assert {*state} == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    step(replica, batch_of(6))
    assert state["norm.num_batches_tracked"] == [1] and state["norm.running_mean"].any()
    replica.warm_up()
    assert state["norm.num_batches_tracked"] == [1]
    state["norm.running_mean"][...] = 7
    assert replica.module.norm.running_mean.tolist() == [7, 7, 7]
    frozen = replica_of(MODULES["frozen"])
    assert [*frozen.state()] == ["1.weight"] and "1.weight" not in frozen.initial_parameters(0)
    frozen.state()["1.weight"][...] = 0
    assert not frozen.module[1].weight.any()


def test_a_seed_gives_the_same_torch_parameters_and_a_module_keeps_its_own() -> None:
    first, second = replica_of(MODULES["dense"]), replica_of(MODULES["dense"])
    for seed in (0, 3):
        for name, value in first.initial_parameters(seed).items():
            np.testing.assert_array_equal(value, second.initial_parameters(seed)[name])
    assert (first.initial_parameters(0)["1.weight"] != first.initial_parameters(3)["1.weight"]).any()
    module = MODULES["dense"]()
    weight = module[1].weight.detach().numpy().copy()
    given = replica_of(module)
    step(given, batch_of(3))
    for seed in (0, 3):
        np.testing.assert_array_equal(given.initial_parameters(seed)["1.weight"], weight)


def test_torch_random_numbers_are_those_of_the_batchs_samples() -> None:
    replica = replica_of(MODULES["dropout"])
    first = step(replica, batch_of(6))
    torch.rand(3)
    again = step(replica, batch_of(6))
    other = step(replica, batch_of(6, first_sample=6))
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


def test_a_torch_replica_implements_the_protocols_of_the_runtime() -> None:
    replica = replica_of(MODULES["dense"])
    assert all(isinstance(replica, each) for each in (DeviceReplica, WarmUpReplica, AddingReplica))
    assert not isinstance(replica, LeafReplica)


class Raises(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = MODULES["dense"]()

    def forward(self, x: Any) -> Any:
        if x.any():
            raise KeyError("the example was zero")
        return self.inner(x)


class ReplacesGradient(Raises):
    def forward(self, x: Any) -> Any:
        if x.any():
            self.inner[1].weight.grad = None
        return self.inner(x)


class ReplacesBuffer(Raises):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.mean = self.mean + 1
        return self.inner(x)


class ReplacesParameter(Raises):
    def forward(self, x: Any) -> Any:
        if x.any():
            self.inner[1].weight = nn.Parameter(self.inner[1].weight.detach().clone())
        return self.inner(x)


class ClampsParameter(Raises):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.inner[1].weight.clamp_(-0.1, 0.1)
        return self.inner(x)


class MovesParameter(Raises):
    def forward(self, x: Any) -> Any:
        if x.any():
            self.inner[1].weight.data = self.inner[1].weight.data * 0.9
        return self.inner(x)


class FreezesParameter(Raises):
    def forward(self, x: Any) -> Any:
        if x.any():
            self.inner[1].weight.requires_grad_(False)
        return self.inner(x)


class MakesLayer(Raises):
    def forward(self, x: Any) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Linear(3, 3)
        return self.late(self.inner(x))


class SparseBuffer(Raises):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(3).to_sparse())


def in_inference_mode() -> Any:
    with torch.inference_mode():
        return MODULES["dense"]()


def compiled_by_jit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(MODULES["dense"]())


class WritesToInput(Raises):
    def forward(self, x: Any) -> Any:
        return self.inner(x.mul_(2))


def test_a_torch_module_may_write_to_its_input() -> None:
    replica, batch = replica_of(WritesToInput), batch_of(4)
    before = batch.x.copy()
    step(replica, batch)
    first, again = (replica.evaluate(batch.x, batch.labels) for _ in range(2))
    assert first == again and (batch.x == before).all()


class InParts(Raises):
    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        hidden = self.inner[:2](x).requires_grad_()
        twice = checkpoint(self.inner[2:], hidden, use_reentrant=True)
        return twice + checkpoint(self.inner[2:], hidden, use_reentrant=True)


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (Raises, r"step raised KeyError \(test_torch_replica.py, line \d+\): 'the example was zero'"),
        (ReplacesGradient, "the gradient of inner.1.weight is another tensor"),
        (ReplacesBuffer, "the module has replaced its buffer mean"),
        (ReplacesParameter, "the module has replaced its parameter inner.1.weight"),
        (ClampsParameter, "the module changes its parameter inner.1.weight"),
        (MovesParameter, "the module changes its parameter inner.1.weight"),
        (FreezesParameter, "the module changes its parameter inner.1.weight"),
        (MakesLayer, "the module makes or removes late.bias, late.weight in its forward pass"),
        (SparseBuffer, "the module's mask has the layout sparse_coo"),
        (in_inference_mode, "the module's 1.weight was made in inference mode"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "the module's 1.weight has no shape yet"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d()), "the module's 1.weight has no shape yet"),
        (compiled_by_jit, "a module that torch.jit has compiled"),
        (InParts, "the parameter inner.3.weight gets its gradient in several parts"),
        (lambda: nn.Flatten(), "no parameter that requires a gradient"),
        (lambda: nn.Linear(2, 2).half(), "parameters of dtype float16"),
        (lambda: nn.Linear(2, 2), "the module's step on zeros raised RuntimeError"),
        (lambda: nn.Linear(1, 2), r"the module returned Tensor of shape \[2, 4, 4, 2\]"),
        (lambda: None, "the function that builds the module returned NoneType"),
        (lambda: 1 / 0, r"the function that builds the module raised ZeroDivisionError \(test_torch_replica.py, line"),
    ],
)
def test_what_a_torch_module_cannot_do_is_explained(build: Any, given: str) -> None:
    with pytest.raises(ConfigError, match=given):
        step(replica_of(build), batch_of(4))


class Tempered(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, scores: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(scores * self.temperature, labels, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (Tempered(), "a loss with parameters that require a gradient, which nothing would train"),
        (lambda scores, labels: (scores.sum(), labels), "the loss is tuple"),
        (nn.CrossEntropyLoss(), "a loss with reduction 'mean'"),
        (nn.CrossEntropyLoss(reduction="none"), "a loss with reduction 'none'"),
        (lambda scores, labels: scores.sum(dim=1), r"the loss is Tensor of shape \[2\]"),
        (lambda scores, labels: 0.0, "the loss is float"),
    ],
)
def test_a_torch_loss_that_is_no_sum_is_explained(loss: Any, given: str) -> None:
    with pytest.raises(ConfigError, match=given):
        TorchReplica(MODULES["dense"], SHAPE, loss)


def test_an_error_of_the_runtime_is_none_of_the_torch_modules() -> None:
    class Lost(Recorder):
        def gradients_ready(self, layer: int) -> None:
            raise ConnectionError("rank 1 is gone")

    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        step(replica_of(MODULES["dense"]), batch_of(4), Lost())


def test_a_torch_step_on_a_device_asks_for_no_value() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
    from dpsim.comm.cuda.memory import DeviceMemory
    from dpsim.comm.cuda.simulator import SimulatedDevice

    memory, on_host = DeviceMemory(SimulatedDevice()), replica_of(MODULES["normalised"])
    replica, batch = replica_of(MODULES["normalised"]), batch_of(6)
    replica.compute_in(memory)
    assert replica.leaf_difference(batch_of(4)) is None
    before = memory.fetches
    gradients = step(replica, batch)
    assert memory.fetches == before
    sums = replica.forward_backward(batch, Recorder()).fetch()
    assert memory.fetches == before + 1 and sums.samples == 6
    assert all((gradients[name] == value).all() for name, value in step(on_host, batch).items())


def test_torch_leaves_with_other_bits_the_second_time_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
    from dpsim.comm.cuda.memory import DeviceMemory
    from dpsim.comm.cuda.simulator import SimulatedDevice

    class Counts(Raises):
        steps = 0

        def forward(self, x: Any) -> Any:
            Counts.steps += 1
            return self.inner(x) + Counts.steps * torch.arange(CLASSES)

    replica = replica_of(Counts)
    replica.compute_in(DeviceMemory(SimulatedDevice()))
    batch = batch_of(4)
    leaves = Batch(x=batch.x, labels=batch.labels, leaves=(0, 2, 4))
    assert replica.leaf_difference(leaves) == "the loss"


def test_torch_works_in_the_stream_of_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    device = types.SimpleNamespace(type="cuda", index=1)
    stream = types.SimpleNamespace(cupy=types.SimpleNamespace(ptr=4711))
    memory: Any = types.SimpleNamespace(use=lambda: asked.append("use"), stream=stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device.index))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream))
    with state.computing_in(memory, device) as used:
        assert used == (4711, 1) and asked == ["use"]


def test_without_pytorch_the_torch_replica_says_what_to_install(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = python("-c", "import sys; sys.modules['torch'] = None; from dpsim.torch.module import TorchReplica")
    assert done.returncode and "pip install -e '.[torch]'" in done.stderr


def test_the_torch_module_of_the_documentation_is_trained_and_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpsim: Dpsim
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(# convolutions\.py\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "convolutions.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^dpsim ((?:train|profile) .*convolutions\.py.*)$", text, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["train", "profile"]
    for command in commands:
        code, out, err = dpsim(*command.split())
        assert code == 0, err
        assert command.startswith("profile") or "test accuracy" in out


@pytest.mark.parametrize("name", ["dense", "tied", "unused", "dropout"])
@pytest.mark.parametrize("passes", [{"leaves": 5, "batch_norm": "leaf"}, {"accumulate": 3}])
def test_gradients_that_autograd_adds_up_have_the_bits_of_those_that_the_runtime_adds_up(
    monkeypatch: pytest.MonkeyPatch, name: str, passes: dict[str, Any]
) -> None:
    def trained() -> tuple[dict[str, bytes], int]:
        asked = Plan(devices=1, global_batch=12, optimizer=Sgd(learning_rate=0.05, momentum=0.9), **passes)
        data = load_dataset("synthetic:4x4x1,classes=3,train=24,test=7")
        trainer = Trainer(TorchReplica(MODULES[name], SHAPE), data, asked, MPI.COMM_SELF, Network())
        for _ in range(2):
            trainer.step()
        values = {key: value.tobytes() for key, value in trainer.runner.parameters.items()}
        held = trainer.runner.memory_bytes["gradients"]
        trainer.close()
        return values, held

    by_autograd, less = trained()
    monkeypatch.delattr(TorchReplica, "add_gradients")
    by_the_runtime, more = trained()
    assert by_autograd == by_the_runtime
    assert less < more
