"""Models of the user's own, from a Python file: what is taken, and what is said of a file that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.harness.model import build_replica
from dpsim.harness.profile.profile import ProfileConfig, profile

OWN = """
import numpy as np
import dpsim

def loss_and_gradients(w, x, labels):
    x = x.reshape(len(x), -1)
    p = np.full((len(x), 10), 0.1, np.float32)
    p[np.arange(len(x)), labels] -= 1
    return 1.0, 0, {"w": x.T @ p}

def model(input_shape, classes):
    return dpsim.FunctionReplica({"w": np.zeros((int(np.prod(input_shape)), classes), np.float32)}, loss_and_gradients)

def other(input_shape, classes):
    return len(input_shape)

if __name__ == "__main__":
    raise SystemExit("this is not run")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_the_files_function_makes_the_replica(own: str) -> None:
    (layer,) = build_replica(own, (8, 8, 1), 10).layers
    assert layer.tensors[0].shape == (64, 10)
    assert build_replica("mlp:4", (8, 8, 1), 10).layers[0].name == "flatten"


def test_a_model_of_the_users_own_is_profiled(own: str) -> None:
    workload = profile(ProfileConfig(model=own, local_batches=(4, 8), seconds=0.1), lambda _: None)
    assert [tensor.name for tensor in workload.tensors] == ["w"]
    assert all(seconds > 0 for layer in workload.layers for seconds in layer.backward_s)


def test_what_cannot_be_used_is_named_with_its_line(own: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def model(input_shape, classes):\n    return unknown_name\n")
    for token, message in (
        (str(broken), r"broken.py, line 2: NameError"),
        (own + ":other", "returned a int without layers"),
        (own + ":none", "no function 'none'"),
        (str(tmp_path / "nothing.py"), "no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_replica(token, (8, 8, 1), 10)
