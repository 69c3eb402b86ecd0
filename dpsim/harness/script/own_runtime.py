"""What is measured in turns and not predicted: dpsim's own runtime and dpsim's hook beside DDP, and DDP beside FSDP.

The ranks of dpsim's own runtime wait for the profiled times instead of computing. They send the same buckets over the
same link as DDP's communication hook, so that what differs between the two is what each runtime itself takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dpsim.constraints import FSDP, HOOK, Runtime
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.runtime.emulated import check_tensors
from dpsim.setting import Setting, beside_fsdp
from dpsim.workload import Workload

OWN_RUNTIME = "dpsim"
BESIDE_FSDP: Runtime = "torch-ddp-gloo"


def other_settings(settings: Sequence[Setting], runtimes: Sequence[str]) -> tuple[Setting, ...]:
    """The settings of several devices in which these runtimes can do what DDP does, with its plans.

    dpsim's own runtime can on an emulated link: on the node itself ranks that wait would leave the cores free on which
    DDP computes beside communication, and gloo is not among dpsim's transports. DDP with dpsim's hook takes the place
    of gloo, and DDP by gloo that of FSDP, which shards the model of a script for DDP.
    """
    changes: dict[tuple[str, bool], dict[str, str]] = {}
    if OWN_RUNTIME in runtimes:
        changes["torch-ddp-mpi", True] = {"runtime": OWN_RUNTIME, "compute": "emulated"}
    if HOOK in runtimes:
        changes["torch-ddp-gloo", False] = {"runtime": HOOK}
    others = [setting for setting in settings if setting.plan.devices > 1 and not setting.repeat]
    return tuple(
        msgspec.structs.replace(setting, **changes[kind])
        for setting in others
        if (kind := (setting.runtime, Network.parse(setting.network).paced)) in changes
    ) + tuple(beside_fsdp(setting) for setting in others if setting.runtime == FSDP and BESIDE_FSDP in runtimes)


def check_emulation(workload: Workload) -> None:
    """Raises ``ConfigError`` for a workload whose computation ranks cannot emulate by waiting."""
    check_tensors(workload)
    if workload.input_prefetch:
        raise ConfigError(
            "dpsim's own runtime with a script whose data loader has worker processes",
            allowed="a script that loads its data in the training process: loading beside training is not emulated",
            remedy="measure this script with --set runtime=torch-ddp alone, or with num_workers=0",
        )
