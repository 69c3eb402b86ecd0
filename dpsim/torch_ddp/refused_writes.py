"""What a script is told that tried to change a file of the user's (``dpsim.launch.protection``). Loads no torch."""

from __future__ import annotations

import os
import traceback

from dpsim.errors import ConfigError
from dpsim.launch.protected_process import VARIABLE
from dpsim.user_code import text_of

_WRITE_WORDS = (
    "Read-only file system",
    "Permission denied",
    "Invalid cross-device link",
    "No space left on device",
    "Value too large for defined data type",
    "cannot be opened",
)
"""What the kernel or PyTorch says of a file that a protected script cannot write, move or keep in memory."""
_WRITABLE = {
    "namespace": "writing in the script's folder, the working directory, the home and folders that the script's"
    " arguments name (what is written there is discarded), in temporary folders and in caches",
    "landlock": "writing in temporary folders and in caches: this system forbids mount namespaces, in which what is"
    " written elsewhere could be discarded",
}
"""Where a script can write under each kind of protection."""


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
