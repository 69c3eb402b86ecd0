"""The process group of n ranks in one process: every collective as if all ranks held rank 0's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

from torch import distributed  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dpsim.torch.script.probe import process_group  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    process_group.register()
    store = distributed.HashStore()
    distributed.init_process_group(process_group.BACKEND, store=store, rank=0, world_size=request.param)
    yield request.param
    distributed.destroy_process_group()


def value() -> Any:
    return torch.tensor([1.0, -2.0, 3.0])


def test_a_reduction_combines_equal_values(ranks: int) -> None:
    expected = {
        ReduceOp.SUM: ranks * value(),
        ReduceOp.AVG: value(),
        ReduceOp.MAX: value(),
        ReduceOp.MIN: value(),
        ReduceOp.PRODUCT: value() ** ranks,
    }
    for operation, result in expected.items():
        tensor = value()
        distributed.all_reduce(tensor, op=operation)
        assert torch.equal(tensor, result), operation
    bits = torch.tensor([5, 3])
    distributed.all_reduce(bits, op=ReduceOp.BXOR)
    assert bits.tolist() == ([5, 3] if ranks % 2 else [0, 0])
    tensor = value()
    distributed.reduce(tensor, dst=0)
    assert torch.equal(tensor, ranks * value())


def test_what_is_sent_to_all_is_ones_own(ranks: int) -> None:
    tensor = value()
    distributed.broadcast(tensor, src=0)
    distributed.broadcast(tensor, src=ranks - 1)
    assert torch.equal(tensor, value())
    objects: list[Any] = [{"seed": 7}]
    distributed.broadcast_object_list(objects, src=0)
    assert objects == [{"seed": 7}]


def test_what_is_gathered_is_ones_own_from_each(ranks: int) -> None:
    copies = [torch.empty(3) for _ in range(ranks)]
    distributed.all_gather(copies, value())
    assert all(torch.equal(copy, value()) for copy in copies)
    whole = torch.empty(3 * ranks)
    distributed.all_gather_into_tensor(whole, value())
    assert torch.equal(whole, value().repeat(ranks))
    objects: list[Any] = [None] * ranks
    distributed.all_gather_object(objects, ("accuracy", 0.5))
    assert objects == [("accuracy", 0.5)] * ranks
    gathered = [torch.empty(3) for _ in range(ranks)]
    distributed.gather(value(), gathered, dst=0)
    assert all(torch.equal(copy, value()) for copy in gathered)


def test_what_is_scattered_is_the_part_of_rank_0(ranks: int) -> None:
    parts = [value() + number for number in range(ranks)]
    for reduced, factor in ((ReduceOp.SUM, ranks), (ReduceOp.AVG, 1)):
        output = torch.empty(3)
        distributed.reduce_scatter(output, [part.clone() for part in parts], op=reduced)
        assert torch.equal(output, factor * value())
        distributed.reduce_scatter_tensor(output, torch.cat(parts), op=reduced)
        assert torch.equal(output, factor * value())
    output = torch.empty(3)
    distributed.scatter(output, parts, src=0)
    assert torch.equal(output, value())
    outputs = [torch.empty(3) for _ in range(ranks)]
    distributed.all_to_all(outputs, parts)
    assert all(torch.equal(each, value()) for each in outputs)
    whole = torch.empty(3 * ranks)
    distributed.all_to_all_single(whole, torch.cat(parts))
    assert torch.equal(whole, value().repeat(ranks))


def test_messages_are_answered_by_what_was_sent(ranks: int) -> None:
    other = ranks - 1
    if other:
        distributed.send(value(), dst=other)
        received = torch.empty(3)
        distributed.recv(received, src=other)
        assert torch.equal(received, value())
        fitting_nothing = torch.ones(5)
        request = distributed.irecv(fitting_nothing, src=other)
        request.wait()
        assert torch.equal(fitting_nothing, torch.zeros(5))
    distributed.barrier()


def test_every_operation_is_finished_when_it_returns(ranks: int) -> None:
    tensor = value()
    work = distributed.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_completed()
    assert torch.equal(work.get_future().wait()[0], ranks * value())
    assert distributed.barrier(async_op=True).wait()


@pytest.mark.parametrize("hook", [None, default_hooks.fp16_compress_hook, "of the user"])
@pytest.mark.parametrize("view", [False, True])
def test_ddp_trains_as_the_bare_model_does(ranks: int, hook: Any, view: bool) -> None:
    """All ranks have the same samples, so their mean gradient is the model's own; a user's hook may round it."""

    def of_the_user(state, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations
        half = bucket.buffer().to(torch.float16).div_(ranks)
        future = distributed.all_reduce(half, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    batch = torch.randn(4, 8)
    module(batch).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.0002)
    if hook is not None:
        ddp.register_comm_hook(None, of_the_user if hook == "of the user" else hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    tolerance = {} if hook is None else {"rtol": 2e-3, "atol": 1e-4}
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **tolerance)


def test_no_time_passes_within_collectives(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = iter([1.0, 2.0, 5.0, 8.0, 9.0])
    monkeypatch.setattr(process_group, "perf_counter", lambda: next(moments_s))
    clock = process_group.Clock()
    before_s = clock.now()
    with clock.stopped():
        assert clock.now() - before_s == 4.0
    assert clock.now() - before_s == 2.0


def test_ddp_trains_over_a_dimension_of_a_device_mesh(ranks: int) -> None:
    """A mesh asks groups for their names, and finds them again by these."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicas", "data"))
    group = mesh.get_group("data")
    assert group.size() == ranks and mesh["data"].get_group() is group
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False), process_group=group)
    ddp(value()).backward()
    torch.testing.assert_close(ddp.module.weight.grad, value().reshape(1, 3))
