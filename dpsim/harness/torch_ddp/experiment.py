"""The experiment of a measurement of PyTorch's DDP: which settings of a script are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.harness.sweep.grids import telling
from dpsim.launch.user_script import check_script
from dpsim.machine import NODE, Network
from dpsim.records.checks import check_distinct
from dpsim.records.sweep import Experiment
from dpsim.setting import settings_of
from dpsim.workload import Workload

Communication = Literal["gloo", "mpi"]
COMMUNICATIONS: tuple[Communication, ...] = ("gloo", "mpi")
OWN_DATA = "its own data"


class DdpConfig(Noun, frozen=True):
    """What to measure of a script under DDP.

    ``caps_bytes`` are the values of ``bucket_cap_mb`` in bytes; empty: up to seven that give different buckets.
    ``communication`` says how DDP reduces: ``gloo``, which the networks' ``node`` alone has, or ``mpi``, which is
    dpsim's own transports on all ``networks``.
    """

    script: str
    arguments: tuple[str, ...] = ()
    devices: tuple[int, ...] = (2,)
    caps_bytes: tuple[float, ...] = ()
    communication: tuple[str, ...] = COMMUNICATIONS
    networks: tuple[str, ...] = (NODE,)
    budget_s: float = 45.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_script(self.script)
        for name in self.communication:
            if name not in COMMUNICATIONS:
                raise unknown("communication", name, COMMUNICATIONS)
        for what in ("devices", "communication", "networks", *(["caps_bytes"] if self.caps_bytes else [])):
            check_distinct(what, getattr(self, what))
        if max(self.devices, default=1) < 2 or min(self.devices) < 1:
            raise ConfigError(
                f"DDP on devices {', '.join(map(str, self.devices))}",
                allowed="counts from 1 on, at least one of them above 1: one device communicates nothing",
            )
        if not self.cases():
            raise ConfigError(
                f"gloo on {', '.join(self.networks)}, whose messages dpsim cannot hold to a link",
                allowed="gloo on node, mpi on any network",
                remedy="add mpi to --communication, or node to --network",
            )

    @property
    def most_devices(self) -> int:
        return max(self.devices)

    def cases(self) -> tuple[dict[str, Any], ...]:
        """A case for each way to communicate on each network, with its algorithm and when it communicates."""
        cases: list[dict[str, Any]] = []
        for name in self.communication:
            for network in self.networks:
                emulated = Network.parse(network).emulated
                if name == "mpi":
                    algorithm, overlap = ("ring", "thread") if emulated else ("mpi", "inline")
                    cases.append(_case(network, "torch-ddp-mpi", algorithm, overlap))
                elif not emulated:
                    cases.append(_case(network, "torch-ddp-gloo", "gloo", "thread"))
        return tuple(cases)


def _case(network: str, runtime: str, algorithm: str, overlap: str) -> dict[str, Any]:
    return {"network": network, "runtime": runtime, "algorithm": algorithm, "overlap": overlap}


def experiment_of(config: DdpConfig, workload: Workload) -> Experiment:
    """The grid of settings: every cap on every number of devices, by every way to communicate. Raises ``ConfigError``.

    The local batch and the accumulation are those that the script was profiled with.
    """
    ddp = workload.ddp
    if ddp is None:
        raise ConfigError(
            f"the workload {workload.name!r} was not recorded from a PyTorch script",
            allowed="a workload that dpsim profile --torch-script has written",
            remedy="leave --workload out, and the script is profiled first",
        )
    if ddp.communication_hook:
        raise ConfigError(
            f"the script registers the communication hook {ddp.communication_hook}",
            allowed="a script without a communication hook: what a hook sends is not predicted yet",
            remedy="measure the script without it",
        )
    if ddp.bucket_caps_bytes or (ddp.find_unused_parameters and not ddp.static_graph):
        given = "bucket_cap_mb_list" if ddp.bucket_caps_bytes else "find_unused_parameters"
        raise ConfigError(
            f"the script sets {given}, with which DDP makes other buckets than the rule ddp predicts",
            allowed="a script without it",
            remedy=f"leave {given} out",
        )
    caps = sorted(config.caps_bytes) or telling_caps(workload)
    experiment = Experiment(
        name="ddp",
        question="fusion-threshold",
        dataset=OWN_DATA,
        base={
            "model": Path(config.script).name,
            "local_batch": workload.local_batches[0],
            "accumulate": ddp.accumulate,
            "fusion_rule": "ddp",
        },
        axes={"devices": tuple(sorted(config.devices)), "fusion_threshold_bytes": tuple(caps)},
        cases=config.cases(),
        seed=config.seed,
        budget_s=config.budget_s,
        script=config.script,
        arguments=config.arguments,
    )
    settings_of(experiment.rows)
    return experiment


def telling_caps(workload: Workload, count: int = 7) -> Sequence[float]:
    """At most ``count`` caps that give different buckets, from 0 to infinity."""
    order = workload.ready_order
    candidates = [0.0, *(2.0**power for power in range(10, 64) if 2.0**power < order.size_bytes.sum()), math.inf]
    return telling(order.size_bytes, order.dtype_code, "ddp", candidates, count)
