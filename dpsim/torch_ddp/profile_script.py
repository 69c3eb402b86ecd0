"""``profile_script``: a PyTorch script in, a ``Workload`` out. Loads no torch: it starts the processes that do."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.launch.child_process import child
from dpsim.launch.user_script import check_script
from dpsim.torch_ddp.request import ScriptOutcome, ScriptRequest
from dpsim.torch_ddp.tables import joined
from dpsim.workload import Workload

_STDERR = 2


def profile_script(request: ScriptRequest, local_batches: Sequence[int] = ()) -> Workload:
    """Run the script in a process of its own, as rank 0 of ``request.devices``, and return what it trained.

    With ``local_batches`` it runs once for each of them, and the workload has tables over them. What the script prints
    goes to stderr. Raises ``ConfigError`` for a script that cannot be profiled.
    """
    if request.script:
        check_script(request.script)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "PyTorch is not installed beside dpsim",
            allowed="PyTorch 2.4 or newer, for --torch-script and --torch alone",
            remedy="pip install 'dpsim[torch]' in the environment that the script runs in",
        )
    if not local_batches:
        return _profile(request)
    batches = sorted(set(local_batches))
    return joined([_profile(msgspec.structs.replace(request, local_batch=batch)) for batch in batches])


def _profile(request: ScriptRequest) -> Workload:
    """Run the script once. Raises ``ConfigError``."""
    with tempfile.TemporaryDirectory(prefix="dpsim-torch-") as folder:
        paths = Path(folder) / "request.json", Path(folder) / "outcome.json"
        codec.write(paths[0], request)
        with child([sys.executable, "-m", "dpsim.torch_ddp.run_script", *map(str, paths)], stdout=_STDERR) as process:
            code = process.wait()
        if not paths[1].exists():
            raise ConfigError(
                f"{request.name} ended its process ({_ending(code)}) before enough was recorded",
                allowed="a script that trains until dpsim ends it",
                remedy="see what it printed above",
            )
        outcome = codec.decode(codec.read_raw(paths[1], "outcome"), ScriptOutcome, "outcome")
    if outcome.workload is None:
        error = outcome.error
        assert error is not None
        raise ConfigError(error.given, allowed=error.allowed, remedy=error.remedy)
    return outcome.workload


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
