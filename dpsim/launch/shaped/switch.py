"""Holds the network namespaces of some hosts and of the switch that joins them, and shapes their links when asked.

``python -I -S switch.py FOLDER HOSTS PACKET_BYTES``. No namespace has a name: they are this process's.
When it ends, which it does with its standard input, and the ranks end, the kernel removes them with all that is in
them. So nothing is left behind however a run ends, and runs at the same time cannot meet. Only the standard library
is used, to start fast.

It prints one line, JSON: how to enter each host, or why there are none. On the socket ``switch.socket`` in the folder
it answers the line of a connection, a JSON object with the rates of links, by another: ``{"background": [process]}``,
or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

NEW_NET, NEW_UTS, NEW_USER, PR_SET_PDEATHSIG = 0x40000000, 0x04000000, 0x10000000, 1
NETWORK, PREFIX, SWITCH = "10.77", 16, "10.77.255.254"
INTERFACE, SOCKET = "eth0", "switch.socket"
BURST_BYTES, BURST_S = 16384, 2.5e-4
"""The most that a host may send at once at any speed, in bytes and in seconds at its rate: a longer burst would let the
messages of small buckets through for nothing. Each packet must fit into it, and each costs the cores some time."""
SWITCH_BURST, QUEUE = 65536, "100ms"
"""The same of the switch, whose queue a host's own pace keeps empty; and the longest that a packet waits in a queue."""
SPARE_BYTES = 100
TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
    "tcp_early_retrans": "0",
}
"""One way of sending for every machine, which every kernel lets a namespace choose. Machines whose default is bbr paced
messages with pauses by old estimates: the same ones in a row took 3.6 times the line's time, by reno 1.1. A probe for
lost packets is sent only because a queue is long."""
DATAGRAM_BYTES, BACKGROUND_PORT = 8000, 9
REQUEST_S = 5.0
LIMITS = "/proc/sys/user/max_net_namespaces and max_user_namespaces"

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """Why there are no hosts here."""


def address(host: int) -> str:
    """Return the address of a host."""
    return f"{NETWORK}.{host // 200}.{host % 200 + 1}"


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _new_namespace() -> int:
    _call("unshare", NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _named(host: int) -> int:
    """Make a namespace of names, in which a host has its address for a name."""
    _call("unshare", NEW_UTS)
    socket.sethostname(address(host))
    return os.open("/proc/self/ns/uts", os.O_RDONLY)


def _reason(error: OSError) -> str:
    limited = f", the limit of {LIMITS}" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror}{limited}"


def _tool(namespace: int, program: str, lines: list[str]) -> None:
    """Run the lines of a batch in a namespace. Raises ``Refused`` with what the program says."""
    _call("setns", namespace, NEW_NET)
    done = subprocess.run([program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{program}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")


class Switch:
    """The hosts and what joins them: a bridge, or one for each half of the hosts and a link between."""

    def __init__(self, hosts: int, packet_bytes: int) -> None:
        self._packet_bytes, self._own_user = packet_bytes, False
        try:
            try:
                self._switch = _new_namespace()
            except PermissionError:
                self._own_user = True
                self._become_root()
                self._switch = _new_namespace()
            self.hosts = [_new_namespace() for _ in range(hosts)]
            self._names = [_named(host) for host in range(hosts)]
        except OSError as error:
            kind = "user and network" if self._own_user else "network"
            raise Refused(f"{kind} namespaces cannot be made: {_reason(error)}") from error
        self._ports = [f"p{host}" for host in range(hosts)]
        self._background: subprocess.Popen[bytes] | None = None
        self._halves = self._loses = False
        self._join()

    def _become_root(self) -> None:
        user, group = os.getuid(), os.getgid()
        _call("unshare", NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            _write(f"/proc/self/{name}", text)

    def _join(self) -> None:
        lines = ["link set lo up", "link add name uplink0 type veth peer name uplink1"]
        for half in (0, 1):
            lines += [f"link add bridge{half} type bridge", f"link set bridge{half} up"]
            lines += [f"link set uplink{half} master bridge{half} gso_max_size {self._packet_bytes} up"]
        lines += [f"address add {SWITCH}/{PREFIX} dev bridge0"]
        for port, host in zip(self._ports, self.hosts, strict=True):
            peer = f"peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{host}"
            lines += [
                f"link add {port} type veth {peer}",
                f"link set {port} gso_max_size {self._packet_bytes} master bridge0 up",
            ]
        _tool(self._switch, "ip", lines)
        for number, host in enumerate(self.hosts):
            lines = ["link set lo up", f"address add {address(number)}/{PREFIX} dev {INTERFACE}"]
            _tool(host, "ip", [*lines, f"link set {INTERFACE} gso_max_size {self._packet_bytes} up"])
            for name, value in TCP.items():
                with contextlib.suppress(OSError):
                    _write(f"/proc/sys/net/ipv4/{name}", value)

    def shape(self, rates: list[float], uplink: float, background: float, delay_s: float, loss: float) -> None:
        """Give each host's link its rate in bytes a second, in both directions; no rates: as fast as it goes.

        Halves of the hosts are joined by an ``uplink``, where it has a rate (0: none). ``background`` is the rate of a
        flow from the first host to the second.
        """
        self.end_background()
        self._divide(halves=uplink > 0)
        of_hosts = rates or [0.0] * len(self.hosts)
        self._limit(self._switch, {"uplink0": uplink, "uplink1": uplink}, self._burst(uplink))
        self._limit(self._switch, dict(zip(self._ports, of_hosts, strict=True)), SWITCH_BURST)
        for host, rate in zip(self.hosts, of_hosts, strict=True):
            self._limit(host, {INTERFACE: rate}, self._burst(rate), delay_s)
            self._lose(host, loss)
        if background:
            self._send(background)

    def _burst(self, rate: float) -> int:
        return max(self._packet_bytes + SPARE_BYTES, min(BURST_BYTES, round(BURST_S * rate)))

    def _limit(self, namespace: int, rates: dict[str, float], burst: int, delay_s: float = 0.0) -> None:
        lines = []
        for device, rate in rates.items():
            lines += [f"qdisc replace dev {device} root noqueue"]
            if rate:
                limit = f"rate {round(8 * rate)}bit burst {burst}b latency {QUEUE}"
                lines += [f"qdisc replace dev {device} root handle 1: tbf {limit}"]
        _tool(namespace, "tc", lines)
        for device in rates if delay_s else ():
            try:
                delay = f"netem delay {round(1e6 * delay_s)}us limit 100000"
                _tool(namespace, "tc", [f"qdisc replace dev {device} parent 1:1 {delay}"])
            except Refused as error:
                raise Refused(f"packets cannot be delayed, which is done by the kernel's netem ({error})") from error

    def _lose(self, host: int, loss: float) -> None:
        if not loss and not self._loses:
            return
        self._loses = loss > 0
        _call("setns", host, NEW_NET)
        rules = "flush ruleset\n"
        if loss:
            drop = f"numgen random mod 100000 < {round(100000 * loss)} drop"
            rules += f"table ip dpsim {{ chain input {{ type filter hook input priority 0; {drop}; }} }}\n"
        try:
            done = subprocess.run(["nft", "-f", "-"], input=rules, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise Refused("packets cannot be lost: the command nft is missing") from error
        if done.returncode:
            raise Refused(f"packets cannot be lost by nft: {' '.join(done.stderr.split())}")

    def _divide(self, *, halves: bool) -> None:
        if halves != self._halves:
            later = self._ports[len(self._ports) // 2 :]
            lines = [f"link set {port} master bridge{int(halves)}" for port in later]
            # else frames to a host that is back would go by the uplink, until the host sends one itself
            lines += [f"link set bridge{half} type bridge fdb_flush" for half in (0, 1)]
            _tool(self._switch, "ip", lines)
            self._halves = halves

    def _send(self, rate: float) -> None:
        _call("setns", self.hosts[1], NEW_NET)
        self._unread = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._unread.bind((address(1), BACKGROUND_PORT))
        _call("setns", self.hosts[0], NEW_NET)
        command = [sys.executable, "-I", "-S", __file__, "--send", address(1), str(rate)]
        self._background = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)

    @property
    def background(self) -> int | None:
        """The process that sends the flow beside the ranks' messages; ``None`` without one."""
        return None if self._background is None else self._background.pid

    def end_background(self) -> None:
        """End the flow beside the ranks' messages, if there is one."""
        if self._background is not None:
            self._background.kill()
            self._background.wait()
            self._unread.close()
            self._background = None

    def doors(self) -> dict[str, Any]:
        """Return how to enter the switch's namespace and those of the hosts, each from the one before."""
        _call("setns", self._switch, NEW_NET)
        user = [f"--user=/proc/{os.getpid()}/ns/user", "--preserve-credentials"] if self._own_user else []
        own = f"/proc/{os.getpid()}/fd"
        both = enumerate(zip(self.hosts, self._names, strict=True))
        return {
            "switch": ["nsenter", *user, f"--net={own}/{self._switch}"],
            "hosts": {address(n): f"--net={own}/{host} --uts={own}/{name}" for n, (host, name) in both},
        }


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def send(to: str, rate: float) -> None:
    """Send datagrams at a rate in bytes a second, for ever, at absolute times."""
    import time

    flow, message = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), bytes(DATAGRAM_BYTES)
    due_s = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            flow.sendto(message, (to, BACKGROUND_PORT))
        due_s = max(due_s + DATAGRAM_BYTES / rate, time.monotonic() - 0.1)
        time.sleep(max(0.0, due_s - time.monotonic()))


def _answer(switch: Switch, line: bytes) -> dict[str, Any]:
    try:
        switch.shape(**json.loads(line))
    except (Refused, OSError, ValueError, TypeError) as error:
        return {"error": str(error)}
    return {"background": [] if switch.background is None else [switch.background]}


def serve(folder: str, hosts: int, packet_bytes: int) -> None:
    """Answer requests until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        switch = Switch(hosts, packet_bytes)
        doors: dict[str, Any] = switch.doors()
    except (Refused, FileNotFoundError) as error:
        why = f"{error.filename} is missing" if isinstance(error, FileNotFoundError) else str(error)
        print(json.dumps({"error": why}), flush=True)
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, SOCKET))
        listener.listen()
        print(json.dumps(doors), flush=True)
        while _awaited(listener, switch.background):
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as lines, contextlib.suppress(OSError):
                connection.settimeout(REQUEST_S)
                lines.write(json.dumps(_answer(switch, lines.readline())).encode() + b"\n")
    switch.end_background()


def _awaited(listener: socket.socket, background: int | None) -> bool:
    """Wait for a connection; False when standard input ends. Exits with a message when the background flow ends."""
    with contextlib.ExitStack() as stack:
        flow = None if background is None else os.pidfd_open(background)
        if flow is not None:
            stack.callback(os.close, flow)
        ready = select.select([sys.stdin, listener, *([] if flow is None else [flow])], [], [])[0]
    if sys.stdin in ready:
        return False
    if flow in ready:
        sys.exit("the process that sends the flow in the background has ended")
    return True


if __name__ == "__main__":
    if sys.argv[1] == "--send":
        send(sys.argv[2], float(sys.argv[3]))
    else:
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
