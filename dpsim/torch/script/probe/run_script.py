"""Runs a user's PyTorch script, or trains their module, as rank 0 of n in this process. Loads torch.

Request and outcome are files of JSON: the fields of a ``ScriptRequest`` (``dpsim.torch.script.request``), with its name
and flag, and those of a ``ScriptOutcome`` (``dpsim.torch.script.script_record``). What the script prints goes where
this process prints.
"""

from __future__ import annotations

import functools
import json
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch.multiprocessing
from torch import distributed

from dpsim.errors import ConfigError, text_of
from dpsim.launch.user_program import main_module, module_name, run_as_main
from dpsim.torch.script.probe import process_group, train_function
from dpsim.torch.script.probe.accumulated import accumulate
from dpsim.torch.script.probe.around import Script
from dpsim.torch.script.probe.batches import check_local_batch, check_one_batch, replace_batch_size
from dpsim.torch.script.probe.endings import Ending, EnoughSteps, Refused, check_ranks, end_process
from dpsim.torch.script.probe.fsdp import watch
from dpsim.torch.script.probe.parameters import reduced_parameters
from dpsim.torch.script.probe.record import Recorder
from dpsim.torch.script.probe.script_error import calls_to, place_in, remedy_of, what_happened
from dpsim.torch.script.probe.script_record import script_record
from dpsim.torch.script.probe.step_memory import WeighingRecorder
from dpsim.torch.script.probe.steps import MODES

_GRAPH_WORDS = ("Expected to have finished reduction in the prior iteration", "training graph has changed")

_NO_GPU_WORDS = (
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "attribute '_cuda_",
)

_SYNC_BATCH_NORM_WORDS = (
    "SyncBatchNorm layers only work with GPU modules",
    "SyncBatchNorm expected input tensor to be on",
)


_ENDS = ("terminate", "kill", "close")
"""What may be asked of a process of another rank, which is never started."""

_GRACE_S = 5.0
"""How long a script may go on after it has been ended from within, to clean up behind itself."""


def run(request: Any, outcome_path: Path) -> dict[str, Any]:
    """Train as ``torchrun`` would let its rank 0 train, until enough is recorded. Raises ``ConfigError``.

    If the script catches what ends it and goes on, its outcome is written to ``outcome_path`` and the process ended.
    """
    act_as_rank(0, request.devices)
    process_group.answer_for(request.devices)
    take_over_spawn(0, request.devices)
    recorder = WeighingRecorder(request.steps)
    install(recorder, replicas=request.replicas if request.fully_shard else 0)
    if request.accumulates:
        accumulate(1)
    too_few = set() if request.local_batch is None else replace_batch_size(request.local_batch)
    Ending.begun = _end_hard(os.getpid(), outcome_path, lambda: _enough_record(recorder, request, too_few), request)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored until here
    try:
        if request.function:
            train_function.train(request.function, request.local_batch)
        else:
            run_as_main(request.script, request.arguments)
    except EnoughSteps:
        pass
    except Refused as refused:
        if not recorder.complete:
            raise refused.error from None
    except ConfigError:
        raise
    except BaseException as error:
        if not recorder.complete and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise _died(request, error) from error
    return _enough_record(recorder, request, too_few)


def _enough_record(recorder: Recorder, request: Any, too_few: set[int]) -> dict[str, Any]:
    """The record of the script. Raises ``ConfigError`` where what was recorded is not enough."""
    _check_enough(request.name, recorder)
    _check_one_graph(recorder)
    check_local_batch(recorder.steps, request, too_few)
    return script_record(recorder)


def _end_hard(
    pid: int, outcome_path: Path, recorded: Callable[[], dict[str, Any]], request: Any
) -> Callable[[Ending], None]:
    """What ``Ending.begun`` is set to in the process ``pid``: ends it a while after, in case the script goes on.

    A process that the script has forked ends at once, with the one that dpsim has started.
    """
    endings: list[Ending] = []

    def outcome(ending: Ending) -> dict[str, Any]:
        if isinstance(ending, Refused):
            return _failed(ending.error)
        if request.must_end and len(endings) > 1:
            return _failed(
                ConfigError(
                    f"{request.name} trains on after dpsim has ended it by an exception",
                    allowed="a script that does not catch every exception",
                    remedy="catch Exception in place of BaseException, and in place of a bare except",
                )
            )
        try:
            return {"record": recorded()}
        except ConfigError as error:
            return _failed(error)

    def begun(ending: Ending) -> None:
        if os.getpid() != pid:
            _write(outcome_path, outcome(ending))
            os.kill(pid, signal.SIGKILL)
        elif not endings:
            timer = threading.Timer(_GRACE_S, lambda: _end_with(outcome_path, outcome(ending)))
            timer.daemon = True
            timer.start()
        endings.append(ending)

    return begun


def act_as_rank(rank: int, devices: int) -> None:
    """Set what ``torchrun`` sets for a rank on one node, and without a GPU that Accelerate is to use the processors.

    Without that every rank of Accelerate, or of Hugging Face's Trainer, trains alone there and builds no DDP model.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    os.environ.update(dict.fromkeys(names, str(devices)))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)))
    os.environ.update({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"})
    os.environ.update({"TORCHELASTIC_RUN_ID": "dpsim", "TORCHELASTIC_RESTART_COUNT": "0"})
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "0"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0"  # there is nobody to wait for


def take_over_spawn(rank: int, devices: int) -> None:
    """Let ``torch.multiprocessing.spawn`` call its function in this process, as this rank of ``devices``.

    Likewise ``multiprocessing.Process`` that the script starts as ranks, which get their rank as the first argument.
    Raises ``Refused`` in the script if it asks for another number of ranks.
    """

    def spawn(name: str) -> Any:
        def call(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
            check_ranks(nprocs, devices, f"{name}(nprocs={nprocs})")
            fn(rank, *args)
            return None if join else SimpleNamespace(join=lambda *_, **__: True)

        return call

    for original in (torch.multiprocessing.spawn, torch.multiprocessing.start_processes):
        process_group.replace_everywhere(original, spawn(original.__name__))
    _take_over_processes(rank, devices)


def _take_over_processes(rank: int, devices: int) -> None:
    """Let ``multiprocessing.Process`` call the function of this rank here, and start none for another rank.

    A process is a rank's if its function is the script's own and gets a rank first, before there is a process group.
    """
    start = multiprocessing.process.BaseProcess.start
    ended = SimpleNamespace(poll=lambda *_: 0, wait=lambda *_: 0, returncode=0, **dict.fromkeys(_ENDS, lambda: None))
    ranks: dict[Any, int] = {}

    @functools.wraps(start)
    def started(process: Any) -> None:
        function, number = process._target, next(iter((*process._args, *process._kwargs.values())), None)
        library = getattr(function, "__module__", "").partition(".")[0] in ("torch", "multiprocessing")
        expected = ranks.get(function, 0)
        if library or distributed.is_initialized() or type(number) is not int or number != expected < devices:
            start(process)
            return
        ranks[function] = expected + 1
        process._popen, process._parent_pid = ended, os.getpid()
        if number == rank:
            function(*process._args, **process._kwargs)

    process_class: Any = multiprocessing.process.BaseProcess
    process_class.start = started


def install(script: Script, *, bucket_cap_bytes: float | None = None, updates: bool = True, replicas: int = 0) -> None:
    """Put a listener around DDP, FSDP, backward, and with ``updates`` every optimizer and every data loader.

    With a cap DDP has this one in place of the script's; with ``replicas`` FSDP shards what is wrapped in DDP.
    """
    script.listen_to_construction(bucket_cap_bytes)
    script.listen()
    if updates:
        script.listen_to_updates_and_input()
    watch(script.forward, replicas=replicas)


def _died(request: Any, error: BaseException) -> ConfigError:
    """The error of a script that raised one: where, what, and what to do."""
    module = request.function.partition(":")[0] or main_module(request.script)
    raiser = f"the {'function' if request.function else 'script'}"
    given = what_happened(module, request.name, error, raiser=raiser)
    if isinstance(error, SystemExit):
        return ConfigError(given, remedy="see what it printed above")
    place, text = place_in(module, error.__traceback__, request.name), text_of(error)
    if any(words in text for words in _NO_GPU_WORDS):
        return ConfigError(
            f"{place}: the script wants a GPU, and PyTorch has none here: {text}",
            allowed="a script that trains on the processor where torch.cuda.is_available() is false",
            remedy="let it do so, or profile on a machine with a GPU and PyTorch's build for CUDA",
        )
    if isinstance(error, ImportError) and "with no known parent package" in text:
        return ConfigError(
            f"{place}: the script imports from its own package by a relative import, which a path does not tell",
            allowed="a module of a package, run as by python -m",
            remedy=f"start dpsim in the folder that has the package, with --torch-script {module_name(request.script)}",
        )
    calls = calls_to(module, error.__traceback__)
    if isinstance(error, AssertionError):
        return ConfigError(
            given + calls,
            allowed="a script that does not check what other ranks hold",
            remedy="it runs as rank 0 in one process, and every other rank appears to hold rank 0's values",
        )
    if any(words in text for words in _SYNC_BATCH_NORM_WORDS):
        return ConfigError(
            f"{place}: a model with SyncBatchNorm on the processor, where PyTorch has it for GPUs alone",
            allowed="SyncBatchNorm on CUDA GPUs, one for each rank; BatchNorm on processors",
            remedy="leave convert_sync_batchnorm out; dpsim predict --set batch_norm=local,global says what it costs;"
            " or profile on a machine with a GPU",
        )
    if any(words in text for words in _GRAPH_WORDS):
        return ConfigError(
            f"{place}: DistributedDataParallel stopped the training, because not every parameter got a gradient in a"
            f" step, or its graph changed from step to step: {text[:200]}",
            allowed="a script that trains the same parameters in every step",
            remedy="set find_unused_parameters=True for parameters that never get one, as DDP asks for, and profile the"
            " kinds of steps apart",
        )
    groups = [each for each in distributed.distributed_c10d._world.pg_map if hasattr(each, "received")]
    if received := next((each.received for each in groups if each.received), ""):
        return ConfigError(
            f"{given}{calls}\n  Before that the script asked for {received}, which a profile does not have.",
            allowed="a script that gets nothing from other ranks but what rank 0 has too: it is profiled as rank 0 in"
            " one process, and the other ranks hold its values",
            remedy="let rank 0 send it; real ranks train with dpsim explain -- COMMAND and dpsim reproduce",
        )
    how = "train its module without dpsim first" if request.function else "start it without dpsim first"
    return ConfigError(given + calls, remedy=remedy_of(error, how))


def _check_enough(name: str, recorder: Recorder) -> None:
    if not recorder.models:
        raise ConfigError(
            f"{name} ended without building DistributedDataParallel in this process, and without fully_shard",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel, or shards it by"
            " fully_shard, and calls it",
            remedy="wrap the model, and start ranks with torchrun or torch.multiprocessing.spawn alone",
        )
    if recorder.ddp is None:
        raise ConfigError(
            f"{name} ended without training the model that it had wrapped in DistributedDataParallel",
            allowed="a script that calls what DistributedDataParallel returned, in training mode",
            remedy="call that model in place of the module in it, after train() and outside of no_grad()",
        )
    if not recorder.synchronised:
        raise ConfigError(
            f"{name} ended without a backward() that synchronises gradients",
            allowed="a script that calls backward() on a loss of what the model returns (torch.autograd.grad()"
            " synchronises nothing)",
            remedy="call backward(), at least now and then outside of no_sync()",
        )
    if len(recorder.steps) >= len(MODES):
        check_one_batch(recorder.steps, name)
    if not recorder.all_modes:
        raise ConfigError(
            f"{name} ended after {recorder.synchronised} synchronising training step"
            + ("s" if recorder.synchronised > 1 else "")
            + (f", of which its GradScaler skipped {recorder.skipped}" if recorder.skipped else ""),
            allowed=f"{recorder.warm_up + len(MODES) + 1} or more of them, in training mode and with backward()",
            remedy="let it train longer, or on more data",
        )


def _check_one_graph(recorder: Recorder) -> None:
    """Raises ``ConfigError`` if other parameters got a gradient in one step than in another, as DDP allows some."""
    ready = [frozenset(step.ready_s) for step in recorder.steps if step.ready_s]
    changed = sorted(frozenset.union(*ready) - frozenset.intersection(*ready)) if ready else []
    if changed:
        names = [name for name, _ in reduced_parameters(recorder.ddp)]
        raise ConfigError(
            f"{len(changed)} parameters get a gradient in some steps and none in others, such as {names[changed[0]]}",
            allowed="a script whose graph is the same in every step, as a workload is one step",
            remedy="profile each kind of step by itself: let the script train that kind alone",
        )


def main(request_path: Path, outcome_path: Path) -> NoReturn:
    """Run the request and end this process, with whatever threads the script has left behind."""
    request = SimpleNamespace(**json.loads(request_path.read_text(encoding="utf-8")))
    try:
        outcome: dict[str, Any] = {"record": run(request, outcome_path)}
    except ConfigError as error:
        outcome = _failed(error)
    _end_with(outcome_path, outcome)


def _failed(error: ConfigError) -> dict[str, Any]:
    return {"error": (error.given, error.allowed, error.remedy)}


def _end_with(outcome_path: Path, outcome: dict[str, Any]) -> NoReturn:
    """Write the outcome and end this process."""
    _write(outcome_path, outcome)
    end_process(0)


def _write(outcome_path: Path, outcome: dict[str, Any]) -> None:
    """Write the outcome, which has another name until it is whole."""
    partial = outcome_path.with_name(f"{outcome_path.name}.{os.getpid()}")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    partial.replace(outcome_path)
