"""Sweeps on shaped hosts: what is calibrated, what is predicted without that, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dpsim.errors import ConfigError
from dpsim.harness.sweep.experiment import needed_for
from dpsim.harness.sweep.questions import completed
from dpsim.network import Network, hosts_of
from dpsim.records.sweep import Experiment
from dpsim.setting import setting_of
from dpsim.study.environment import environment
from dpsim.study.inputs import calibration_kind, declared, kinds_of

PLAIN, SLOW = "shaped:4x200mbit", "shaped:4x200mbit+slow-host=50%"
ROW = {"model": "mlp:8", "global_batch": 64, "devices": 4, "network": PLAIN, "algorithm": "ring"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 5}, "5 devices on shaped:4x200mbit"),
        ({"devices": "2x2"}, "layout 2x2 on shaped:4x200mbit"),
        ({"algorithm": "one-shot"}, "cannot run on shaped:4x200mbit: it sends no messages"),
        ({"network": "shaped:1x1gbit"}, "not understood"),
        ({"network": f"{PLAIN}+late=1ms"}, "unknown condition"),
    ],
)
def test_what_shaped_hosts_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setting_of(ROW | changes)


def test_the_library_and_what_it_stands_for_run_between_hosts() -> None:
    for algorithm in ("mpi", "auto"):
        assert setting_of(ROW | {"algorithm": algorithm}).plan.algorithm == algorithm


def test_networks_of_one_run_have_the_same_hosts() -> None:
    assert [network.token for network in hosts_of([PLAIN, SLOW])] == [PLAIN, SLOW]
    assert hosts_of(["node", "paced:50us,1gbit"]) == hosts_of([]) == ()
    for other in ("node", "paced:50us,1gbit", "shaped:2x200mbit"):
        with pytest.raises(ConfigError, match="in one run"):
            hosts_of([PLAIN, other])


def test_conditions_have_the_calibration_of_the_plain_network() -> None:
    plain, slow = (setting_of(ROW | {"network": network}) for network in (PLAIN, SLOW))
    assert calibration_kind(plain) == calibration_kind(slow) and kinds_of(plain) != kinds_of(slow)
    base = {name: value for name, value in ROW.items() if name != "network"}
    experiment = completed(Experiment(base=base, axes={"network": (SLOW, PLAIN)}))
    needed = declared(needed_for(experiment, environment()))
    assert [config.network for config in needed.calibrations.values()] == [PLAIN]
    (profile,) = needed.profiles.values()
    assert profile.networks == (PLAIN,)


def test_what_is_calibrated_may_be_fewer_devices_than_are_measured() -> None:
    base = {name: value for name, value in ROW.items() if name != "devices"}
    of_all, of_few = (
        Experiment(base=base | {"network": "shaped:8x100mbit"}, axes={"devices": (2, 4, 8)}, calibrated_devices=counts)
        for counts in ((), (2, 4))
    )
    needed = [declared(needed_for(completed(each), environment())) for each in (of_all, of_few)]
    calibrated = [[sorted(map(int, config.devices)) for config in each.calibrations.values()] for each in needed]
    assert calibrated == [[[1, 2, 4, 8]], [[2, 4]]]


def test_hosts_are_named_by_their_token() -> None:
    network = Network.parse(f"{SLOW}+rate=100mbit")
    assert network.plain.token == PLAIN and network.emulated and network.shaped and not network.paced
    assert network.rates_bytes_per_s() == pytest.approx([12.5e6, 6.25e6, 12.5e6, 12.5e6])
