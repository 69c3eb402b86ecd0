"""The experiment of a measurement of PyTorch's DDP: which settings of a script are compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dpsim.constraints import DDP_OVERLAPS, FSDP, HOOK, LIBRARIES
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError, unknown
from dpsim.harness.script.own_runtime import BESIDE_FSDP, OWN_RUNTIME, check_emulation
from dpsim.harness.sweep.grids import telling
from dpsim.installation import install
from dpsim.launch.job_python import JobPython
from dpsim.launch.user_program import check_program
from dpsim.machine import NODE, Network
from dpsim.model.thresholds import LEAST_CAP_BYTES
from dpsim.records.checks import check_distinct
from dpsim.records.sweep import Experiment
from dpsim.setting import settings_of
from dpsim.strategy import FULLY_SHARD, ZERO_REDUNDANCY, DataParallel, fully_sharded, parse_strategy
from dpsim.workload import Workload

_HOOK = "hook"
COMMUNICATIONS = ("gloo", "mpi", "nccl", _HOOK)
ON_PROCESSORS = ("gloo", "mpi")
_DDP = "torch-ddp"
"""What --set runtime names: PyTorch's DDP by any communication, and dpsim's own runtime."""
_RUNTIMES = (_DDP, OWN_RUNTIME)
_OWN_DATA = "its own data"
_CAP, _BATCH = "fusion_threshold_bytes", "local_batch"
_ACCUMULATE = "accumulate"
_LISTS = {_CAP: "caps_bytes", _BATCH: "local_batches", _ACCUMULATE: "accumulates"}
"""What ``script_experiment`` calls several values of a setting's field."""
MOST_CAPS = 7
"""How many bucket caps are measured where none are given."""


def script_experiment(
    script: str,
    *,
    devices: Sequence[int] = (2,),
    caps_bytes: Sequence[float | None] = (),
    local_batches: Sequence[int] = (),
    accumulates: Sequence[int] = (),
    communication: Sequence[str] = (),
    networks: Sequence[str] = (NODE,),
    runtimes: Sequence[str] = (_DDP,),
    strategy: str = DataParallel.name,
    **others: Any,
) -> Experiment:
    """Return what to measure of a script under DDP; ``script`` is its path, or the name of a module.

    ``caps_bytes`` are the values of ``bucket_cap_mb`` in bytes, ``None`` the script's own; none: ``completed`` finds up
    to seven that give different buckets, or with ``local_batches`` takes the script's own. ``local_batches`` replace
    the batch size of the script's data loaders; none: its own. ``accumulates`` are numbers of micro-batches that a step
    is made to have (``dpsim.torch.script.probe.accumulated``); none: the script's own. ``communication`` says how DDP
    reduces: by ``gloo``, on ``node`` and shaped networks; by ``mpi``, dpsim's transports, on all ``networks``; or by
    ``nccl``, with one GPU for each rank, only on ``node``; none: gloo, and mpi
    unless all are shaped. With ``hook``, ``dpsim.torch.allreduce_hook()`` is measured in turns with gloo, and not
    predicted. With the ``strategy`` zero3 the model that the script wraps in DDP is sharded
    by FSDP instead, by gloo, and DDP is measured in turns with it, and not predicted.
    ``runtimes`` are DDP, and dpsim's own runtime if it is measured in turns with DDP. ``others`` are
    fields of the experiment. Raises ``ConfigError``.
    """
    check_program(script)
    on_hosts_alone = all(Network.parse(network).shaped for network in networks)
    communication = communication or (("gloo",) if on_hosts_alone else ON_PROCESSORS)
    for what, names, known in (("communication", communication, COMMUNICATIONS), ("runtime", runtimes, _RUNTIMES)):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    lists: dict[str, Sequence[Any]] = {"communication": communication, "networks": networks, "runtimes": runtimes}
    lists |= {"devices": devices}
    axes = {_BATCH: local_batches, _ACCUMULATE: accumulates, _CAP: caps_bytes}
    lists |= {name: values for name, values in axes.items() if values}
    for name, values in lists.items():
        check_distinct(_LISTS.get(name, name), values)
    if len(local_batches) == 1:
        raise ConfigError(
            f"--local-batch {local_batches[0]}, with which there is nothing to compare",
            allowed="two or more local batches, such as 8,16,32",
            remedy="give more, or give the batch to the script itself, after --",
        )
    if len(accumulates) == 1:
        raise ConfigError(
            f"--accumulate {accumulates[0]}, with which there is nothing to compare",
            allowed="two or more numbers of micro-batches, such as 1,2,4",
            remedy="add 1, which is the script as it is",
        )
    if max(devices, default=1) < 2 or min(devices) < 1:
        raise ConfigError(
            f"DDP on devices {', '.join(map(str, devices))}",
            allowed="counts from 1 on, at least one of them above 1: one device communicates nothing",
        )
    if "nccl" in communication and len(communication) > 1:
        raise ConfigError(
            f"--algorithm {','.join(communication)}: one script on GPUs and on processors",
            allowed="nccl alone, or gloo, mpi and hook",
            remedy="measure the two apart, each into a folder of its own",
        )
    if _HOOK in communication and not ("gloo" in communication and NODE in networks):
        raise ConfigError(
            f"--algorithm {','.join(communication)} on {', '.join(networks)}: dpsim's hook without gloo on node",
            allowed="hook with gloo on node, with which it takes turns",
            remedy="give --algorithm gloo,hook, and leave --network out",
        )
    name, _, settings = strategy.partition(":")
    if name not in (DataParallel.name, FULLY_SHARD.name) or (settings and not settings.startswith("replicas=")):
        raise unknown(
            "strategy of a PyTorch script", strategy, (DataParallel.name, FULLY_SHARD.name, "zero3:replicas=2")
        )
    cases = [case for name in communication for network in networks if (case := _case(name, network))]
    if not cases:
        raise ConfigError(
            f"{' and '.join(communication)} on {', '.join(networks)}, to which dpsim cannot hold its messages",
            allowed="nccl on node, gloo on node and shaped networks, mpi on any network",
            remedy="add mpi to --algorithm, or node to --network",
        )
    _check_runtimes(runtimes, communication, networks)
    in_order = {name: tuple(sorted(lists[name], key=_own_first)) for name in ("devices", *_LISTS) if name in lists}
    experiment = Experiment(
        name="ddp",
        dataset=_OWN_DATA,
        axes=in_order,
        cases=tuple(cases),
        script=script,
        other_runtimes=(*(name for name in runtimes if name != _DDP), *([HOOK] if _HOOK in communication else [])),
        **others,
    )
    if strategy == DataParallel.name:
        return experiment
    return replace(_sharded(experiment, parse_strategy(strategy).replicas), other_runtimes=(BESIDE_FSDP,))


def _own_first(value: float | None) -> float:
    return -1.0 if value is None else value


def _case(communication: str, network: str) -> dict[str, Any]:
    """The fields of a way to communicate on a network; none where there is no such way."""
    link = Network.parse(network)
    impossible = {_HOOK: True, "nccl": link.emulated, "gloo": link.paced}
    if impossible.get(communication):
        return {}
    algorithm, overlap = (communication, "thread") if communication != "mpi" else ("mpi", "inline")
    if link.paced:
        algorithm, overlap = "ring", "thread"
    return {"network": network, "runtime": f"torch-ddp-{communication}", "algorithm": algorithm, "overlap": overlap}


def _check_runtimes(runtimes: Sequence[str], communication: Sequence[str], networks: Sequence[str]) -> None:
    """Raises ``ConfigError`` unless DDP is measured, and dpsim's runtime can do the same somewhere."""
    if _DDP not in runtimes:
        raise ConfigError(
            f"--set runtime={','.join(runtimes)}, without DDP itself",
            allowed="torch-ddp, or torch-ddp,dpsim",
            remedy="dpsim sweep measures dpsim's own runtime alone",
        )
    paced = any(Network.parse(network).paced for network in networks)
    if OWN_RUNTIME in runtimes and not ("mpi" in communication and paced):
        raise ConfigError(
            f"--set runtime=dpsim with {' and '.join(communication)} on {', '.join(networks)}",
            allowed="mpi on a paced link: dpsim's ranks wait for the profiled times, so that on the node the "
            "cores would be free on which DDP computes, and gloo is not one of dpsim's transports",
            remedy="add a link such as --network paced:200us,1gbit",
        )


def shards(experiment: Experiment) -> bool:
    """Return whether FSDP trains, whatever the script wraps its model in."""
    return FSDP in experiment.values("runtime")


def replicas_of(experiment: Experiment) -> int:
    """Return how many copies FSDP has of the model, whatever the script wraps it in; 1 where it does not train."""
    strategies = experiment.values("strategy") if shards(experiment) else ()
    return max((parse_strategy(str(each)).replicas for each in strategies), default=1)


def on_gpus(experiment: Experiment) -> bool:
    """Return whether each rank has a GPU."""
    return "torch-ddp-nccl" in experiment.values("runtime")


def most_devices(experiment: Experiment) -> int:
    """Return the largest number of ranks of a setting."""
    return max(map(int, experiment.values("devices")))


def check_python(experiment: Experiment, by: JobPython) -> None:
    """Raises ``ConfigError`` for what needs dpsim in the processes of the script, where these have another Python."""
    needs = {"torch-ddp-mpi": "--algorithm mpi", HOOK: "--algorithm hook", OWN_RUNTIME: "--set runtime=dpsim"}
    runtimes = {*experiment.values("runtime"), *experiment.other_runtimes}
    asked = [flag for name, flag in needs.items() if name in runtimes]
    if asked and not by.is_own:
        raise ConfigError(
            f"{' and '.join(asked)} with a script that runs with {by.path}, which has no dpsim",
            allowed="--algorithm gloo or nccl there, on the network node",
            remedy=f"leave {'it' if len(asked) == 1 else 'them'} out, or install PyTorch beside dpsim"
            f" ({install('torch')}) and add --python {sys.executable}",
        )


def completed(experiment: Experiment, workload: Workload) -> Experiment:
    """Fill in what the profile of the script decides: its batch, its accumulation, the bucket caps that matter.

    Every cap is measured on every number of devices, by every way to communicate. Raises ``ConfigError``.
    """
    ddp = _predictable(workload)
    if ddp.units:
        if (asked := replicas_of(experiment)) not in (1, ddp.replicas):
            raise ConfigError(
                f"--strategy zero3:replicas={asked} with a script that shards its model itself, in {ddp.replicas}",
                allowed="replicas of what a script wraps in DistributedDataParallel",
                remedy="leave --strategy out",
            )
        experiment = _sharded(experiment, ddp.replicas)
    elif any(tensor.dtype == "bfloat16" for tensor in workload.tensors):
        experiment = _without_mpi(experiment)
    if ddp.sharded_optimizer:
        experiment = _with_broadcasts(experiment)
    if ddp.sync_batch_norm and not on_gpus(experiment):
        ways = dict.fromkeys(str(name).removeprefix("torch-ddp-") for name in experiment.values("runtime"))
        raise ConfigError(
            f"SyncBatchNorm by {' and '.join(ways)}, where PyTorch has it for GPUs alone",
            allowed="--algorithm nccl, on a machine with a GPU for each rank",
            remedy="leave convert_sync_batchnorm out; dpsim predict --set batch_norm=local,global says what it costs",
        )
    batches = tuple(map(int, experiment.values(_BATCH)))
    _check_batches(batches, workload)
    accumulates = experiment.values(_ACCUMULATE)
    if accumulates and ddp.accumulate > 1:
        raise ConfigError(
            f"--accumulate {','.join(map(str, accumulates))}, and the script has {ddp.accumulate} micro-batches a step",
            allowed="a script that updates after every backward()",
            remedy="leave --accumulate out, or tell the script not to accumulate, after --",
        )
    base: dict[str, Any] = {"model": Path(experiment.script).name}
    if not accumulates:
        base[_ACCUMULATE] = ddp.accumulate
    base["fusion_rule"] = "fsdp" if ddp.units else "ddp"
    if ddp.sync_batch_norm:
        base["batch_norm"] = "global"
    caps = tuple(dict.fromkeys(ddp.bucket_cap_bytes if cap is None else cap for cap in experiment.values(_CAP)))
    if not batches:
        base[_BATCH] = workload.local_batches[0]
    one_cap = bool(batches or accumulates or None in caps) or HOOK in experiment.other_runtimes
    if not one_cap:
        caps = () if ddp.units else caps or telling(workload, "ddp", LEAST_CAP_BYTES, MOST_CAPS)
    elif ddp.bucket_cap_bytes is not None:
        caps = caps or (ddp.bucket_cap_bytes,)
    axes = {name: values for name, values in experiment.axes.items() if name != _CAP}
    if len(caps) > 1 or not (one_cap or ddp.units):
        axes[_CAP] = tuple(None if cap is None else float(cap) for cap in caps)
    elif caps and caps[0] is not None:
        base[_CAP] = float(caps[0])
    question, compared = "fusion-threshold", tuple[str, ...]()
    several = tuple(name for name in _LISTS if len(axes.get(name, ())) > 1)
    if one_cap and several == (_BATCH,):
        question = "local-batch"
    elif one_cap:
        question, compared = "settings", several or ("devices",)
    elif ddp.units:
        question, compared = "settings", ("devices",)
    if OWN_RUNTIME in experiment.other_runtimes:
        check_emulation(workload)
    whole = replace(experiment, base=base, axes=axes, question=question, compared=compared)
    settings_of(whole.rows)
    return whole


def _with_broadcasts(experiment: Experiment) -> Experiment:
    """The experiment in which ``ZeroRedundancyOptimizer`` broadcasts parameters, by the library that DDP uses too."""
    of_library = {"strategy": ZERO_REDUNDANCY}
    cases = (case | of_library if case["runtime"] in LIBRARIES else case for case in experiment.cases)
    return replace(experiment, cases=tuple(cases))


def _without_mpi(experiment: Experiment) -> Experiment:
    """The experiment without dpsim's transports, whose NumPy has no bfloat16. Raises ``ConfigError``."""
    cases = tuple(case for case in experiment.cases if not str(case["runtime"]).endswith("-mpi"))
    if not cases:
        raise ConfigError(
            "gradients of bfloat16 by --algorithm mpi",
            allowed="float32, float64 or float16 by dpsim's transports; bfloat16 by gloo, on the network node",
            remedy="give --algorithm gloo and leave --network out, or train parameters of float32 under torch.autocast",
        )
    return replace(experiment, cases=cases)


def _sharded(experiment: Experiment, replicas: int) -> Experiment:
    """The experiment where FSDP trains so many replicas: by gloo. Raises ``ConfigError``."""
    given, allowed = "", ""
    if experiment.values(_CAP):
        given, allowed = "--fusion-threshold", "no cap: the modules that fully_shard is given are the buckets"
    elif {OWN_RUNTIME, HOOK} & {*experiment.other_runtimes}:
        flag = "--algorithm hook" if HOOK in experiment.other_runtimes else "--set runtime=dpsim"
        given, allowed = flag, "PyTorch alone: --set runtime=torch-ddp --algorithm gloo"
    elif not {"torch-ddp-gloo", FSDP} & {*experiment.values("runtime")}:
        given, allowed = "communication other than gloo", "--algorithm gloo on node or a shaped network"
    if given:
        raise ConfigError(
            f"{given} where FSDP trains", allowed=allowed, remedy="leave it out, or measure a script with DDP"
        )
    case = {"runtime": FSDP, "algorithm": LIBRARIES[FSDP], "overlap": DDP_OVERLAPS[FSDP][0]}
    case["strategy"] = fully_sharded(replicas)
    by_gloo = [each for each in experiment.cases if each["runtime"] in ("torch-ddp-gloo", FSDP)]
    return replace(experiment, cases=tuple(case | {"network": each["network"]} for each in by_gloo))


def _check_batches(batches: Sequence[int], workload: Workload) -> None:
    """Raises ``ConfigError`` unless the workload was profiled at the local batches that will be measured."""
    profiled = ",".join(map(str, workload.local_batches))
    if batches and not {*batches} <= {*workload.local_batches}:
        wanted = ",".join(map(str, batches))
        raise ConfigError(
            f"--local-batch {wanted}, where the workload was profiled at {profiled}",
            allowed="local batches that were profiled",
            remedy=f"profile it with --local-batch {wanted}, or leave --workload out",
        )
    if not batches and len(workload.local_batches) > 1:
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
