"""Starts ranks on shaped hosts: one on each, in a network namespace of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsim.errors import ConfigError
from dpsim.launch import child_process, scratch
from dpsim.launch.shaped import switch
from dpsim.network import Network

VARIABLE = "DPSIM_SWITCH"
"""In the ranks' environment: the socket of the switch that joins their hosts."""
_NEEDED = ("ip", "tc", "nsenter", "unshare")
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
exec nsenter "$door" unshare --uts sh -c 'echo "$0" > /proc/sys/kernel/hostname; exec nice -n {priority} sh -c "$*"' \
"$host" "$@"
"""


@dataclass(frozen=True)
class ShapedHosts:
    """Hosts that are ready: ``enter`` begins a command among them, where ``launcher`` starts another one on a host.

    ``namespaces`` are the files of the hosts' network namespaces, which a process among them may enter by itself.
    """

    addresses: tuple[str, ...]
    namespaces: tuple[str, ...]
    enter: tuple[str, ...]
    launcher: Path
    environment: Mapping[str, str]

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

    Raises ``ConfigError`` where none can be made.
    """
    _check_tools()
    count = networks[0].hosts
    program = [sys.executable, "-I", "-S", switch.__file__, str(folder), str(count), str(packet_bytes(networks))]
    environment = {**os.environ, **scratch.environment(folder)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, env=environment, start_new_session=True, cwd="/", **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            said = process.stdout.readline()
            doors = json.loads(said) if said else {"error": process.stderr.read().decode("utf-8", "replace").strip()}
            if "error" in doors:
                raise _refused(count, doors["error"])
            launcher = folder / "launch.sh"
            cases = [f"{host}) door={door} ;;" for host, door in doors["hosts"].items()]
            launcher.write_text(_LAUNCHER.format(doors="\n".join(cases), priority=_PRIORITY))
            launcher.chmod(0o700)
            variables = _TRANSPORT | {VARIABLE: str(folder / switch.SOCKET)}
            namespaces = tuple(door.removeprefix("--net=") for door in doors["hosts"].values())
            yield ShapedHosts(tuple(doors["hosts"]), namespaces, tuple(doors["switch"]), launcher, variables)
        finally:
            with child_process.signals_ignored():
                process.communicate()


def packet_bytes(networks: Sequence[Network]) -> int:
    """Return the bytes that the kernel hands over as one packet: a burst of the slowest network, or one MTU."""
    in_time = int(min(network.bandwidth_bytes_per_s for network in networks) * switch.BURST_S)
    return max(_LEAST_PACKET, min(switch.BURST_BYTES - switch.SPARE_BYTES, in_time))


def _check_tools() -> None:
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"a shaped network needs the command{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            allowed="Linux with iproute2 and util-linux",
            remedy="install them (Debian: apt-get install iproute2 util-linux), or use paced:LATENCY,BANDWIDTH",
        )


def _refused(count: int, why: str) -> ConfigError:
    return ConfigError(
        f"{count} shaped hosts cannot be made here: {why}",
        allowed="Linux, where this user may make network namespaces, bridges and token buckets (tbf)",
        remedy=_REMEDY,
    )
