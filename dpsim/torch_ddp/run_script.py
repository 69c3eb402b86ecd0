"""The process that runs a user's PyTorch script, or trains their module, as rank 0 of n. Loads torch.

``python -m dpsim.torch_ddp.run_script REQUEST OUTCOME`` reads a ``ScriptRequest`` and writes a ``ScriptOutcome``: what
was recorded. What the script prints goes where this process prints.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.torch_ddp import process_group, train_function
from dpsim.torch_ddp.batches import check_local_batch, check_one_batch, replace_batch_size
from dpsim.torch_ddp.logged import recorded_of
from dpsim.torch_ddp.record import EnoughSteps, Recorder, Refused, check_one_graph, install
from dpsim.torch_ddp.recorded import MODES, workload_of
from dpsim.torch_ddp.request import ScriptError, ScriptOutcome, ScriptRequest
from dpsim.user_code import text_of
from dpsim.workload import Workload

_GRAPH_WORDS = ("Expected to have finished reduction in the prior iteration", "training graph has changed")

_NO_GPU_WORDS = ("Torch not compiled with CUDA enabled", "No CUDA GPUs are available", "Found no NVIDIA driver")

_SYNC_BATCH_NORM_WORDS = (
    "SyncBatchNorm layers only work with GPU modules",
    "SyncBatchNorm expected input tensor to be on",
)


def run(request: ScriptRequest) -> Workload:
    """Train as ``torchrun`` would let its rank 0 train, until enough is recorded. Raises ``ConfigError``."""
    act_as_rank(0, request.devices)
    process_group.answer_for(request.devices)
    take_over_spawn(0)
    recorder = Recorder(request.steps, request.pause_s)
    install(recorder)
    too_few = set() if request.local_batch is None else replace_batch_size(request.local_batch)
    try:
        if request.function:
            train_function.train(request.function, request.local_batch)
        else:
            sys.argv = [request.script, *request.arguments]
            sys.path[0] = str(Path(request.script).parent)
            runpy.run_path(request.script, run_name="__main__")
    except EnoughSteps:
        pass
    except Refused as refused:
        raise refused.error from None
    except ConfigError:
        raise
    except BaseException as error:
        if not recorder.complete and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise _died(request, error) from error
    _check_enough(request.name, recorder)
    check_one_graph(recorder)
    check_local_batch(recorder, request, too_few)
    workload = workload_of(recorded_of(recorder, request))
    if workload.ddp is None or not synchronises_batch_norm(recorder.ddp.module):
        return workload
    return msgspec.structs.replace(workload, ddp=msgspec.structs.replace(workload.ddp, sync_batch_norm=True))


def synchronises_batch_norm(module: Any) -> bool:
    """Whether a batch norm of the module takes its statistics from all ranks."""
    from torch.nn import SyncBatchNorm

    return any(isinstance(each, SyncBatchNorm) for each in module.modules())


def act_as_rank(rank: int, devices: int) -> None:
    """Set what ``torchrun`` sets for a rank on one node."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    os.environ.update(dict.fromkeys(names, str(devices)))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)))
    os.environ.update({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"})
    os.environ.update({"TORCHELASTIC_RUN_ID": "dpsim", "TORCHELASTIC_RESTART_COUNT": "0"})
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "0"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0"  # there is nobody to wait for


def take_over_spawn(rank: int) -> None:
    """Let ``torch.multiprocessing.spawn`` call its function in this process, as this rank."""
    import torch.multiprocessing

    for original in (torch.multiprocessing.spawn, torch.multiprocessing.start_processes):
        process_group.replace_everywhere(original, _spawn(original.__name__, rank))


def _spawn(name: str, rank: int) -> Any:
    def call(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
        fn(rank, *args)
        return None if join else _Joined()

    call.__name__ = name
    return call


class _Joined:
    """The context that ``spawn`` returns without ``join``."""

    def join(self, *_: object, **__: object) -> bool:
        return True


def _died(request: ScriptRequest, error: BaseException) -> ConfigError:
    """The error of a script that raised one: where, what, and what to do."""
    place = _place(request, error.__traceback__)
    if isinstance(error, SystemExit):
        return ConfigError(f"{place}: the script ended with {exit_code(error)}", remedy="see what it printed above")
    text = text_of(error)
    given = f"{place}: the {'function' if request.function else 'script'} raised {type(error).__name__}" + (
        f": {text}" if text else ""
    )
    if any(words in text for words in _NO_GPU_WORDS):
        return ConfigError(
            f"{place}: the script wants a GPU, and PyTorch has none here: {text}",
            allowed="a script that trains on the processor where torch.cuda.is_available() is false",
            remedy="let it do so, or profile on a machine with a GPU and PyTorch's build for CUDA",
        )
    if isinstance(error, AssertionError):
        return ConfigError(
            given,
            allowed="a script that does not check what other ranks hold",
            remedy="it runs as rank 0 in one process, and every other rank appears to hold rank 0's values",
        )
    if any(words in text for words in _SYNC_BATCH_NORM_WORDS):
        return ConfigError(
            f"{place}: a model with SyncBatchNorm on the processor, where PyTorch has it for GPUs alone",
            allowed="SyncBatchNorm on CUDA GPUs, one for each rank; BatchNorm on processors",
            remedy="leave convert_sync_batchnorm out, or profile on a machine with a GPU",
        )
    if any(words in text for words in _GRAPH_WORDS):
        return ConfigError(
            f"{place}: DistributedDataParallel stopped the training, because not every parameter got a gradient in a"
            f" step, or its graph changed from step to step: {text[:200]}",
            allowed="a script that trains the same parameters in every step",
            remedy="set find_unused_parameters=True for parameters that never get one, as DDP asks for, and profile the"
            " kinds of steps apart",
        )
    how = "train its module without dpsim first" if request.function else "run it with torchrun first"
    return ConfigError(given, remedy=f"{how}; it has to work on this machine")


def exit_code(ended: SystemExit) -> str:
    """``exit code 3``, or what ``sys.exit("no data")`` says, which Python prints as it ends with exit code 1."""
    return f"exit code {ended.code}" if isinstance(ended.code, int) else f"exit code 1: {text_of(ended)}"


def place_in(script: str, where: TracebackType | None, name: str = "") -> str:
    """``train.py:17``: the innermost line of the script itself; without one ``name``, or the script's."""
    lines = [frame.lineno for frame in traceback.extract_tb(where) if frame.filename == script]
    return f"{Path(script).name}:{lines[-1]}" if lines else name or Path(script).name


def _place(request: ScriptRequest, where: TracebackType | None) -> str:
    """The innermost line of the script, or of the module of a function."""
    if not request.function:
        return place_in(request.script, where)
    module = sys.modules.get(request.function.partition(":")[0])
    return place_in(getattr(module, "__file__", None) or "", where, request.name)


def _check_enough(name: str, recorder: Recorder) -> None:
    if not recorder.built:
        raise ConfigError(
            f"{name} ended without building DistributedDataParallel in this process",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel",
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
        check_one_batch(recorder, name)
    if not recorder.all_modes:
        raise ConfigError(
            f"{name} ended after {recorder.synchronised} synchronising training step"
            + ("s" if recorder.synchronised > 1 else ""),
            allowed=f"{recorder.warm_up + len(MODES) + 1} or more of them, in training mode and with backward()",
            remedy="let it train longer, or on more data",
        )


def main() -> None:
    """Run the request of the command line and end this process, with whatever threads the script has left behind."""
    request_path, outcome_path = map(Path, sys.argv[1:3])
    try:
        request = codec.decode(codec.read_raw(request_path, "request"), ScriptRequest, "request")
        outcome = ScriptOutcome(workload=run(request))
    except ConfigError as error:
        outcome = ScriptOutcome(error=ScriptError(given=error.given, allowed=error.allowed, remedy=error.remedy))
    codec.write(outcome_path, outcome)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
