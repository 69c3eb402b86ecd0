"""PyTorch modules trained by the runtime on ranks: as by PyTorch alone, on the host and in numba's CUDA simulator."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_processes import why_processes_cannot_share_gpus
from python_path import extended_path

from dpsim.comm.cuda.available import why_no_gpu
from dpsim.comm.cuda.reproducible import REQUIRED
from dpsim.data import epoch_batches, load_dataset
from dpsim.launch import jobs

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")

pytestmark = pytest.mark.torch
DATA = "synthetic:4x4x1,classes=3,train=24,test=7"
STEPS = 3
RANKS = (1, 2, 3)
HOST, BOTH = ["cpu"], ["cpu", "cuda"]


def case(name: str, module: str, backends: list[str], **plan: Any) -> dict[str, Any]:
    common = {"fusion_threshold_bytes": 300.0, "overlap": "poll"}
    return {"name": name, "module": module, "backends": backends, "plan": common | plan}


CASES = [
    case("dense", "dense", BOTH),
    case("tied", "tied", HOST, overlap="thread", fusion_rule="horovod"),
    case("unused", "unused", HOST, overlap="inline"),
    case("frozen", "frozen", HOST, accumulate=2),
    case("ranks without samples", "dense", HOST, global_batch=11),
    case("normalised", "normalised", BOTH, overlap="off"),
    case("leaves", "dropout", HOST, leaves=4, batch_norm="leaf"),
    case("leaves in float16", "dropout", BOTH, leaves=4, batch_norm="leaf", wire_dtype="float16"),
    case("sharded", "dense", HOST, strategy="zero1", overlap="off"),
    case("gradients share memory", "dense", HOST, strategy="zero2:buckets=1", fusion_threshold_bytes=0.0),
]
NAMES = [asked["name"] for asked in CASES]
PLAIN = ["dense", "tied", "unused", "frozen", "ranks without samples", "sharded", "gradients share memory"]
IN_BOTH = [asked["name"] for asked in CASES if asked["backends"] == BOTH]


@functools.cache
def several(numbers: tuple[int, ...], where: str) -> dict[int, Any]:
    """What so many ranks came to, in one job in numba's simulator or on the GPUs of this machine."""
    support = extended_path(Path(__file__).parents[1] / "support")
    results = jobs.on_ranks(
        "ranks_together:together",
        {"tasks": [("ranks_torch_replica:run", {"cases": CASES, "steps": STEPS}, ranks) for ranks in numbers]},
        devices=max(numbers),
        timeout_s=280,
        env=REQUIRED | {"PYTHONPATH": support, "NUMBA_ENABLE_CUDASIM": "1" if where == "simulator" else "0"},
    )
    return dict(zip(numbers, results, strict=True))


def ran(ranks: int, where: str = "simulator") -> dict[str, Any]:
    """What ``ranks`` ranks came to. On GPUs each number of ranks has a job of its own."""
    return several(RANKS if where == "simulator" else (ranks,), where)[ranks]  # type: ignore[no-any-return]


def trained(ranks: int, name: str, backend: str = "cpu") -> dict[str, Any]:
    return ran(ranks)["trained"][name][backend]  # type: ignore[no-any-return]


@functools.cache
def by_torch_alone(name: str) -> tuple[dict[str, Any], list[float]]:
    """Parameters after the steps of an ordinary PyTorch loop over the global batches, and the mean loss of each."""
    from torch_modules import MODULES

    asked = next(each for each in CASES if each["name"] == name)
    dataset, batch = load_dataset(DATA), asked["plan"].get("global_batch", 12)
    torch.manual_seed(0)
    module = MODULES[asked["module"]]()
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
    losses = []
    batches = [indices for epoch in range(2) for indices in epoch_batches(24, batch, 0, epoch)]
    for indices in batches[:STEPS]:
        x, labels = map(torch.from_numpy, dataset.train_batch(indices))
        loss = torch.nn.functional.cross_entropy(module(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}, losses


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_torch_module_is_trained_as_by_pytorch_alone(ranks: int, name: str) -> None:
    result = trained(ranks, name)
    parameters, losses = by_torch_alone(name)
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
    actual = result["parameters"] | {
        name: np.reshape(value, parameters[name].shape) for name, value in result["state"].items()
    }
    assert actual.keys() == parameters.keys()
    for each, value in parameters.items():
        np.testing.assert_allclose(actual[each], value, rtol=1e-4, atol=1e-6)
    assert len(set(result["digests"])) == 1 and result["test"][2] == 7


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_torch_computes_in_the_memory_that_allreduces_work_on(ranks: int, name: str) -> None:
    for result in ran(ranks)["trained"][name].values():
        assert result["nothing_copied"] and len(set(result["digests"])) == 1


@pytest.mark.parametrize("name", IN_BOTH)
@pytest.mark.parametrize("ranks", RANKS)
def test_torch_in_the_memory_of_simulated_devices_has_the_hosts_bits(ranks: int, name: str) -> None:
    host, device = trained(ranks, name), trained(ranks, name, "cuda")
    assert device["on_device"] and not host["on_device"]
    for part in ("digests", "losses", "test", "state"):
        assert device[part] == host[part]


@pytest.mark.parametrize("name", ["leaves", "leaves in float16"])
def test_torch_leaves_have_the_same_bits_on_any_number_of_ranks_with_dropout_too(name: str) -> None:
    assert len({trained(ranks, name)["digests"][0] for ranks in RANKS}) == 1
    assert trained(1, "leaves")["digests"] != trained(1, "leaves in float16")["digests"]


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_batch_norm_has_each_ranks_statistics_and_their_mean_in_a_test(ranks: int) -> None:
    state = trained(ranks, "normalised")["state"]
    assert state["norm.num_batches_tracked"] == [STEPS]
    assert np.shape(state["norm.running_mean"]) == (3,) and np.any(np.array(state["norm.running_var"]) != 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_of_a_torch_module_has_its_buffers(ranks: int) -> None:
    digests = ran(ranks)["resumed"]
    assert digests["resumed"] == digests["without a stop"]


def test_leaves_of_a_torch_module_with_batch_norm_are_refused() -> None:
    assert ran(2)["refused"].startswith("batch_norm is leaf for a replica that has one mode of its own")


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.xdist_group("ranks on GPUs")
@pytest.mark.parametrize("name", IN_BOTH)
@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_on_gpus_comes_close_to_the_host(ranks: int, name: str) -> None:
    if reason := why_no_gpu() or why_processes_cannot_share_gpus():
        pytest.skip(reason)
    if not torch.cuda.is_available():
        pytest.skip("PyTorch is a build for processors")
    host, device = (ran(ranks, "gpu")["trained"][name][backend] for backend in ("cpu", "cuda"))
    if next(each for each in CASES if each["name"] == name)["module"] == "dropout":  # a GPU draws other masks
        assert device["digests"][0] == ran(1, "gpu")["trained"][name]["cuda"]["digests"][0]
    else:
        np.testing.assert_allclose(device["losses"], host["losses"], rtol=1e-2)
    assert device["on_device"] and device["nothing_copied"] and len(set(device["digests"])) == 1
