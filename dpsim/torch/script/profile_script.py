"""``profile_script``: a PyTorch script in, a ``Workload`` out. Loads no torch: it starts the processes that do."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.installation import install
from dpsim.launch import scratch
from dpsim.launch.child_process import child
from dpsim.launch.job_python import OWN, JobPython
from dpsim.launch.protection import protected, script_protection
from dpsim.launch.rank_process import THREAD_VARIABLES, WITHOUT_TERMINAL_SIGNALS
from dpsim.launch.script_output import shown_once, written
from dpsim.launch.user_program import check_program
from dpsim.torch.script.recorded import joined, workload_of
from dpsim.torch.script.request import ScriptRequest
from dpsim.torch.script.script_record import ScriptOutcome, recorded_of
from dpsim.workload import Workload

START = Path(__file__).parent / "probe" / "start.py"
_OUTPUT = {"PYTHONUNBUFFERED": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def profile_script(request: ScriptRequest, local_batches: Sequence[int] = (), *, by: JobPython = OWN) -> Workload:
    """Run the script in a process of its own, as rank 0 of ``request.devices``, and return what it trained.

    Its Python is ``by``. With ``local_batches`` it runs once for each of them, and the workload has tables over them.
    What the script prints goes to stderr, lines that are alike once. Raises ``ConfigError`` for a script that cannot be
    profiled.
    """
    if request.script:
        check_program(request.script)
    if by is OWN:
        check_own_torch()
    if not local_batches:
        return _profile(request, by)
    batches = sorted(set(local_batches))
    return joined([_profile(msgspec.structs.replace(request, local_batch=batch), by) for batch in batches])


def _profile(request: ScriptRequest, by: JobPython) -> Workload:
    """Run the script once by this Python. Raises ``ConfigError``."""
    with shown_once() as output, scratch.scratch("torch") as folder:
        paths = folder / "request.json", folder / "outcome.json"
        codec.write(paths[0], codec.to_builtins(request) | {"name": request.name, "flag": request.flag})
        command = [*WITHOUT_TERMINAL_SIGNALS, by.path, str(START), "run_script", *map(str, paths)]
        if not request.script_may_write:
            command = protected(command, script_protection(request.script, request.arguments), folder)
        environment = script_environment(request.devices, folder, by.environment())
        with written(folder, output) as file, child(command, env=environment, stdout=file, stderr=file) as process:
            code = process.wait()
        if not paths[1].exists():
            ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ConfigError(
                f"{request.name} ended its process ({ending}) before enough was recorded",
                allowed="a script that trains until dpsim ends it",
                remedy="see what it printed above",
            )
        outcome = codec.decode(codec.read_raw(paths[1], "outcome"), ScriptOutcome, "outcome")
    if outcome.error is not None:
        given, allowed, remedy = outcome.error
        raise ConfigError(given, allowed=allowed, remedy=remedy)
    if outcome.record is None:
        raise ConfigError(
            f"{request.name} has changed the file in which its process tells what was recorded",
            allowed="a script that leaves dpsim's files alone",
            remedy="take out what writes to outcome.json",
        )
    return workload_of(recorded_of(outcome.record, request))


def check_own_torch() -> None:
    """Raises ``ConfigError`` unless PyTorch is installed. Does not load it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "PyTorch is not installed beside dpsim",
            allowed="it, where ranks of a script communicate by MPI, over an emulated link or by dpsim's hook;"
            " elsewhere dpsim enters the environment that the script has",
            remedy=install("torch"),
        )


def script_environment(devices: int, folder: Path, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment ``variables``, with one compute thread where several ranks would run, as ``torchrun`` sets it.

    Data loaders leave temporary files behind, so these go below ``folder``. What the script prints is written at once,
    and PyTorch's profiler of memory prints nothing.
    """
    threads = dict.fromkeys(THREAD_VARIABLES, "1") if devices > 1 else {}
    temporary = folder / "tmp"
    temporary.mkdir()
    place = {"TMPDIR": str(scratch.short_path(folder, temporary))}
    return threads | _OUTPUT | dict(variables) | scratch.environment(folder) | place
