"""Predicted bucket lists against those that DDP logs, for eight architectures and DDP's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

from torch import distributed  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_architectures import ARCHITECTURES  # noqa: E402

from dpsim import codec  # noqa: E402
from dpsim.lowering.ddp import Buckets, final_buckets, initial_buckets  # noqa: E402
from dpsim.torch.script.probe import process_group  # noqa: E402
from dpsim.torch.script.probe.parameters import reduced_parameters  # noqa: E402
from dpsim.torch.script.probe.rank_record import ddp_record  # noqa: E402
from dpsim.torch.script.script_record import DdpRecord, check_buckets  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "cap": {"bucket_cap_mb": 2},
    "small cap": {"bucket_cap_mb": 0.3},
    "find unused": {"find_unused_parameters": True},
    "find unused, cap": {"find_unused_parameters": True, "bucket_cap_mb": 1},
    "list of caps": {"bucket_cap_mb_list": [0.5, 2, 0.2]},
    "static graph": {"static_graph": True, "bucket_cap_mb": 1},
}
FAILS_IN_DDP = {("unused", name) for name in ("default", "cap", "small cap", "list of caps")}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    process_group.register()
    distributed.init_process_group(process_group.BACKEND, store=distributed.HashStore(), rank=0, world_size=3)
    yield
    distributed.destroy_process_group()


def trained(architecture: str, steps: int, **arguments: Any) -> tuple[Any, list[int]]:
    """A DDP model after some steps, and the order in which gradients became ready in the last of them."""
    torch.manual_seed(0)
    module, batch = ARCHITECTURES[architecture]()
    ddp = DistributedDataParallel(module, **arguments)
    order: list[int] = []
    for index, (_, parameter) in enumerate(reduced_parameters(ddp)):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    for _ in range(steps):
        order.clear()
        ddp(*batch).sum().backward()
    return ddp, order


def record(ddp: Any) -> DdpRecord:
    return codec.convert(ddp_record(ddp), DdpRecord)


def sizes(ddp: Any, buckets: Buckets) -> tuple[int, ...]:
    parameters = record(ddp).ddp_parameters
    return tuple(sum(parameters[index].size_bytes for index in bucket) for bucket in buckets)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_predicted_lists_are_those_that_ddp_logs(architecture: str, name: str) -> None:
    if (architecture, name) in FAILS_IN_DDP:
        pytest.skip("DDP itself refuses unused parameters without find_unused_parameters or static_graph")
    ddp, order = trained(architecture, 4, **ARGUMENTS[name])
    of_ddp, data = record(ddp), ddp._get_ddp_logging_data()
    parameters, options = of_ddp.ddp_parameters, of_ddp.options
    expected = final_buckets(parameters, order, options)
    assert ", ".join(map(str, sizes(ddp, initial_buckets(parameters, options)))) == data["bucket_sizes"]
    assert bool(data.get("has_rebuilt_buckets")) == options.rebuilds
    check_buckets(of_ddp)
    assert of_ddp.buckets == expected
    if options.rebuilds:
        assert ", ".join(map(str, sizes(ddp, expected))) == data["rebuilt_bucket_sizes"]


def test_the_architectures_have_several_buckets_and_shared_and_unused_parameters_and_dtypes() -> None:
    for architecture in ARCHITECTURES:
        ddp, _ = trained(architecture, 0, find_unused_parameters=True, bucket_cap_mb=0.3)
        assert len(initial_buckets(record(ddp).ddp_parameters, record(ddp).options)) > 3
    gpt, _ = trained("gpt", 0)
    assert len(record(gpt).ddp_parameters) == len(list(gpt.module.parameters()))
    assert len({parameter.dtype for parameter in record(trained("mixed", 0)[0]).ddp_parameters}) == 4


def test_sparse_gradients_and_ignored_and_frozen_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    module[1].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.bias"])
    ddp = DistributedDataParallel(module)
    for _ in range(4):
        ddp(torch.zeros(2, dtype=torch.long)).sum().backward()
    assert [name for name, _ in reduced_parameters(ddp)] == ["0.weight", "1.bias", "2.weight"]
    assert record(ddp).buckets == final_buckets(record(ddp).ddp_parameters, [2, 1, 0], record(ddp).options)
    assert record(ddp).buckets == ((0,), (2, 1))
