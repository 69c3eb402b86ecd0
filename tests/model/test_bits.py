"""The law of bits: which plans it gives the same bits, and in which words it says why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpsim.lowering import lower
from dpsim.model.bits import Bits, letter, letters, plan_bits
from dpsim.model.bits_words import why_different, why_same
from dpsim.plan import Plan
from dpsim.units import ITEM_BYTES
from dpsim.workload import Layer, Tensor, Workload


def workload(*, batch_norm: bool = False) -> Workload:
    layers = tuple(
        Layer(
            name=f"dense{number}",
            kind="dense",
            forward_s=(0.0,),
            backward_s=(0.0,),
            tensors=(
                Tensor(name=f"dense{number}.weight", shape=(30, 10)),
                Tensor(name=f"dense{number}.bias", shape=(10,)),
            ),
            batch_norm_channels=10 if batch_norm else 0,
        )
        for number in (1, 2)
    )
    return Workload(name="two layers", local_batches=(1,), layers=layers)


def bits(*, batch_norm_layers: bool = False, **fields: Any) -> Bits:
    fields |= {"batch_norm": fields.get("batch_norm", "leaf" if "leaves" in fields else "local")}
    plan = Plan(**{"devices": 4, "global_batch": 64, "algorithm": "ring", "fusion_threshold_bytes": 0.0} | fields)
    return plan_bits(lower(workload(batch_norm=batch_norm_layers), plan))


SAME: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"devices": 2}, {"devices": 2, "algorithm": "direct", "fusion_threshold_bytes": math.inf}),
    ({"algorithm": "direct"}, {"algorithm": "direct", "fusion_threshold_bytes": math.inf}),
    ({"algorithm": "direct"}, {"algorithm": "auto"}),
    ({"algorithm": "direct"}, {"algorithm": "recursive-doubling"}),
    ({"algorithm": "direct"}, {"algorithm": "hierarchical", "layout": "2x2"}),
    ({"algorithm": "one-shot"}, {"algorithm": "two-shot", "overlap": "poll"}),
    ({"algorithm": "direct"}, {"algorithm": "auto", "strategy": "zero1"}),
    ({"devices": 1}, {"devices": 1, "fusion_threshold_bytes": math.inf}),
    ({"leaves": 8}, {"leaves": 8, "devices": 3, "algorithm": "mpi", "accumulate": 2}),
    ({"algorithm": "direct", "wire_dtype": "float16"}, {"algorithm": "auto", "wire_dtype": "float16"}),
)
OTHER: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, {"fusion_threshold_bytes": math.inf}, "sum over ranks"),
    ({}, {"algorithm": "direct"}, "its sum over ranks is ((0+1)+2)+3 here, and (0+1)+(2+3) there"),
    ({"algorithm": "halving-doubling"}, {"algorithm": "direct"}, "is (0+2)+(1+3) here, and (0+1)+(2+3) there"),
    ({}, {"strategy": "zero1"}, "sum over ranks"),
    ({"devices": 2}, {"devices": 1}, "a rank computes 32 samples at once here, and 64 there"),
    ({"leaves": 8}, {}, "it is trained in 8 leaves here, and in none there"),
    ({"accumulate": 2}, {"devices": 8}, "a rank adds 2 micro-batches of 8 samples here, and 1 micro-batch there"),
    (
        {"algorithm": "direct", "wire_dtype": "float16", "layout": "2x2"},
        {"algorithm": "hierarchical", "wire_dtype": "float16", "layout": "2x2"},
        "(0+1)+(2+3) of 0, 1, 2, 3 rounded to 16 bits here, and (0+1)+(2+3) of 0+1, 2+3 rounded to 16 bits there",
    ),
    (
        {"algorithm": "hierarchical", "wire_dtype": "float16", "layout": "1x4"},
        {"algorithm": "direct", "wire_dtype": "float16", "layout": "1x4"},
        "(0+1)+(2+3) here, and (0+1)+(2+3) of 0, 1, 2, 3 rounded to 16 bits there",
    ),
)


@pytest.mark.parametrize(("here", "there"), SAME)
def test_plans_with_the_same_bits(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert bits(**here).same(bits(**there)) and bits(**there).same(bits(**here))
    assert why_same(bits(**here), bits(**there))


@pytest.mark.parametrize(("here", "there", "why"), OTHER)
def test_plans_with_other_bits_and_why(here: dict[str, Any], there: dict[str, Any], why: str) -> None:
    assert not bits(**here).same(bits(**there)) and not bits(**there).same(bits(**here))
    assert why in why_different(bits(**here), bits(**there), "parameters/dense2.bias")


def test_two_ranks_have_one_order() -> None:
    assert why_same(bits(devices=2), bits(devices=2, algorithm="direct")).endswith("the one order of a sum of two")


def test_batch_norm_matters_where_there_is_one() -> None:
    local, whole = ({"devices": 2, "batch_norm": mode} for mode in ("local", "global"))
    assert bits(**local).same(bits(**whole))
    assert not bits(**local, batch_norm_layers=True).same(bits(**whole, batch_norm_layers=True))
    one, two = (bits(devices=devices, batch_norm_layers=True) for devices in (1, 2))
    expected = "batch norm normalises 32 samples at once here, and 64 there"
    assert why_different(two, one, "state/bn1.running_mean") == expected


def test_the_element_is_named_from_which_on_the_order_is_another() -> None:
    why = why_different(bits(), bits(fusion_threshold_bytes=math.inf), "parameters/dense2.weight")
    assert "its sum over ranks (element " in why
    assert bits().orders is not None and 310 * ITEM_BYTES["float32"] == 1240


def test_buckets_decided_while_running_are_the_same_where_their_order_does_not_matter() -> None:
    rule = {"fusion_rule": "horovod", "fusion_threshold_bytes": None}
    assert not bits(**rule).same(bits(**rule))
    assert bits(**rule, algorithm="direct").same(bits(algorithm="direct"))


def test_letters_are_equal_where_bits_are() -> None:
    plans = [bits(devices=2), bits(), bits(devices=2, algorithm="mpi"), bits(algorithm="direct"), bits(algorithm="mpi")]
    assert letters([each.digest for each in plans]) == ["A", "B", "A", "C", "C"]
    assert [letter(number) for number in (0, 25, 26, 27, 702)] == ["A", "Z", "AA", "AB", "AAA"]


def test_beyond_many_ranks_the_buckets_and_the_algorithm_decide() -> None:
    many = {"devices": 128, "global_batch": 256}
    assert bits(**many).same(bits(**many, overlap="poll"))
    assert not bits(**many).same(bits(**many, fusion_threshold_bytes=math.inf))


@pytest.mark.parametrize(("algorithm", "devices", "same"), [("auto", 4, False), ("auto", 2, True), ("ring", 4, True)])
def test_what_auto_takes_between_hosts_is_measured_in_each_run(algorithm: str, devices: int, same: bool) -> None:
    plan = Plan(devices=devices, global_batch=64, algorithm=algorithm)
    one, again = (plan_bits(lower(workload(), plan), shares_memory=False) for _ in range(2))
    assert one.same(again) == same
