"""The process that starts the ranks of a measurement, which are forked from it: PyTorch is loaded once. Loads torch.

``start.py`` calls it with the folder in which all meet. There are the parts (``visit.PARTS``), and the socket on which
it is told which of them to start. Where a rank fails it ends the others, and then itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401 - DDP loads it: here once, before ranks are forked, and not in each of them

from dpsim.errors import ConfigError
from dpsim.torch.script.probe.endings import end_process
from dpsim.torch.script.probe.in_turns.part import take_part
from dpsim.torch.script.probe.in_turns.visit import CONTROL, FAILED, NAMESPACES, PARTS, STARTER
from dpsim.torch.script.probe.reproduce.values import seed_untouched

_GRACE_S = 0.5
"""How long the other ranks have to tell of their own errors: the first is told, and no consequence of it."""
_POLL_S = 0.2
_PR_SET_PDEATHSIG, _NEW_NET = 1, 0x40000000
_WELL, _HAS_TOLD = 76, 77
"""The exit codes of a rank that has done its part, and of one that has told why it failed. A script may end by 0."""


def main(folder: Path) -> None:
    """Start the ranks of the parts that are asked for, until no more is, and end with the last of them."""
    parts = json.loads((folder / PARTS).read_text(encoding="utf-8"), object_hook=lambda each: SimpleNamespace(**each))
    control = Client(str(folder / CONTROL), "AF_UNIX")
    control.send((STARTER, 0))
    ranks = Ranks(folder)
    asked: list[Connection] = [control]
    while asked or ranks.left:
        if control in wait([*asked, *ranks.handles], None if ranks.all_have_handles else _POLL_S):
            try:
                for number in control.recv():
                    ranks.start(parts[number], control)
            except (EOFError, OSError):
                asked.clear()
        if not ranks.all_well():
            time.sleep(_GRACE_S)
            ranks.end()
            sys.exit(1)


class Ranks:
    """The processes of the ranks that were started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.left: dict[int, tuple[Any, int]] = {}
        """The part and the rank of each process."""
        self._handle: dict[int, int] = {}

    @property
    def handles(self) -> list[int]:
        """What can be waited for until a rank ends, on Linux 5.3 or newer."""
        return list(self._handle.values())

    @property
    def all_have_handles(self) -> bool:
        return len(self._handle) == len(self.left)

    def start(self, part: Any, control: Connection) -> None:
        """Start the ranks of a part."""
        for rank in range(part.ranks):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_rank(part, rank, self._folder)
            self.left[pid] = part, rank
            with contextlib.suppress(OSError, AttributeError):
                self._handle[pid] = os.pidfd_open(pid)

    def all_well(self) -> bool:
        """Return whether no rank has failed; one that a signal has ended cannot tell so itself."""
        well = True
        for pid in list(self.left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                part, rank = self.left.pop(pid)
                if pid in self._handle:
                    os.close(self._handle.pop(pid))
                if os.WIFSIGNALED(status):
                    _tell(self._folder, part, rank, {"signal": os.WTERMSIG(status)})
                elif os.WEXITSTATUS(status) not in (_WELL, _HAS_TOLD):
                    _tell(self._folder, part, rank, {"exit_code": os.WEXITSTATUS(status)})
                well = well and status == _WELL << 8
        return well

    def end(self) -> None:
        """Kill the others."""
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become_rank(part: Any, rank: int, folder: Path) -> NoReturn:
    code = _HAS_TOLD
    try:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _enter_host(rank)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored until here
        outputs: Any = (sys.stdout, sys.stderr)
        for stream in outputs:
            stream.reconfigure(line_buffering=True, write_through=False)  # whole lines of each rank
        seed_untouched(rank)
        take_part(part, rank, str(folder), {})
        code = _WELL
    except ConfigError as error:
        _tell(folder, part, rank, {"error": (error.given, error.allowed, error.remedy)})
    except EOFError:
        code = _WELL  # who gives the turns has ended
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        _tell(folder, part, rank, {"traceback": "".join(lines), "line": lines[-1].strip()})
    end_process(code)


def _enter_host(rank: int) -> None:
    """Become a process of a rank's host, where ranks have hosts of their own."""
    if NAMESPACES in os.environ:
        with open(os.environ[NAMESPACES].split(os.pathsep)[rank], "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _tell(folder: Path, part: Any, rank: int, why: dict[str, Any]) -> None:
    """Write why a rank has failed, under another name until it is whole."""
    path = folder / FAILED.format(part.number, rank)
    partial = path.with_name(path.name + "~")
    partial.write_text(json.dumps({"rank": rank, "at_s": time.time(), **why}), encoding="utf-8")
    partial.replace(path)
