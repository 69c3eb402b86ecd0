"""Workloads of several local batches become one with tables. Needs no torch."""

from __future__ import annotations

import msgspec
import pytest

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.torch.script.recorded import joined
from dpsim.workload import Layer, Tensor, Workload


def workload(batch: int, **fields: object) -> Workload:
    """Each sample takes 1 s forward, 2 s backward and 0.5 s of overhead beside the step's 3 s."""
    layer = Layer(
        name="a", forward_s=(1.0 * batch,), backward_s=(2.0 * batch,), tensors=(Tensor(name="w", shape=(3,)),)
    )
    plain = Workload(
        name="net",
        source="a test",
        local_batches=(batch,),
        layers=(layer,),
        update_s=0.1,
        overhead_s=3.0 + 0.5 * batch,
        relative_uncertainty=0.01 * batch,
        input_s_per_sample=0.2,
        ddp=DdpSettings(torch="2.13", devices=8, bucket_bytes=(12,)),
    )
    return msgspec.structs.replace(plain, **fields)


def test_times_become_tables_and_the_overhead_a_line() -> None:
    table = joined([workload(4), workload(1), workload(2)])
    assert table.local_batches == (1, 2, 4)
    assert (table.layers[0].forward_s, table.layers[0].backward_s) == ((1, 2, 4), (2, 4, 8))
    assert (table.overhead_s, table.overhead_per_sample_s) == pytest.approx((3.0, 0.5))
    assert (table.update_s, table.input_s_per_sample, table.relative_uncertainty) == pytest.approx((0.1, 0.2, 0.04))
    assert table.ddp == workload(1).ddp and "1, 2, 4" in table.source


def test_one_local_batch_stays_as_it_is() -> None:
    alone = workload(4)
    assert joined([alone]) == alone


def test_trainings_that_differ_in_more_than_the_batch_are_refused() -> None:
    renamed = msgspec.structs.replace(workload(2).layers[0], name="b")
    for other in (workload(2, ddp=DdpSettings(torch="2.13", devices=8)), workload(2, layers=(renamed,))):
        with pytest.raises(ConfigError, match="with local batch 2"):
            joined([workload(1), other])
