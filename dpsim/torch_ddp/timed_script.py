"""One rank that runs a user's DDP script and trains whenever it is its turn. Loads torch and MPI."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim.comm.networks import transport
from dpsim.errors import ConfigError
from dpsim.launch.rank_process import pin
from dpsim.launch.user_script import run_as_main
from dpsim.machine import Network
from dpsim.setting import Setting
from dpsim.torch_ddp import timed
from dpsim.torch_ddp.endings import EnoughSteps, Refused
from dpsim.torch_ddp.reductions import MpiReduction
from dpsim.torch_ddp.refused_writes import check_writes
from dpsim.torch_ddp.run_script import act_as_rank, take_over_spawn
from dpsim.torch_ddp.script_error import calls_to, exit_code, place_in
from dpsim.torch_ddp.visit import CONTROL, Visit
from dpsim.user_code import text_of


def train_in_turns(
    group: MPI.Intracomm, setting: Setting, script: str, arguments: tuple[str, ...], folder: str, number: int
) -> None:
    """Run the script as a rank of ``group`` under a setting, the ``number``-th of a measurement, until it is enough.

    Raises ``ConfigError`` where the script cannot be measured.
    """
    pin(group)
    reduction = None
    if setting.runtime == "torch-ddp-mpi" and group.size > 1:
        link = transport(group, Network.parse(setting.network))
        reduction = MpiReduction(link, setting.plan.algorithm, setting.plan.overlap)
    act_as_rank(group.rank, group.size)
    take_over_spawn(group.rank, group.size)
    timed.connect(
        str(Path(folder) / f"ranks-{number}"), group.rank, group.size, on_gpus=setting.runtime == "torch-ddp-nccl"
    )
    with Client(str(Path(folder) / CONTROL), "AF_UNIX") as control:
        control.send(number)

        def take_turn(visit: Visit) -> int:
            control.send(visit)
            return int(control.recv())

        timer = timed.StepTimer(take_turn, reduction)
        timed.install(timer, setting.plan.fusion_threshold_bytes, reduction)
        if _ends_by_itself(script, arguments):
            _check_built(script, timer)
            with contextlib.suppress(EOFError, OSError):
                take_turn(Visit(ended=True))
    if reduction is not None:
        reduction.close()
    timed.disconnect()


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
    """The error of a script that raised one on this rank: where, what, and what to do."""
    place, rank = place_in("__main__", error.__traceback__, Path(script).name), os.environ["RANK"]
    if isinstance(error, SystemExit):
        given = f"{place}: the script ended on rank {rank} with {exit_code(error)}"
    else:
        text = text_of(error)
        given = f"{place}: the script raised {type(error).__name__} on rank {rank}" + (f": {text}" if text else "")
        check_writes(given, error)
        given += calls_to("__main__", error.__traceback__)
    return ConfigError(given, remedy="start it without dpsim first; it has to work on this machine")


def _check_built(script: str, timer: Any) -> None:
    if timer.ddp is None:
        raise ConfigError(
            f"{Path(script).name} ended without training a DistributedDataParallel model",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel and trains it",
            remedy="wrap the model, and train in training mode with backward()",
        )
