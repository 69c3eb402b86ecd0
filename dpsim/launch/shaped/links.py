"""Asks the switch of shaped hosts, from one of their ranks, for the links of a network."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterable

from dpsim.errors import ConfigError
from dpsim.network import Network

VARIABLE = "DPSIM_SWITCH"
"""In the ranks' environment: the socket of the switch that joins their hosts."""
_ANSWER_S = 30.0


def on_shaped_hosts() -> bool:
    """Return whether this process runs on a shaped host."""
    return VARIABLE in os.environ


def not_its_hosts(network: Network) -> ConfigError:
    """Return the error of a command that has not started its ranks on the hosts of a network."""
    return ConfigError(
        f"the network {network.token} with a command that does not start its ranks on shaped hosts",
        allowed="node, or paced:LATENCY,BANDWIDTH",
        remedy="use one of them, or a command that does: calibrate, sweep or train",
    )


def check(networks: Iterable[Network], address: str) -> None:
    """Raise ``ConfigError`` for a condition that this machine's kernel cannot bring about, before any rank starts."""
    tried = False
    for network in networks:
        if network.condition("delay") or network.condition("loss"):
            shape(network, address)
            tried = True
    if tried:
        shape(None, address)


def shape(network: Network | None, address: str | None = None) -> None:
    """Give the links of this job's hosts the rates of a network; of ``None`` none: they are as fast as they go.

    ``address`` is that of their switch, which ranks on the hosts know. Raises ``ConfigError`` for a condition that this
    machine's kernel cannot bring about.
    """
    address = address or os.environ[VARIABLE]
    request: dict[str, object] = {"rates": [], "uplink": 0.0, "background": 0.0, "delay_s": 0.0, "loss": 0.0}
    if network is not None:
        uplink = network.uplink_bytes_per_s
        request = {
            "rates": network.rates_bytes_per_s(),
            "uplink": uplink if math.isfinite(uplink) else 0.0,
            "background": (network.condition("background") or 0.0) * network.rate_bytes_per_s,
            "delay_s": network.condition("delay") or 0.0,
            "loss": network.condition("loss") or 0.0,
        }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b'{"error": "the switch has ended"}')
        except OSError as error:
            answer = {"error": f"the switch does not answer: {error}"}
    if "error" in answer:
        raise ConfigError(
            f"the network {network.token if network else 'unshaped'} cannot be made here: {answer['error']}",
            allowed="what this machine's kernel can do: delay needs its netem, loss the command nft",
            remedy="leave the condition out, or measure on a machine that has it",
        )
