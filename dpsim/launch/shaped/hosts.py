"""Starts ranks on shaped hosts: one on each, in a network namespace of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import child_process, scratch
from dpsim.launch.shaped import VARIABLE, switch
from dpsim.network import Network

_NEEDED = ("ip", "tc", "nsenter")
_TOOL_FOLDERS = ("/usr/sbin", "/sbin")
"""Where ``ip`` and ``tc`` are, which the PATH of users other than root may leave out."""
_END_S = 5.0
_LEAST_PACKET = 1500
_PRIORITY = 10
"""Ranks leave the cores to the kernel's own network threads, which else wait for milliseconds where ranks compute."""
_REMEDY = "use root, or a machine that allows user namespaces; or paced:LATENCY,BANDWIDTH, which needs neither"
_TRANSPORT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": switch.INTERFACE, "GLOO_SOCKET_IFNAME": switch.INTERFACE}
_LAUNCHER = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in
{doors}
esac
exec nsenter $door nice -n {priority} sh -c "exec $*"
"""


@dataclass(frozen=True)
class ShapedHosts:
    """Hosts that are ready: ``enter`` begins a command among them, where ``launcher`` starts another one on a host.

    ``namespaces`` are the files of the hosts' network namespaces, which a process among them may enter by itself.
    They end with ``switch``, the process that holds them, whose standard output ends then.
    """

    addresses: tuple[str, ...]
    namespaces: tuple[str, ...]
    enter: tuple[str, ...]
    launcher: Path
    environment: Mapping[str, str]
    switch: subprocess.Popen[bytes]

    def mpiexec(self, command: list[str], ranks: Sequence[int]) -> list[str]:
        """Return hydra's ``mpiexec``, to be run among the hosts, with so many ``ranks`` on the first one, and so on."""
        hosts = ",".join(f"{address}:{count}" for address, count in zip(self.addresses, ranks, strict=False))
        flags = ["-launcher", "ssh", "-launcher-exec", str(self.launcher), "-localhost", switch.SWITCH, "-hosts", hosts]
        return [command[0], *flags, *command[1:]]

    def among(self, command: list[str]) -> list[str]:
        """Return a command that runs another one among the hosts, whose processes then enter ``namespaces``."""
        return [*self.enter, "nice", "-n", str(_PRIORITY), *command]


@contextlib.contextmanager
def shaped_hosts(networks: Sequence[Network], folder: Path) -> Iterator[ShapedHosts]:
    """Make the hosts of some networks, which end with the context or with this process.

    Their files are in ``folder``, a scratch folder.
    Raises ``ConfigError`` where none can be made, and ``CommunicationError`` where that is disturbed.
    """
    path, count = _path_with_tools(), networks[0].hosts
    near = scratch.short_path(folder, folder)
    program = [sys.executable, "-I", "-S", switch.__file__, str(near), str(count), str(packet_bytes(networks))]
    environment = {**os.environ, "PATH": path, **scratch.environment(folder)}
    with subprocess.Popen(
        program,
        env=environment,
        start_new_session=True,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            if not (said := process.stdout.readline()):
                raise CommunicationError(ending(process), remedy="another process may have ended it")
            doors: dict[str, Any] = json.loads(said)
            if "error" in doors:
                raise _refused(count, doors["error"])
            launcher = near / "launch.sh"
            cases = [f"{host}) door='{door}' ;;" for host, door in doors["hosts"].items()]
            launcher.write_text(_LAUNCHER.format(doors="\n".join(cases), priority=_PRIORITY), encoding="utf-8")
            launcher.chmod(0o700)
            variables = _TRANSPORT | {"PATH": path, VARIABLE: str(near / switch.SOCKET)}
            namespaces = tuple(door.split()[0].removeprefix("--net=") for door in doors["hosts"].values())
            enter = tuple(doors["switch"])
            yield ShapedHosts(tuple(doors["hosts"]), namespaces, enter, launcher, variables, process)
        finally:
            with child_process.signals_ignored():
                _end(process)


def packet_bytes(networks: Sequence[Network]) -> int:
    """Return the bytes that the kernel hands over as one packet: a burst of the slowest network, or one MTU."""
    in_time = int(min(network.bandwidth_bytes_per_s for network in networks) * switch.BURST_S)
    return max(_LEAST_PACKET, min(switch.BURST_BYTES - switch.SPARE_BYTES, in_time))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:  # it was stopped
        process.kill()


def ending(process: subprocess.Popen[bytes]) -> str:
    """Say how the process that holds hosts, and has closed its output, ended."""
    assert process.stderr is not None
    said = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
    name = f"the process that holds the hosts of the shaped network ({process.pid})"
    if (code := process.wait()) < 0:
        return f"{name} was killed by {signal.Signals(-code).name}"
    return f"{name} ended with exit code {code}{': ' if said else ''}{''.join(said[-1:])}"


def _path_with_tools() -> str:
    """Return the folders in which all commands are. Raises ``ConfigError`` where one is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_TOOL_FOLDERS])
    missing = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    if missing:
        raise ConfigError(
            f"a shaped network needs the command{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            allowed="Linux with iproute2 and util-linux",
            remedy="install them (Debian: apt-get install iproute2 util-linux), or use paced:LATENCY,BANDWIDTH",
        )
    return path


def _refused(count: int, why: str) -> ConfigError:
    return ConfigError(
        f"{count} shaped hosts cannot be made here: {why}",
        allowed="Linux, where this user may make network namespaces, bridges and token buckets (tbf)",
        remedy=_REMEDY,
    )
