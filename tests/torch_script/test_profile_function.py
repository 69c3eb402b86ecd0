"""``dpsim profile --torch``: what a function returns is trained by DDP, and becomes a workload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim import workload as workloads

pytestmark = pytest.mark.torch
Dpsim = Callable[..., tuple[int, str, str]]
PREAMBLE = "import torch\nfrom torch import nn\n\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "return nn.Linear(8, 3), torch.randn(n, 8)",
        "return nn.Linear(8, 3), {'input': torch.randn(n, 8)}",
        "return nn.Linear(8, 3), (torch.randn(n, 8),), lambda y: (y - torch.zeros(n, 3)).square().sum()",
    ],
    ids=["tensor", "keywords", "loss"],
)
def test_a_function_becomes_a_workload(text: str, folder: Path, dpsim: Dpsim) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "small.py").write_text(f"{PREAMBLE}def build(n=4):\n    {text}\n")
    code, _, err = dpsim("profile", "--torch", "models.small:build", "--devices", "3", "--output", "w.json")
    assert code == 0, err
    workload = workloads.read(folder / "w.json")
    assert workload.local_batches == (4,) and [tensor.name for tensor in workload.tensors] == ["weight", "bias"]
    assert workload.name == "Linear of models.small:build" and workload.optimizer_slots == 1
    assert workload.ddp is not None and (workload.ddp.devices, workload.ddp.bucket_bytes) == (3, (4 * 27,))
    assert "dpsim profile --torch models.small:build" in workload.source


def test_a_function_gives_batches_of_the_sizes_that_it_is_asked_for(folder: Path, dpsim: Dpsim) -> None:
    (folder / "own.py").write_text(f"{PREAMBLE}def build(n):\n    return nn.Linear(8, 3), torch.randn(n, 8)\n")
    code, _, err = dpsim(
        "profile", "--torch", "own:build", "--local-batch", "2,8", "--steps", "3", "--output", "w.json"
    )
    assert code == 0, err
    assert workloads.read(folder / "w.json").local_batches == (2, 8)


@pytest.mark.parametrize(
    ("text", "arguments", "given"),
    [
        ("", ("--torch", "own:missing"), "own has no function 'missing'"),
        ("", ("--torch", "nowhere.at_all:build"), "there is no module 'nowhere'"),
        ("import nowhere", ("--torch", "own:build"), "own.py:4: the function raised ModuleNotFoundError"),
        ("def build():\n    return nn.Linear(8, 3)", ("--torch", "own:build"), "own:build returned Linear"),
        ("def build():\n    return 3, 4", ("--torch", "own:build"), "own:build returned int, int"),
        (
            "def build():\n    return nn.Linear(8, 3), torch.ones(8), lambda y: y",
            ("--torch", "own:build"),
            "the loss of own:build is Tensor of shape [3]",
        ),
        (
            "def build():\n    return nn.Linear(8, 3), torch.ones(8)",
            ("--torch", "own:build", "--local-batch", "8"),
            "own:build with --local-batch: too many positional arguments",
        ),
        (
            "def build(n):\n    return nn.Linear(8, 3), torch.ones(2, 8)",
            ("--torch", "own:build", "--local-batch", "8"),
            "own:build still trains on 2 samples at once",
        ),
        (
            "def build(n):\n    return 1",
            ("--torch", "own:build"),
            "own:build without --local-batch: missing a required argument: 'n'",
        ),
        ("def build():\n    return 1 / 0", ("--torch", "own:build"), "own.py:5: the function raised ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_profiled_is_explained(
    text: str, arguments: tuple[str, ...], given: str, folder: Path, dpsim: Dpsim
) -> None:
    (folder / "own.py").write_text(PREAMBLE + text + "\n")
    code, out, err = dpsim("profile", *arguments)
    assert (code, out) == (2, "") and given in err and "Traceback" not in err
    assert not (folder / "workload.json").exists()
