"""The machines that ranks are started on: a hostfile, as Open MPI or mpich has them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dpsim.errors import ConfigError

VARIABLE = "DPSIM_HOSTFILE"
"""Names the hostfile for every job that is started, unless a command is given another."""

_LINE = re.compile(r"(?P<name>[\w.-]+|\[[0-9a-fA-F:]+\])(?::(?P<mpich>\d{1,6})|\s+slots\s*=\s*(?P<openmpi>\d{1,6}))?")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine and how many ranks it takes."""

    name: str
    slots: int = 1


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of lines like ``node1 slots=4`` or ``node1:4`` (one slot where no number stands); ``#`` comments.

    Raises ``ConfigError``, which names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the hostfile {path}: {reason}", allowed="a text file") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = _LINE.fullmatch(text)
        slots = int((match["mpich"] or match["openmpi"] or 1) if match else 0)
        if match is None or slots < 1:
            raise ConfigError(f"line {number} of {path} is {text!r}", allowed="node1, node1:4 or node1 slots=4")
        found.append(Host(name=match["name"], slots=slots))
    if not found:
        raise ConfigError(f"the hostfile {path} names no host", allowed="a host a line: node1:4 or node1 slots=4")
    return tuple(found)


def chosen(devices: int, environment: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """The hosts of the hostfile in use, none where there is none. Raises ``ConfigError`` for too few slots."""
    if not (name := environment.get(VARIABLE)):
        return ()
    hosts = read_hostfile(Path(name))
    slots = sum(host.slots for host in hosts)
    if devices > slots:
        raise ConfigError(
            f"{devices} devices, and the hostfile {name} has {slots} slot{'s' if slots > 1 else ''}",
            allowed=f"1 to {slots} devices",
            remedy="give its hosts more slots: node1:4 or node1 slots=4",
        )
    return hosts


@contextlib.contextmanager
def hostfile(path: Path | None) -> Iterator[None]:
    """Meanwhile, ranks are started on the hosts of this file; None changes nothing. Raises ``ConfigError``."""
    if path is None:
        yield
        return
    read_hostfile(path)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def elsewhere(hosts: tuple[Host, ...]) -> bool:
    """Whether some host is another machine than this one."""
    here = {"localhost", "127.0.0.1", "[::1]", socket.gethostname(), socket.getfqdn()}
    return not {host.name for host in hosts} <= here


def mpiexec_arguments(hosts: tuple[Host, ...], flavour: str) -> list[str]:
    """The flags that make ``mpiexec`` use these hosts; it fills each host's slots before the next one's."""
    if not hosts:
        return []
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    return ["--host" if flavour == "openmpi" else "-hosts", listed]
