"""What a rank does of the part of a measurement that it takes: it trains, is profiled, or times collectives.

A part has the fields of a ``dpsim.torch.script.request.Part``. As a rank that trains it communicates, and its steps are
timed; as one of a profile it communicates with none. Loads torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import distributed

from dpsim.errors import ConfigError
from dpsim.launch.user_program import main_module, run_as_main
from dpsim.torch.script.probe import process_group
from dpsim.torch.script.probe.accumulated import accumulate
from dpsim.torch.script.probe.batches import replace_batch_size
from dpsim.torch.script.probe.endings import EnoughSteps, Refused
from dpsim.torch.script.probe.fsdp import join_units
from dpsim.torch.script.probe.in_turns.collectives import Collectives, GlooReduction, time_collectives
from dpsim.torch.script.probe.in_turns.observed import Observer
from dpsim.torch.script.probe.in_turns.timed import StepTimer
from dpsim.torch.script.probe.in_turns.visit import Turns, Visit
from dpsim.torch.script.probe.record import Recorder
from dpsim.torch.script.probe.run_script import act_as_rank, install, take_over_spawn
from dpsim.torch.script.probe.script_error import calls_to, remedy_of, what_happened
from dpsim.torch.script.probe.script_record import script_record
from dpsim.torch.script.probe.waited import WaitedCollectives


def pin_to_a_core(rank: int) -> None:
    """Bind this process to one of its cores, chosen by its rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def take_part(part: Any, rank: int, folder: str, reductions: Any) -> None:
    """Take the turns of a rank of a part, until it is enough. Raises ``ConfigError`` where that cannot be.

    ``reductions`` reduce in place of gloo, by the number of their ranks.
    """
    pin_to_a_core(rank)
    if part.kind == "train":
        _train(part, rank, folder, reductions.get(part.ranks))
    elif part.kind == "profile":
        _profile(part, rank, folder)
    elif part.kind == "observe":
        _observe(part, rank, folder, reductions.get(part.ranks))
    else:
        time_collectives(part, rank, folder, reductions)


def _train(part: Any, rank: int, folder: str, reduction: Any) -> None:
    if part.local_batch is not None:
        replace_batch_size(part.local_batch)
    if part.accumulate is not None:
        accumulate(part.accumulate)
    turns = _connected(part, rank, folder)
    waited = WaitedCollectives() if part.fully_shard else reduction
    timer = StepTimer(turns.take, waited, hook=part.hook)
    install(timer, bucket_cap_bytes=_cap_bytes(part), updates=False, replicas=_replicas(part))
    _run(part, turns, timer)
    process_group.disconnect()


def _connected(part: Any, rank: int, folder: str) -> Turns:
    """Let the script meet the other ranks of its part; the turns of this one."""
    become(rank, part.ranks)
    store = os.path.join(folder, f"ranks-{part.number}")
    process_group.connect(store, rank, part.ranks, on_gpus=part.on_gpus)
    return Turns(folder, part.number, rank)


def _cap_bytes(part: Any) -> float | None:
    return None if part.bucket_cap_bytes is None else float(part.bucket_cap_bytes)  # infinity is a text in JSON


def _replicas(part: Any) -> int:
    """Return how many copies FSDP is to have of what the script wraps in DDP; 0 where DDP trains."""
    return int(part.replicas) if part.fully_shard else 0


def _profile(part: Any, rank: int, folder: str) -> None:
    """Run the script as rank 0 of the part's devices, beside the other ranks of the part, and profile its turns."""
    become(0, part.devices)
    process_group.answer_for(part.devices)
    turns = Turns(folder, part.number, rank)

    def recorded(recorder: Recorder) -> None:
        turn = turns.take(Visit(profiled=script_record(recorder) if recorder.steps else None))
        if not turn.steps:
            raise EnoughSteps
        recorder.another(turn.steps, turn.pause_s)

    if part.accumulate is not None:
        accumulate(part.accumulate)
    recorder = Recorder(0, recorded)
    install(recorder, replicas=_replicas(part))
    if part.local_batch is not None:
        replace_batch_size(part.local_batch)
    _run(part, turns, recorder)


def _observe(part: Any, rank: int, folder: str, reduction: Any) -> None:
    """Run the script as a rank until enough of its steps are observed, then time allreduces as it is told."""
    turns = _connected(part, rank, folder)

    def observed(observer: Observer) -> None:
        collectives = Collectives({part.ranks: reduction or GlooReduction(distributed.group.WORLD)}, {})
        visit = Visit(taken=observer.rank)
        while (timed := turns.take(visit).timed) is not None:
            visit = Visit(taken=collectives.take(timed))
        raise EnoughSteps

    observer = Observer(part.steps, observed, None if reduction is None else reduction.reduce)
    install(observer, bucket_cap_bytes=_cap_bytes(part))
    if part.joined_calls:
        join_units(part.joined_calls, _cap_bytes(part) or 0.0)
    _run(part, turns, observer)
    process_group.disconnect()


def become(rank: int, devices: int) -> None:
    """Let this process be a rank of so many, as ``torchrun`` would start it."""
    act_as_rank(rank, devices)
    take_over_spawn(rank, devices)


def _run(part: Any, turns: Turns, watcher: Any) -> None:
    if run_script(part.script, part.arguments, watcher):
        turns.ended()
    turns.close()


def run_script(script: str, arguments: Any, watcher: Any) -> bool:
    """Run the script as ``__main__``; whether it came to its end by itself.

    Raises ``ConfigError`` for what the script raises, and where ``watcher`` saw it train no model.
    """
    ended = _ends_by_itself(script, arguments)
    if ended and watcher.ddp is None:
        raise ConfigError(
            f"{Path(script).name} ended without training a DistributedDataParallel model, or one of fully_shard",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel, or shards it by"
            " fully_shard, and trains it",
            remedy="wrap the model, and train in training mode with backward()",
        )
    return ended


def _ends_by_itself(script: str, arguments: Any) -> bool:
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
    module = main_module(script)
    given = what_happened(module, Path(script).name, error, on=f" on rank {os.environ['RANK']}")
    if not isinstance(error, SystemExit):
        given += calls_to(module, error.__traceback__)
    return ConfigError(given, remedy=remedy_of(error))
