"""This project's kernels of layers are held against NumPy before a training by them is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from layer_reference import ReferenceKernels, TwinMemory

from dpsim.experiments.gpu_check import layers, training
from dpsim.memory import HOST, HostMemory
from dpsim.nn import build_model
from dpsim.processor import LAYERS_VARIABLE

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
SAMPLES = 3
MODEL = build_model("resnet20", (5, 6, 2), 3)


def wrong_memory(name: str, spoil: Callable[..., None]) -> HostMemory:
    """A memory one of whose kernels does ``spoil`` with its arguments after it has computed."""

    class Spoilt(ReferenceKernels):
        pass

    def spoilt(self: Any, *arguments: Any, **options: Any) -> None:
        getattr(ReferenceKernels, name)(self, *arguments, **options)
        spoil(*arguments)

    setattr(Spoilt, name, spoilt)
    memory = TwinMemory()
    memory.layer_kernels = lambda: Spoilt()  # type: ignore[method-assign]
    return memory


def put(array: Any, value: float) -> None:
    array.reshape(-1)[-1] = value


def test_every_convolution_and_norm_of_a_model_is_compared_once() -> None:
    parts = list(layers.parts_of(MODEL))
    assert len(parts) == 12
    assert parts[:4] == [
        "a convolution 3x3 of (5, 6, 2) to (5, 6, 16)",
        "a batch norm of (5, 6, 16) with its rectifier",
        "a convolution 3x3 of (5, 6, 16) to (5, 6, 16)",
        "a batch norm of (5, 6, 16) with its branch",
    ]
    assert layers.parts_of(build_model("mlp:4", (5, 6, 2), 3)) == {}


def test_right_kernels_pass_and_a_model_without_them_asks_for_no_memory() -> None:
    layers.check_layers(MODEL, SAMPLES, TwinMemory)
    layers.check_layers(MODEL, SAMPLES, lambda: HOST)
    layers.check_layers(build_model("mlp:4", (5, 6, 2), 3), SAMPLES, lambda: pytest.fail("a memory is made"))


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("conv2d", lambda x, weight, stride, out: put(out, out.flat[-1] + 0.1), "the output of a convolution"),
        ("conv2d", lambda x, weight, stride, out: put(out, np.nan), "the output of a convolution"),
        ("conv2d_input_gradient", lambda *given: put(given[-1], 3), "the input gradient of a convolution"),
        ("conv2d_weight_gradient", lambda *given: put(given[-1], 300), "the gradient of conv.weight of a convolution"),
        ("local_moments", lambda x, gamma, running, *rest: put(running[1], 0), "norm.running_var of a batch norm"),
        ("normalise", lambda *given: put(given[4], 3), "the output of a batch norm"),
        ("local_gradients", lambda *given: put(given[4][0], 300), "the gradient of norm.gamma of a batch norm"),
        ("local_gradients", lambda *given: put(given[4][3], 3), "the input gradient of a batch norm"),
        ("normalise_backward", lambda grad, *rest: put(grad, 3), "the input gradient of a batch norm"),
        ("rectified_sum", lambda a, b, out: put(out, 9), "the output of a batch norm of (5, 6, 16) with its branch"),
        ("both_gradients", lambda grad, y, copy: put(copy, 9), "the input gradient of a batch norm"),
    ],
)
def test_a_kernel_that_computes_one_element_otherwise_is_named_with_what_to_do(
    name: str, spoil: Callable[..., None], said: str
) -> None:
    with pytest.raises(ArithmeticError, match=f"at {SAMPLES} samples is not NumPy's: DPSIM_GPU_LAYERS=cupy") as error:
        layers.check_layers(MODEL, SAMPLES, lambda: wrong_memory(name, spoil))
    assert str(error.value).startswith(said)


def test_nothing_is_trained_or_timed_before_the_layers_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any) -> None:
        raise ArithmeticError("not NumPy's")

    def opened(*_: Any, **__: Any) -> None:
        raise RuntimeError("a trainer is opened")

    monkeypatch.setattr(training, "check_layers", differs)
    monkeypatch.setattr(training, "Trainer", opened)
    with pytest.raises(ArithmeticError), training._training("cnn:2", (4, 4, 1), 4):
        pytest.fail("it trains")
    monkeypatch.setenv(LAYERS_VARIABLE, "cupy")
    with pytest.raises(RuntimeError, match="a trainer is opened"), training._training("cnn:2", (4, 4, 1), 4):
        pytest.fail("it trains")
