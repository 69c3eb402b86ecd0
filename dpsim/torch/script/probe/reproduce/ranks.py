"""The process that lets a script train on ranks of its own, one run after the other. Loads torch.

``start.py`` calls it with a folder. It reads a ``RunsRequest`` (``dpsim.torch.script.reproduce.observation``) there and
gives each run a folder in it.
PyTorch is loaded once: ranks are forked from this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch._dynamo  # DDP loads it: here once, before ranks are forked, which takes half a second in each of them
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dpsim.errors import ConfigError
from dpsim.launch.user_program import main_module, run_as_main
from dpsim.torch.script.probe.accumulated import accumulate
from dpsim.torch.script.probe.endings import Ending, EnoughSteps, Refused, end_process
from dpsim.torch.script.probe.fsdp import watch
from dpsim.torch.script.probe.process_group import connect
from dpsim.torch.script.probe.reproduce import lines
from dpsim.torch.script.probe.reproduce import loaders as data_loaders
from dpsim.torch.script.probe.reproduce import streams as sample_streams
from dpsim.torch.script.probe.reproduce.loaders import Loaders
from dpsim.torch.script.probe.reproduce.observer import Observer
from dpsim.torch.script.probe.reproduce.report import MICRO_BATCHES, REPORT, REQUEST, RankReport, write_report
from dpsim.torch.script.probe.reproduce.values import seed_untouched
from dpsim.torch.script.probe.run_script import act_as_rank, take_over_spawn
from dpsim.torch.script.probe.script_error import calls_to, remedy_of, what_happened

_GRACE_S = 15.0
"""How long ranks may go on after one has ended: they may wait for it for ever."""
_POLL_S = 0.02


def train(request: Any, folder: Path) -> None:
    """Let the script train in every run that is asked for. Stops after a run of which all ranks died."""
    for number, run in enumerate(request.runs):
        own = folder / run.folder
        if (number == 0 and request.first_is_there) or not _applies(run, folder / request.runs[0].folder):
            continue
        own.mkdir(exist_ok=True)
        ranks = [forked(partial(_become_rank, request, run, folder, rank)) for rank in range(run.devices)]
        if not awaited(ranks) and not (run.in_float32 or run.overflow):
            return


def _applies(run: Any, first_folder: Path) -> bool:
    """Whether the script, by its first run, computes in 16 bits where ``run`` is without, or scales its losses."""
    path = first_folder / REPORT.format(0)
    if not path.exists():
        return True
    first = json.loads(path.read_text(encoding="utf-8"))
    if run.without_scaler or run.overflow:
        return bool(first["scales"])
    return bool(first["computes_in"]) or not run.in_float32


def awaited(ranks: list[int]) -> bool:
    """Wait for the ranks; whether any ended well. Those that go on too long after another are killed."""
    left, well, deadline_s = set(ranks), False, float("inf")
    while left:
        for pid in tuple(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                well = well or status == 0
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        if left and time.monotonic() > deadline_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            deadline_s = float("inf")
        time.sleep(_POLL_S)
    return well


def forked(become_rank: Callable[[], NoReturn]) -> int:
    """Start a process that becomes a rank; returns its id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        become_rank()
    return pid


def become(rank: int, devices: int, folder: Path, seed: int) -> None:
    """Let this process be a rank of so many, which meet in a folder."""
    act_as_rank(rank, devices)
    take_over_spawn(rank, devices)
    torch.set_num_threads(1)
    connect(str(folder / "ranks"), rank, devices)
    seed_untouched(seed)


def _become_rank(request: Any, run: Any, folder: Path, rank: int) -> NoReturn:
    own, first = folder / run.folder, request.runs[0]
    code = 1
    try:
        become(rank, run.devices, own, seed=rank)
        if run.own_seeds and rank:
            torch.manual_seed(rank)
        lines.install()
        loaders = Loaders(run, first, own, folder / first.folder, rank)
        data_loaders.install(loaders)
        observer = Observer(run, rank, request.steps, own, folder / first.folder, loaders)
        install(observer, run.bucket_cap_bytes)
        if run.wraps:
            accumulate(run.accumulate)
        request.arguments = [each.replace(MICRO_BATCHES, str(run.accumulate)) for each in request.arguments]
        report = _ran(request, rank, observer, own)
        write_report(own, rank, report)
        code = 1 if report.error else 0
        loaders.write_shards()
    except BaseException:
        traceback.print_exc()
    end_process(code)


def install(observer: Observer, bucket_cap_bytes: float | None) -> None:
    """Put ``observer`` around DDP, FSDP, backward and every optimizer of this process."""
    observer.listen_to_construction(bucket_cap_bytes)
    observer.wrap(torch.autograd, "backward", observer.backward)
    for gather in ("all_gather", "all_gather_into_tensor"):
        observer.wrap(torch.distributed, gather, observer.gathers)
    observer.wrap(torch.distributed, "all_reduce", observer.adds)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        observer.wrap(module, "clip_grad_norm_", observer.clips)
    observer.wrap(torch, "compile", observer.compile)
    observer.wrap(Optimizer, "__init__", observer.constructed)
    watch(observer.sharded, done="compared")
    observer.given.install()
    observer.precision.install(observer.wrap)
    register_optimizer_step_pre_hook(observer.optimizer_begins)
    register_optimizer_step_post_hook(observer.optimizer_ends)
    sample_streams.install(observer.streams)


def _ran(request: Any, rank: int, observer: Observer, folder: Path) -> RankReport:
    """Run the script, and return what this rank says at its end."""
    pid = os.getpid()

    def begun(ending: Ending) -> None:
        """Write the report before the script, which may catch what ends it, can go on."""
        if os.getpid() == pid:
            error = parts(ending.error) if isinstance(ending, Refused) else None
            write_report(folder, rank, observer.report(error=error))

    Ending.begun = begun
    error: ConfigError | None = None
    narrow = torch.autocast("cpu", getattr(torch, request.autocast)) if request.autocast else contextlib.nullcontext()
    try:
        with narrow:
            run_as_main(request.script, request.arguments)
    except EnoughSteps:
        return observer.report()
    except Refused as refused:
        error = refused.error
    except SystemExit as ended:
        if ended.code not in (None, 0):
            error = died(request, rank, ended)
    except ConfigError as mistake:
        error = mistake
    except BaseException as raised:
        error = died(request, rank, raised)
    return observer.report(ended=error is None, error=None if error is None else parts(error))


def parts(error: ConfigError) -> tuple[str, str, str]:
    """Return what JSON says of an error."""
    return error.given, error.allowed, error.remedy


def died(request: Any, rank: int, error: BaseException) -> ConfigError:
    """Return the error of a script that raised ``error`` on a rank."""
    name, module = Path(request.script).name, main_module(request.script)
    try:
        given = what_happened(module, name, error, on=f" on rank {rank} of {os.environ['WORLD_SIZE']}")
    except ConfigError as mistake:
        return mistake
    if not isinstance(error, SystemExit):
        given += calls_to(module, error.__traceback__)
    return ConfigError(given, remedy=remedy_of(error))


def main(folder: Path) -> None:
    """Train as the request in the folder asks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored until here
    text = (folder / REQUEST).read_text(encoding="utf-8")
    train(json.loads(text, object_hook=lambda each: SimpleNamespace(**each)), folder)
