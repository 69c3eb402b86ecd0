"""The table of impossible combinations: of a plan, and of what a backend and PyTorch's DDP do not do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dpsim.collective import Layout
from dpsim.constraints import check, check_backend, possible
from dpsim.errors import ConfigError
from dpsim.harness.sweep.questions import completed, group_name
from dpsim.machine import Network
from dpsim.optimizer import Lars
from dpsim.plan import Plan
from dpsim.plan_constraints import CONSTRAINTS
from dpsim.records.sweep import Experiment
from dpsim.setting import Setting, setting_of

PLAIN: dict[str, Any] = {"devices": 2, "global_batch": 64}
SERVER = "parameter-server:staleness=2"
IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"algorithm": "hierarchical"},
    {"wire_dtype": "bfloat16", "algorithm": "ring"},
    {"accumulate": 40},
    {"leaves": 8, "devices": 4, "accumulate": 4, "batch_norm": "leaf"},
    {"leaves": 8},
    {"batch_norm": "leaf"},
    {"batch_norm": "global", "fusion_rule": "horovod", "overlap": "inline"},
    {"batch_norm": "global", "accumulate": 2},
    {"strategy": "pipeline:stages=3"},
    {"strategy": "zero3:replicas=2", "devices": 3},
    {"strategy": "zero3:replicas=2", "devices": 4, "leaves": 6, "batch_norm": "leaf"},
    {"strategy": "pipeline:stages=3", "devices": 12, "layout": Layout("2x6"), "algorithm": "ring", "global_batch": 96},
    {"strategy": "zero1", "algorithm": "ring", "fusion_rule": "horovod"},
    {"strategy": "zero1", "algorithm": "one-shot"},
    {"strategy": "zero1", "algorithm": "direct", "wire_dtype": "float16"},
    {"strategy": "pipeline", "algorithm": "direct", "wire_dtype": "float16"},
    {"strategy": "pipeline", "batch_norm": "global"},
    {"strategy": "zero3", "leaves": 6, "accumulate": 2, "batch_norm": "leaf"},
    {"strategy": SERVER, "leaves": 8, "batch_norm": "leaf"},
    {"strategy": SERVER, "accumulate": 2},
    {"strategy": SERVER, "batch_norm": "global"},
    {"strategy": SERVER, "wire_dtype": "float16", "algorithm": "direct", "leaves": 0},
    {"strategy": SERVER, "overlap": "poll"},
    {"strategy": SERVER, "optimizer": Lars()},
    {"fusion_rule": "one", "fusion_threshold_bytes": 0.0},
)


@pytest.mark.parametrize(("row", "given"), [*zip(CONSTRAINTS, IMPOSSIBLE, strict=True)])
def test_a_plan_is_refused_with_the_words_of_its_row(row: Any, given: dict[str, Any]) -> None:
    defaults = {name: getattr(Plan(**PLAIN), name) for name in row.fields.split()}
    values = defaults | {name: value for name, value in (PLAIN | given).items() if name in defaults}
    with pytest.raises(ConfigError) as refused:
        check(**values)
    with pytest.raises(ConfigError, match=re.escape(refused.value.given)):
        Plan(**(PLAIN | given))
    assert "{" not in str(refused.value) and refused.value.allowed and refused.value.remedy
    assert all(not possible(name, **values) for name in row.fields.split())


def test_constraints_of_fields_that_are_not_given_do_not_count() -> None:
    check(algorithm="hierarchical", devices=2)
    check(strategy="zero1", wire_dtype="float32")
    assert possible("algorithm", algorithm="hierarchical", devices=4, layout=Layout("2x2"))
    assert not possible("algorithm", algorithm="hierarchical", devices=4, layout="")
    assert possible("strategy", algorithm="hierarchical", devices=4, layout="")


@pytest.mark.parametrize(
    ("backend", "fields", "network", "said"),
    [
        ("gpu", {}, "node", "unknown backend 'gpu'"),
        ("cuda", {"algorithm": "mpi"}, "node", "algorithm 'mpi' has no CUDA kernel"),
        ("cuda", {}, "paced:1us,1gbit", "not an emulated network"),
        ("cuda", {"strategy": "zero1"}, "node", "strategy zero1 on backend 'cuda'"),
        ("cuda", {"algorithm": "nccl", "leaves": 8}, "node", "algorithm nccl with leaves: NCCL adds in an order that"),
        ("cuda", {"algorithm": "nccl", "wire_dtype": "float16"}, "node", "algorithm nccl with wire dtype float16"),
        *(
            ("cuda", {"algorithm": name, "leaves": 8, "wire_dtype": "float16"}, "node", f"algorithm '{name}' with wire")
            for name in ("ring", "one-shot", "halving-doubling")
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused(backend: str, fields: dict[str, Any], network: str, said: str) -> None:
    norm = {"batch_norm": Plan.default_batch_norm(fields.get("leaves", 0))}
    plan = Plan(**(PLAIN | {"algorithm": "direct"} | norm | fields))
    with pytest.raises(ConfigError, match=said):
        check_backend(backend, plan, Network.parse(network))
    check_backend("cpu", plan, Network.parse(network))


@pytest.mark.parametrize("algorithm", ["auto", "two-shot", "direct"])
def test_kernels_on_gpus_send_16_bits_by_one_algorithm(algorithm: str) -> None:
    for leaves, norm in ((0, "local"), (8, "leaf")):
        fields = {"algorithm": algorithm, "leaves": leaves, "batch_norm": norm, "wire_dtype": "bfloat16"}
        check_backend("cuda", Plan(**(PLAIN | fields)), Network())


GLOO = {
    "model": "train.py",
    "runtime": "torch-ddp-gloo",
    "algorithm": "gloo",
    "overlap": "thread",
    "fusion_rule": "ddp",
    "devices": 2,
    "local_batch": 4,
}
HOOK = GLOO | {"runtime": "torch-ddp-mpi", "algorithm": "mpi", "overlap": "inline"}


def test_settings_of_ddp_are_told_apart_from_those_of_dpsim_and_from_each_other() -> None:
    settings = [setting_of(GLOO), setting_of(HOOK)]
    assert [setting.where for setting in settings] == ["node (torch-ddp-gloo)", "node (torch-ddp-mpi)"]
    assert settings[0].order != settings[1].order
    assert Setting(plan=settings[1].plan, model="train.py").where == "node"


@pytest.mark.parametrize(
    ("row", "given"),
    [
        (GLOO | {"network": "paced:50us,1gbit"}, "network is paced"),
        (GLOO | {"algorithm": "mpi"}, "algorithm is mpi"),
        (GLOO | {"overlap": "inline"}, "overlap is inline"),
        (GLOO | {"fusion_rule": "tarantella"}, "fusion_rule is tarantella"),
        (HOOK | {"algorithm": "ring"}, "algorithm is ring"),
        (HOOK | {"overlap": "poll"}, "overlap is poll"),
        (HOOK | {"devices": "2x2"}, "layout is 2x2"),
        (HOOK | {"algorithm": "gloo"}, "algorithm 'gloo'"),
        (GLOO | {"runtime": "torch"}, "'torch'"),
        (GLOO | {"runtime": "dpsim"}, "algorithm 'gloo'"),
    ],
)
def test_what_ddp_does_not_do_is_refused(row: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        setting_of(row)
    assert given in str(refused.value)


def test_one_device_needs_no_overlap() -> None:
    assert setting_of(GLOO | {"devices": 1, "overlap": "off"}).plan.devices == 1


def test_a_group_is_named_by_its_network_and_runtime() -> None:
    cases = tuple({name: row[name] for name in ("runtime", "algorithm", "overlap")} for row in (GLOO, HOOK))
    base = {name: GLOO[name] for name in ("model", "devices", "local_batch", "fusion_rule")}
    experiment = Experiment(question="fusion-threshold", base=base, cases=cases)
    assert group_name(experiment, setting_of(HOOK)) == "node (torch-ddp-mpi); 2 devices"


def test_a_sweep_does_not_train_by_another_runtime() -> None:
    with pytest.raises(ConfigError, match="torch-ddp-gloo") as refused:
        completed(Experiment(question="fusion-threshold", base=GLOO))
    assert "dpsim sweep --torch-script" in refused.value.remedy
