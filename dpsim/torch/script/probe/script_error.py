"""What is told of an exception in a user's PyTorch script: where, through which calls, and why. Loads no torch."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
import traceback
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType

from dpsim.errors import ConfigError, text_of
from dpsim.launch.protected_process import VARIABLE

_DPSIM = str(Path(__file__).parents[3]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = re.compile(r".*/(site|dist)-packages/")
_MOST_OWN, _INNERMOST, _MOST_CALLS = 8, 3, 1000
"""How many lines of the user's files are shown, how many innermost lines of any file, and among how many calls."""
_WRITE_WORDS = (
    "Read-only file system",
    "Permission denied",
    "Invalid cross-device link",
    "No space left on device",
    "Value too large for defined data type",
    "cannot be opened",
)
"""What the kernel or PyTorch says of a file that a protected script cannot write, move or keep in memory."""
_LACKING = (
    "types that this PyTorch computes with on this device, and that its gloo adds up: PyTorch 2.13 has float16 and"
    " bfloat16",
    "install PyTorch 2.13 or newer, or train in float32",
)
_WORDS = {
    "Invalid scalar type": _LACKING,
    "not implemented for 'Half'": _LACKING,
    "not implemented for 'BFloat16'": _LACKING,
    "FSDP expects uniform": (
        "parameters of one type in each module that fully_shard is given",
        "call fully_shard on the modules of another type by themselves, or give all parameters one type",
    ),
    "fsdp::chunk_cat": (
        "dense gradients where FSDP trains, which has no sparse ones",
        "set sparse=False in the embedding, or train with DistributedDataParallel",
    ),
    "expect_autograd_hooks_": (
        "static_graph without no_sync() in the first step: PyTorch's DistributedDataParallel fails with both",
        "leave static_graph out, or let every backward of the first step synchronise",
    ),
}
"""What gloo, PyTorch and FSDP say of what they cannot do, as of types that they do not add up: allowed, to do."""
_RANK_WORDS = "does not match the world size"
"""What Lightning says (TorchElasticEnvironment.validate_settings) where ``devices`` is not the number of ranks."""
_WRITABLE = {
    "namespace": "writing in the script's folder, the working directory, the home and folders that the script's"
    " arguments name (what is written there is discarded), in temporary folders and in caches",
    "landlock": "writing in temporary folders and in caches: this system forbids mount namespaces, in which what is"
    " written elsewhere could be discarded",
}
"""Where a script can write under each kind of protection."""


def what_happened(module: str, name: str, error: BaseException, *, raiser: str = "the script", on: str = "") -> str:
    """Return where and how a script ended: the exception that ``raiser`` raised, or the exit code that it asked for.

    Raises ``ConfigError`` if it ended because its files are protected, or PyTorch lacks a type here.
    """
    place, text = place_in(module, error.__traceback__, name), text_of(error)
    if isinstance(error, SystemExit):
        code = f"exit code {error.code}" if isinstance(error.code, int) else f"exit code 1: {text}"
        return f"{place}: the script ended{on} with {code}"
    given = f"{place}: {raiser} raised {type(error).__name__}{on}" + (f": {text}" if text else "")
    check_writes(given, error)
    for words, (allowed, remedy) in _WORDS.items():
        if words in text:
            raise ConfigError(given, allowed=allowed, remedy=remedy)
    return given


def remedy_of(error: BaseException, first: str = "start it without dpsim first") -> str:
    """What to do about an exception of the script; ``first`` is how to try it without dpsim."""
    if _RANK_WORDS in text_of(error):
        return (
            "let the script take its number of ranks from the environment variable WORLD_SIZE, as in"
            " Trainer(devices=int(os.environ.get('WORLD_SIZE', 1))), or give that number to --devices"
        )
    return f"{first}; it has to work on this machine"


def place_in(module: str, where: TracebackType | None, name: str) -> str:
    """``train.py:17``: the innermost line of ``module``, such as ``__main__``; without one ``name``."""
    places = deque(((frame, line) for frame, line in traceback.walk_tb(where) if _is_of(frame, module)), maxlen=1)
    return "".join(f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in places) or name


def _is_of(frame: FrameType, module: str) -> bool:
    return frame.f_globals.get("__name__") == module and not frame.f_code.co_filename.startswith(_DPSIM)


def calls_to(module: str, where: TracebackType | None) -> str:
    """The calls from ``module`` to the exception, a line each, to follow a message; empty if there is one at most.

    These are the calls in the user's own files and the innermost ones, and whether they end in dpsim.
    """
    since = itertools.dropwhile(lambda place: not _is_of(place[0], module), traceback.walk_tb(where))
    called = traceback.StackSummary.extract(iter(deque(since, maxlen=_MOST_CALLS)))
    if len(called) < 2:
        return ""
    own = [index for index, call in enumerate(called) if is_own(call.filename)]
    shown = sorted({*own[-_MOST_OWN:], *range(len(called))[-_INNERMOST:]})
    lines = ["", "  called through:"]
    lines += [
        f"    {short_path(call.filename)}:{call.lineno} in {call.name}: {call.line}"
        for call in map(called.__getitem__, shown)
    ]
    if called[-1].filename.startswith(_DPSIM):
        lines += [
            "  The last line is of what dpsim puts in place of PyTorch's process group, launcher or model.",
            "  If the script works without dpsim, this is a defect of dpsim.",
        ]
    return "\n".join(lines)


def is_own(filename: str) -> bool:
    """Whether a file is the user's own: not of dpsim, of a library or of Python."""
    return not (filename.startswith((_DPSIM, _STANDARD_LIBRARY, "<frozen")) or _LIBRARIES.match(filename))


def short_path(filename: str) -> str:
    """A path as short as it can be: below the folder of the libraries or of dpsim, or the current one."""
    below = _LIBRARIES.sub("", filename).removeprefix(str(Path(_DPSIM).parent) + os.sep)
    return below.removeprefix(os.getcwd() + os.sep)


def check_writes(given: str, error: BaseException) -> None:
    """Raises ``ConfigError`` for a script that raised ``error`` because its files are protected."""
    mode, text = os.environ.get(VARIABLE), text_of(error)
    if mode in _WRITABLE and any(words in text for words in _WRITE_WORDS):
        raise ConfigError(
            given + _saved_by_torch(error),
            allowed=_WRITABLE[mode],
            remedy="write there, or let the script change your files: --script-may-write",
        )


def _saved_by_torch(error: BaseException) -> str:
    """The file that ``torch.save`` wrote, whose errors do not name it; empty if it was not that."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "torch.serialization" and frame.f_code.co_name == "save":
            return f" (torch.save to {frame.f_locals.get('f')!r})"
    return ""
