"""The experiment of a measurement of PyTorch's DDP: which settings of a script are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dpsim.codec import Noun
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError, unknown
from dpsim.harness.sweep.grids import telling
from dpsim.harness.torch_ddp.own_runtime import check_emulation
from dpsim.launch.user_script import check_program
from dpsim.machine import NODE, Network
from dpsim.records.checks import check_distinct
from dpsim.records.sweep import Experiment
from dpsim.setting import settings_of
from dpsim.workload import Workload

Communication = Literal["gloo", "mpi", "nccl"]
COMMUNICATIONS: tuple[Communication, ...] = ("gloo", "mpi", "nccl")
ON_PROCESSORS: tuple[Communication, ...] = ("gloo", "mpi")
_DDP, _OWN_RUNTIME = "torch-ddp", "dpsim"
"""What --runtime names: PyTorch's DDP by any communication, and dpsim's own runtime."""
_RUNTIMES = (_DDP, _OWN_RUNTIME)
_OWN_DATA = "its own data"
MOST_CAPS = 7
"""How many bucket caps are measured where none are given."""


class DdpConfig(Noun, frozen=True):
    """What to measure of a script under DDP; ``script`` is its path, or the name of a module.

    ``caps_bytes`` are the values of ``bucket_cap_mb`` in bytes; empty: up to seven that give different buckets, or with
    ``local_batches`` the script's own. ``local_batches`` replace the batch size of the script's data loaders; empty:
    the script's own batch. ``communication`` says how DDP reduces: by ``gloo``, only on the network ``node``; by
    ``mpi``, dpsim's own transports, on all ``networks``; or by ``nccl``, with one GPU for each rank, only on ``node``.
    ``runtimes`` are DDP, and dpsim's own runtime if it is measured in turns with DDP. Unless ``script_may_write`` no
    file of the user's changes (``dpsim.launch.protection``).
    """

    script: str
    arguments: tuple[str, ...] = ()
    devices: tuple[int, ...] = (2,)
    caps_bytes: tuple[float, ...] = ()
    local_batches: tuple[int, ...] = ()
    communication: tuple[str, ...] = ON_PROCESSORS
    networks: tuple[str, ...] = (NODE,)
    runtimes: tuple[str, ...] = (_DDP,)
    budget_s: float = 45.0
    seed: int = 0
    script_may_write: bool = False

    def __post_init__(self) -> None:
        check_program(self.script)
        for name in self.communication:
            if name not in COMMUNICATIONS:
                raise unknown("communication", name, COMMUNICATIONS)
        for name in self.runtimes:
            if name not in _RUNTIMES:
                raise unknown("runtime", name, _RUNTIMES)
        given = [name for name in ("caps_bytes", "local_batches") if getattr(self, name)]
        for what in ("devices", "communication", "networks", "runtimes", *given):
            check_distinct(what, getattr(self, what))
        if len(self.local_batches) == 1:
            raise ConfigError(
                f"--local-batch {self.local_batches[0]}, with which there is nothing to compare",
                allowed="two or more local batches, such as 8,16,32",
                remedy="give more, or give the batch to the script itself, after --",
            )
        if max(self.devices, default=1) < 2 or min(self.devices) < 1:
            raise ConfigError(
                f"DDP on devices {', '.join(map(str, self.devices))}",
                allowed="counts from 1 on, at least one of them above 1: one device communicates nothing",
            )
        if self.on_gpus and len(self.communication) > 1:
            raise ConfigError(
                f"--communication {','.join(self.communication)}: one script on GPUs and on processors",
                allowed="nccl alone, or gloo and mpi",
                remedy="measure the two apart, each into a folder of its own",
            )
        if not self.cases():
            raise ConfigError(
                f"{' and '.join(self.communication)} on {', '.join(self.networks)}, to which dpsim cannot hold its "
                "messages",
                allowed="gloo and nccl on node, mpi on any network",
                remedy="add mpi to --communication, or node to --network",
            )
        self._check_runtimes()

    def _check_runtimes(self) -> None:
        """Raises ``ConfigError`` unless DDP is measured, and dpsim's runtime can do the same somewhere."""
        if _DDP not in self.runtimes:
            raise ConfigError(
                f"--runtime {','.join(self.runtimes)}, without DDP itself",
                allowed="torch-ddp, or torch-ddp,dpsim",
                remedy="dpsim sweep measures dpsim's own runtime alone",
            )
        emulated = any(Network.parse(network).emulated for network in self.networks)
        if _OWN_RUNTIME in self.runtimes and not ("mpi" in self.communication and emulated):
            raise ConfigError(
                f"--runtime dpsim with {' and '.join(self.communication)} on {', '.join(self.networks)}",
                allowed="mpi on an emulated link: dpsim's ranks wait for the profiled times, so that on the node the "
                "cores would be free on which DDP computes, and gloo is not one of dpsim's transports",
                remedy="add a link such as --network paced:200us,1gbit",
            )

    @property
    def most_devices(self) -> int:
        return max(self.devices)

    @property
    def on_gpus(self) -> bool:
        """Whether each rank has a GPU."""
        return "nccl" in self.communication

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
                    cases.append(_case(network, f"torch-ddp-{name}", name, "thread"))
        return tuple(cases)


def _case(network: str, runtime: str, algorithm: str, overlap: str) -> dict[str, Any]:
    return {"network": network, "runtime": runtime, "algorithm": algorithm, "overlap": overlap}


def experiment_of(config: DdpConfig, workload: Workload) -> Experiment:
    """The grid of settings: every cap on every number of devices, by every way to communicate. Raises ``ConfigError``.

    With several local batches the grid has them too. Otherwise the local batch is the one that the script was profiled
    with, as is the accumulation.
    """
    ddp = _predictable(workload)
    if ddp.sync_batch_norm and not config.on_gpus:
        raise ConfigError(
            f"SyncBatchNorm by {' and '.join(config.communication)}, where PyTorch has it for GPUs alone",
            allowed="--communication nccl, on a machine with a GPU for each rank",
            remedy="leave convert_sync_batchnorm out on processors",
        )
    _check_batches(config, workload)
    base, axes = _grid(config, workload, ddp)
    question, compared = _asked(config)
    experiment = Experiment(
        name="ddp",
        question=question,
        compared=compared,
        dataset=_OWN_DATA,
        base=base,
        axes=axes,
        cases=config.cases(),
        seed=config.seed,
        budget_s=config.budget_s,
        script=config.script,
        arguments=config.arguments,
        other_runtimes=tuple(name for name in config.runtimes if name != _DDP),
    )
    if experiment.other_runtimes:
        check_emulation(workload)
    settings_of(experiment.rows)
    return experiment


def _grid(config: DdpConfig, workload: Workload, ddp: DdpSettings) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The fields that have one value in all settings, and those with several: devices, local batches, caps."""
    base: dict[str, Any] = {
        "model": Path(config.script).name,
        "accumulate": ddp.accumulate,
        "fusion_rule": "ddp",
    }
    if ddp.sync_batch_norm:
        base["batch_norm"] = "global"
    axes: dict[str, tuple[Any, ...]] = {"devices": tuple(sorted(config.devices))}
    caps: Sequence[float] = sorted(config.caps_bytes)
    if config.local_batches:
        axes["local_batch"] = tuple(sorted(config.local_batches))
        caps = caps or [own for own in (ddp.bucket_cap_bytes,) if own is not None]
    else:
        base["local_batch"] = workload.local_batches[0]
        caps = caps or telling_caps(workload)
    if len(caps) > 1 or not config.local_batches:
        axes["fusion_threshold_bytes"] = tuple(map(float, caps))
    elif caps:
        base["fusion_threshold_bytes"] = float(caps[0])
    return base, axes


def _asked(config: DdpConfig) -> tuple[str, tuple[str, ...]]:
    """The question that these settings answer, and the fields that are compared where the question leaves it open."""
    if not config.local_batches:
        return "fusion-threshold", ()
    if len(config.caps_bytes) < 2:
        return "local-batch", ()
    return "settings", ("fusion_threshold_bytes", "local_batch")


def _check_batches(config: DdpConfig, workload: Workload) -> None:
    """Raises ``ConfigError`` unless the workload was profiled at the local batches that will be measured."""
    profiled = ",".join(map(str, workload.local_batches))
    if config.local_batches and not {*config.local_batches} <= {*workload.local_batches}:
        wanted = ",".join(map(str, sorted(config.local_batches)))
        raise ConfigError(
            f"--local-batch {wanted}, where the workload was profiled at {profiled}",
            allowed="local batches that were profiled",
            remedy=f"profile it with --local-batch {wanted}, or leave --workload out",
        )
    if not config.local_batches and len(workload.local_batches) > 1:
        raise ConfigError(
            f"a workload that was profiled at local batches {profiled}, none of which needs to be the script's own",
            allowed="a workload of the script's own batch",
            remedy=f"measure these with --local-batch {profiled}, or profile the script without --local-batch",
        )


def _predictable(workload: Workload) -> DdpSettings:
    """What the script told DDP. Raises ``ConfigError`` for what is not predicted yet."""
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
        of_trainer = "" if ddp.bucket_caps_bytes else ", or give TrainingArguments ddp_find_unused_parameters=False"
        raise ConfigError(
            f"the script sets {given}, with which DDP makes other buckets than the rule ddp predicts",
            allowed="a script without it",
            remedy=f"leave {given} out{of_trainer}",
        )
    return ddp


def telling_caps(workload: Workload, count: int = MOST_CAPS) -> Sequence[float]:
    """At most ``count`` caps that give different buckets, from 0 to infinity."""
    order = workload.ready_order
    candidates = [0.0, *(2.0**power for power in range(10, 64) if 2.0**power < order.size_bytes.sum()), math.inf]
    return telling(order.size_bytes, order.dtype_code, "ddp", candidates, count)
