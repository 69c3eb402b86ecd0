"""One process that runs a user's DDP or FSDP script, and trains whenever it is its turn. Loads torch and MPI.

As a rank of a setting it communicates, and its steps are timed; as one of a profile it communicates with none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.comm.group import quiet_barrier
from dpsim.comm.networks import transport
from dpsim.constraints import FSDP, HOOK
from dpsim.errors import ConfigError
from dpsim.launch.rank_process import pin
from dpsim.launch.user_program import run_as_main
from dpsim.machine import Network
from dpsim.setting import Setting
from dpsim.torch.script import timed
from dpsim.torch.script.probe import process_group
from dpsim.torch.script.probe.batches import replace_batch_size
from dpsim.torch.script.probe.endings import EnoughSteps, Refused
from dpsim.torch.script.probe.fsdp import WaitedCollectives
from dpsim.torch.script.probe.record import Recorder
from dpsim.torch.script.probe.run_script import act_as_rank, install, take_over_spawn
from dpsim.torch.script.probe.script_error import calls_to, remedy_of, what_happened
from dpsim.torch.script.probe.script_record import script_record
from dpsim.torch.script.recorded import workload_of
from dpsim.torch.script.reductions import MpiReduction
from dpsim.torch.script.request import ScriptRequest
from dpsim.torch.script.script_record import ScriptRecord, recorded_of
from dpsim.torch.script.visit import Turns, Visit

Script = tuple[str, tuple[str, ...]]
"""A script, by its path or the name of a module, and its arguments."""


def train_in_turns(group: MPI.Intracomm, setting: Setting, script: Script, folder: str, number: int) -> None:
    """Run the script as a rank of ``group`` under a setting, the ``number``-th of what is visited, until it is enough.

    Raises ``ConfigError`` where the script cannot be measured.
    """
    pin(group)
    quiet_barrier(group)  # others may still be loading PyTorch
    reduction: MpiReduction | None = None
    if setting.runtime == "torch-ddp-mpi" and group.size > 1:
        link = transport(group, Network.parse(setting.network))
        reduction = MpiReduction(link, setting.plan.algorithm, setting.plan.overlap)
    become(group.rank, group.size)
    process_group.connect(
        str(Path(folder) / f"ranks-{number}"), group.rank, group.size, on_gpus=setting.runtime == "torch-ddp-nccl"
    )
    turns = Turns(folder, number)
    waited = WaitedCollectives() if setting.runtime == FSDP else reduction
    timer = timed.StepTimer(turns.take, waited, dpsim_hook=setting.runtime == HOOK)
    cap_bytes, sharded = setting.plan.fusion_threshold_bytes, setting.runtime == FSDP
    install(timer, bucket_cap_bytes=cap_bytes, updates=False, instead_of_ddp=sharded)
    _run(script, turns, timer)
    if reduction is not None:
        reduction.close()
    process_group.disconnect()


def profile_in_turns(group: MPI.Intracomm, request: ScriptRequest, folder: str, number: int) -> None:
    """Run the script as rank 0 of the request's devices, beside the other ranks of ``group``, and profile its turns.

    Each is profiled by itself, and communicates with none. Raises ``ConfigError`` where the script cannot be profiled.
    """
    pin(group)
    become(0, request.devices)
    process_group.answer_for(request.devices)
    turns = Turns(folder, number)

    def recorded(recorder: Recorder) -> None:
        profiled = None
        if recorder.steps:
            record = codec.convert(script_record(recorder), ScriptRecord)
            profiled = workload_of(recorded_of(record, request))
        turn = turns.take(Visit(profiled=profiled))
        if not turn.steps:
            raise EnoughSteps
        recorder.another(*turn)

    recorder = Recorder(0, recorded)
    install(recorder, instead_of_ddp=request.fully_shard)
    if request.local_batch is not None:
        replace_batch_size(request.local_batch)
    _run((request.script, request.arguments), turns, recorder)


def become(rank: int, devices: int) -> None:
    """Let this process be a rank of so many, as ``torchrun`` would start it."""
    act_as_rank(rank, devices)
    take_over_spawn(rank, devices)


def _run(script: Script, turns: Turns, watcher: Any) -> None:
    if run_script(script, watcher):
        turns.ended()
    turns.close()


def run_script(script: Script, watcher: Any) -> bool:
    """Run the script as ``__main__``; whether it came to its end by itself.

    Raises ``ConfigError`` for what the script raises, and where ``watcher`` saw it train no model.
    """
    ended = _ends_by_itself(*script)
    if ended and watcher.ddp is None:
        raise ConfigError(
            f"{Path(script[0]).name} ended without training a DistributedDataParallel model, or one of fully_shard",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel, or shards it by"
            " fully_shard, and trains it",
            remedy="wrap the model, and train in training mode with backward()",
        )
    return ended


def _ends_by_itself(script: str, arguments: tuple[str, ...]) -> bool:
    """Run the script as ``__main__``; whether it came to its end, rather than to the end of the measurement."""
    try:
        run_as_main(script, arguments)
    except EnoughSteps:
        return False
    except Refused as refused:
        raise refused.error from None
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise _died(script, ended) from ended
    except (KeyboardInterrupt, ConfigError):
        raise
    except BaseException as error:
        raise _died(script, error) from error
    return True


def _died(script: str, error: BaseException) -> ConfigError:
    given = what_happened("__main__", Path(script).name, error, on=f" on rank {os.environ['RANK']}")
    if not isinstance(error, SystemExit):
        given += calls_to("__main__", error.__traceback__)
    return ConfigError(given, remedy=remedy_of(error))
