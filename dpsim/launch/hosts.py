"""The hosts that ranks are started on: a hostfile in the format of Open MPI or mpich."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dpsim.errors import ConfigError

VARIABLE = "DPSIM_HOSTFILE"
"""Names the hostfile of every job that is started, unless a command names another one."""

_LINE = re.compile(r"(?P<name>[\w.-]+|\[[0-9a-fA-F:]+\])(?::(?P<mpich>\d{1,6})|\s+slots\s*=\s*(?P<openmpi>\d{1,6}))?")


class Host(NamedTuple):
    """A host and the number of ranks it can run."""

    name: str
    slots: int = 1


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a file with lines like ``node1 slots=4`` or ``node1:4`` (1 slot without a number); ``#`` comments.

    Raises ``ConfigError``, which names the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the hostfile {path}: {reason}", allowed="a text file") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        if text := line.partition("#")[0].strip():
            match = _LINE.fullmatch(text)
            slots = int(match["mpich"] or match["openmpi"] or 1) if match else 0
            if match is None or slots < 1:
                raise ConfigError(f"line {number} of {path} is {text!r}", allowed="node1, node1:4 or node1 slots=4")
            hosts.append(Host(match["name"], slots))
    if not hosts:
        raise ConfigError(f"the hostfile {path} names no host", allowed="one host per line: node1:4 or node1 slots=4")
    return tuple(hosts)


def selected(devices: int, environment: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Return the hosts of the hostfile in use, none without one. Raises ``ConfigError`` if their slots are too few."""
    if not (name := environment.get(VARIABLE)):
        return ()
    hosts = read_hostfile(Path(name))
    slots = sum(host.slots for host in hosts)
    if devices > slots:
        raise ConfigError(
            f"{devices} devices, but the hostfile {name} has {slots} slot{'s' if slots > 1 else ''}",
            allowed=f"1 to {slots} devices",
            remedy="give its hosts more slots: node1:4 or node1 slots=4",
        )
    return hosts


@contextlib.contextmanager
def hostfile(path: Path | None) -> Iterator[None]:
    """Start ranks on the hosts of this file while the context is open. None changes nothing. Raises ``ConfigError``."""
    before = os.environ.get(VARIABLE)
    if path is not None:
        read_hostfile(path)
        os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def any_remote(hosts: tuple[Host, ...]) -> bool:
    """Return whether any of the hosts is not this machine."""
    names_of_this_machine = {"localhost", "127.0.0.1", "[::1]", socket.gethostname(), socket.getfqdn()}
    return not {host.name for host in hosts} <= names_of_this_machine


def mpiexec_arguments(hosts: tuple[Host, ...], flavour: str) -> list[str]:
    """Return the flags for ``mpiexec`` to use these hosts; it fills one host's slots before it goes on to the next."""
    host_list = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    return ["--host" if flavour == "openmpi" else "-hosts", host_list] if hosts else []
