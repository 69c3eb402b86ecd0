"""The runtimes of a setting: dpsim, and PyTorch's DDP, which does not do all that dpsim does."""

from __future__ import annotations

from typing import Any

import pytest

from dpsim.errors import ConfigError
from dpsim.harness.sweep.questions import completed, group_name
from dpsim.records.sweep import Experiment
from dpsim.setting import Setting, setting_of

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
    assert "dpsim measure" in refused.value.remedy
